"""What results are made of: tables, figures, statistics, the facts of a measurement, and SQLite files."""
