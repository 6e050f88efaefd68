"""Chains of block calls: what runs forward, what runs backward, and what passes between."""
