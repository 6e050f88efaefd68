"""Plans and timelines for people: text, pictures, figures."""
