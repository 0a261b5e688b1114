"""The daemon over HTTP and WebSocket."""
