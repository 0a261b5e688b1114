"""Test the addresses of a server, and the names that it accepts."""

import socket

import psutil

from lmx_lab.notebook.addresses import Addresses, NotebookServer
from lmx_lab.settings import Settings


def test_a_server_on_all_interfaces_accepts_every_name_of_this_machine(monkeypatch):
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: ["192.0.2.5", "172.17.0.1"])
    addresses = Addresses(settings=Settings(host="0.0.0.0"), port=8400)
    assert addresses.url == "http://127.0.0.1:8400"
    assert addresses.lan_urls == ["http://192.0.2.5:8400", "http://172.17.0.1:8400"]
    assert {"192.0.2.5:8400", "172.17.0.1:8400", "localhost:8400"} <= addresses.policy().hosts


def test_a_server_on_loopback_accepts_only_loopback_names():
    addresses = Addresses(settings=Settings(host="[::1]"), port=8400)
    assert (addresses.url, addresses.lan_urls) == ("http://[::1]:8400", [])
    assert addresses.policy().hosts == {"127.0.0.1:8400", "localhost:8400", "[::1]:8400"}


def test_a_connection_is_recognized_by_both_of_its_ends():
    server = NotebookServer(process=psutil.Process(), url="http://localhost:8888/")
    with socket.create_server(("127.0.0.1", 0)) as lab, socket.create_server(("127.0.0.1", 0)) as other:
        here, elsewhere = lab.getsockname(), other.getsockname()
        with socket.create_connection(here) as connection:
            peer = connection.getsockname()
            assert server.owns(peer, here)
            # Another process may use the same port for a connection to another address.
            assert not server.owns(peer, elsewhere)
            assert not server.owns((peer[0], peer[1] ^ 1), here)
