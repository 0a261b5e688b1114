"""The database, and the event log in it."""
