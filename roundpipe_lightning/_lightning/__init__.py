"""What the strategy is made of; private, one idea per module."""
