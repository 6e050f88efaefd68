"""The commands on what a training left: export, merge, chat."""
