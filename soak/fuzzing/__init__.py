"""Requests that are nearly right, what is due for them, and who sends them."""
