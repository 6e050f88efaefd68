"""The search for the best plan, and what to change where none fits."""
