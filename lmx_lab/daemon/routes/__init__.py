"""The daemon's routes for HTTP and WebSocket."""
