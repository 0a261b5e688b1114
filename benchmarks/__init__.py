"""Benchmarks of the documented speed limits, run with ``make bench``. Not part of the wheel."""
