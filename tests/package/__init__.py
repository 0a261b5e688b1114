"""The package as others get it: its wheel, what its import costs, and what Binder makes of the repository."""
