"""The exit statuses of all commands."""

FINE = 0
FAILED = 1
USAGE = 2
"""An argument, a setting or a variable of the environment is not valid; also typer's own status for this."""
INTERRUPTED = 130
"""The status that shells use for Ctrl-C."""
