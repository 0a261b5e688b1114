"""Set options of accepted connections to detect clients that have disappeared or accept no data."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket

from lmx_lab.http.guard import is_loopback

KEEPALIVE_IDLE_S = 5
"""Time without data after which the system probes whether the other machine still responds."""
KEEPALIVE_INTERVAL_S = 3
"""Time between two probes."""
KEEPALIVE_PROBES = 3
"""Number of unanswered probes after which the system closes the connection. This takes 14 s. Data that is
sent meanwhile, such as a heartbeat, has another 14 s to be acknowledged, so it can take 28 s."""
UNSENT_BYTES = 16 * 1024
"""Number of unsent bytes in the system's buffer, and again in the transport's buffer, above which the client counts as
blocked. Without this limit, the system would buffer several megabytes."""


def enable_keepalive(sock: socket.socket) -> None:
    """Make the system close this connection within 30 s after the other machine has disappeared.

    A machine that loses power or network does not close its connections. With the system's default settings, that is
    detected after two hours if nothing is sent, and after fifteen minutes otherwise. A client that accepts none of the
    data sent to it for 14 s is disconnected too, because the system cannot distinguish the two cases. Connections
    within this machine are therefore left unchanged: their peers cannot disappear undetected, but may be suspended or
    busy.
    """
    with contextlib.suppress(OSError):  # the connection has already ended
        if is_remote(sock.getpeername()[0]):
            _set_keepalive(sock)


def _set_keepalive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the first option. If an option is missing, the system's default applies.
    for names, value in (
        (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), KEEPALIVE_IDLE_S),
        (("TCP_KEEPINTVL",), KEEPALIVE_INTERVAL_S),
        (("TCP_KEEPCNT",), KEEPALIVE_PROBES),
        # Probes are sent only if no data is in transit. This option is the limit for data that is not acknowledged.
        (("TCP_USER_TIMEOUT",), 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S)),
    ):
        option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_unsent(transport: asyncio.Transport) -> None:
    """Limit the unsent data in the buffer of the system and in that of the transport."""
    transport.set_write_buffer_limits(high=UNSENT_BYTES)
    with contextlib.suppress(AttributeError, OSError):  # the system has no such option, or the connection has ended
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def is_remote(host: str) -> bool:
    """Whether the address of a peer is that of another machine, as far as it is known."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return not is_loopback(host)
    return False
