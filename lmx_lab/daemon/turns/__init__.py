"""Turns: what one does next, doing it, and what is written down of it."""
