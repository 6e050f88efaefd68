"""The engine: runs a schedule on workers, with the model in host memory."""
