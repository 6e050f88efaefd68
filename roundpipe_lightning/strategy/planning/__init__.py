"""The plans of a training: what they follow from, one per shape of its batches."""
