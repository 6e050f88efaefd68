"""What a plan costs: seconds, bytes moved, memory."""
