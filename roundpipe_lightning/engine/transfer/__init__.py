"""Transfers between host and device: weights, boundaries, gradients."""
