"""User code outside and inside blocks: what it sees in place of modules, devices and outputs."""
