"""The driver: user code runs once, in the Trainer's thread; calls of blocks are posted to workers."""
