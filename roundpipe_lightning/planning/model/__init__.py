"""What is planned: the model's profile and the machine."""
