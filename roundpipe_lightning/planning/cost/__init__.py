"""Costs of a plan: seconds, bytes moved, memory."""
