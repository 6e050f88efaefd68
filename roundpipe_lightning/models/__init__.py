"""Any nn.Module: its blocks, its batches, their shares of the loss, and its profile."""
