"""The model's profile and the machine."""
