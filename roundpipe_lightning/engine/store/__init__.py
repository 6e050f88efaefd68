"""Parameters and buffers in host memory, and the copies that are uploaded."""
