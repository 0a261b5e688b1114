"""Generate almost valid requests, send them, and check the answers."""
