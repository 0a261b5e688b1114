"""Blocking clients for scripts, threads and notebook cells: the async clients, run on one background event loop."""
