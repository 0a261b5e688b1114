"""Attack a server as one client while measuring health requests and the chats of another client."""

from soak.hostile.attacked_server import run

__all__ = ["run"]
