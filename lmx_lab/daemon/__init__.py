"""Sessions, turns with tools, and an event log that loses nothing: a server beside that of the model."""
