"""Answer a prompt for each row of a table, and return the answers as a table."""
