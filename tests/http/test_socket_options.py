"""The system closes connections to other machines that have disappeared."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from lmx_lab.http import socket_options
from tests.support.sockets import GET, app, connect_raw, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("host", "elsewhere"),
    [
        ("127.0.0.1", False),
        ("127.8.9.10", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("192.168.1.7", True),
        ("::ffff:192.168.1.7", True),
        ("fe80::1%eth0", True),
        ("", False),
    ],
)
def test_only_peers_on_other_machines_are_remote(host: str, elsewhere: bool) -> None:
    assert socket_options.is_remote(host) is elsewhere


@contextlib.contextmanager
def socket_pair() -> Iterator[socket.socket]:
    """Yield the accepted end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            yield accepted


def test_a_local_connection_has_no_keepalive() -> None:
    with socket_pair() as sock:
        socket_options.enable_keepalive(sock)
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_remote_connection_that_is_lost_is_closed_within_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_options, "is_remote", lambda host: True)
    with socket_pair() as sock:
        socket_options.enable_keepalive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
        names = (idle, "TCP_KEEPINTVL", "TCP_KEEPCNT")
        first, between, times = (sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        # Data sent at the end of the first period starts the second one.
        assert 5 <= first + between * times < 15
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert 5000 <= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 15_000


async def test_a_server_enables_keepalive_on_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_options, "is_remote", lambda host: True)
    async with running(app) as host, connect_raw(host) as client:
        client.send(GET)
        await client.read_response()
        (connection,) = host._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_connection_that_has_already_closed_is_not_an_error() -> None:
    with socket_pair() as sock:
        sock.close()
        socket_options.enable_keepalive(sock)
