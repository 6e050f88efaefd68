"""What several hosts that train together send each other."""
