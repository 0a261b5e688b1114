"""Test the package as users install it: the wheel, the cost of its import, and Binder."""
