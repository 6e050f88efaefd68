"""The loss of a language model without whole logits."""
