"""Optimizer steps on the host, unit by unit, beside the pipeline."""
