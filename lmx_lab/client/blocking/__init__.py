"""Provide blocking clients for scripts, threads and notebook cells: the async clients, run on a background event
loop."""
