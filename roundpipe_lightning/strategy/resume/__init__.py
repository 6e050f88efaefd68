"""State that a checkpoint needs beyond Lightning's own, so that a resumed run is the same run."""
