"""What a checkpoint needs beyond Lightning's own parts, so that a resumed run is the same run."""
