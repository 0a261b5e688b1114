"""What the inference server and the daemon share: connections, guard, bodies, errors, streams."""

from dataclasses import dataclass

SMALL_BYTES = 64 * 1024
"""This much of each body and WebSocket message does not count against the memory for all of them, so that large ones,
however slow, do not keep small ones out."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server for untrusted, slow and lost clients."""

    connections: int = 2000
    """Largest number of simultaneous connections, including WebSockets and streams."""
    idle_s: float = 30
    """Time for which a connection may be idle between two requests, or before the first one. It is longer than httpx
    keeps idle connections (5 s), so that httpx never sends into a connection that is closing."""
    head_s: float = 20.0
    """Time for the head of a request, from its first byte."""
    body_s: float = 30.0
    body_bytes: int = 128 * 1024
    """Number of bytes of a body that have to arrive in every ``body_s``, unless it ends: 4.3 KB/s, so that 8 MiB may
    take half an hour."""
    late_s: float = 1.0
    """If the loop handles one of these deadlines this much too late, it was busy or suspended and has not read what
    arrived. The client then gets the same time again."""
    linger_s: float = 2.0
    """Time in which the data of a client that was answered while sending are read and dropped. If the connection were
    closed immediately, the client could lose the response."""
    memory_bytes: int = 256 * 2**20
    """Memory for the bodies of all current requests, and the same again for incomplete WebSocket messages. Not counted
    are the first ``SMALL_BYTES`` of each."""
    frames_per_s: int = 500
    """Largest number of messages, pings and pongs per second on a WebSocket. Also the number of fragments in a message,
    in addition to one per 64 bytes."""
    keep_alive_s: float = 5.0
    """Time in which a stream sends something. Proxies and clients close connections that are silent for longer, some
    after 10 s."""
    trim_s: float = 5.0
    """Maximum time after a request until freed memory is returned to the operating system, and minimum time between two
    such returns."""
    cancel_s: float = 2.0
    """Time that cancelled work gets to finish when the server stops."""
