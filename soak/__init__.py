"""Long runs against the running programs: ``make soak``."""
