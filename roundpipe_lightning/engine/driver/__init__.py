"""The driver: user code runs once, in the Trainer's thread; calls of blocks go to workers."""
