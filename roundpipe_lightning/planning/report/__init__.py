"""Plans and timelines as text, pictures and figures."""
