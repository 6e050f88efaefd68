"""Workers: their turns, the blocks they have loaded, the user code they run."""
