"""The plan that `roundpipe-plan` prints."""
