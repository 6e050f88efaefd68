"""The optimizer's steps beside everything else: who waits for them, and when."""
