"""Devices, their streams and events, and host memory."""
