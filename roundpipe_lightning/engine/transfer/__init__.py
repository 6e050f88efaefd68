"""What moves between host and device: weights, boundaries, gradients."""
