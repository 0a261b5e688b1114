"""The SQLite database of a daemon and the event log in it."""
