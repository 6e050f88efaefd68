"""The commands: Hydra applications around the strategy, the modules and the data."""
