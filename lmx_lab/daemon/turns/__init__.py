"""Run turns: decide what a turn does next, do it, and write it to the log."""
