"""Measurements of what the issues promise, run by hand with ``make bench``. Not part of the wheel."""
