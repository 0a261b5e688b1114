"""Test how connections of the Jupyter server are recognized."""

from __future__ import annotations

import socket

import psutil

from lmx_lab.notebook.jupyter_server import NotebookServer


def test_a_connection_is_recognized_by_both_of_its_ends() -> None:
    server = NotebookServer(process=psutil.Process(), url="http://localhost:8888/")
    with socket.create_server(("127.0.0.1", 0)) as lab, socket.create_server(("127.0.0.1", 0)) as other:
        here, elsewhere = lab.getsockname(), other.getsockname()
        with socket.create_connection(here) as connection:
            peer = connection.getsockname()
            assert server.owns(peer, here)
            # Another process may use the same port for a connection to another address.
            assert not server.owns(peer, elsewhere)
            assert not server.owns((peer[0], peer[1] ^ 1), here)
