"""The components of results: tables, figures, statistics, the facts of a measurement, and SQLite files."""
