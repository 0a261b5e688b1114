"""What models can call: the one shape of it, and Python functions in that shape."""
