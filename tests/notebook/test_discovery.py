"""Tests of announcing and finding labs, with real multicast DNS on loopback."""

import contextlib
import secrets
import socket
import threading
import time

import pytest

from lmx_lab import errors
from lmx_lab.notebook import discovery
from lmx_lab.notebook.discovery import Announcement, FoundLab, find_address, find_labs, is_name
from lmx_lab.notebook.lab import attach
from tests.support.labs import serving

LOOPBACK = ["127.0.0.1"]
# Other tests announce labs at the same time.
NAME = f"<b>Anna's lab {secrets.token_hex(4)}"
QUIET_S = 1.2
"""Time after an announcement from which its name is answered at once: an answer is sent to all at most once a second
(RFC 6762, section 6)."""


@pytest.fixture
def other_program():
    """Another program on this machine that uses multicast DNS. It receives some of the answers to all others."""
    import zeroconf  # not needed by fast tests

    with contextlib.closing(zeroconf.Zeroconf(interfaces=LOOPBACK, ip_version=zeroconf.IPVersion.V4Only)):
        yield


@contextlib.contextmanager
def announced(name, port, *, key_needed=False):
    announcement = Announcement(name, port=port, addresses=LOOPBACK, key_needed=key_needed)
    try:
        yield announcement.start()
    finally:
        announcement.stop()


@contextlib.contextmanager
def waited(seconds):
    time.sleep(seconds)
    yield


# It waits for nine seconds.
@pytest.mark.long
@pytest.mark.usefixtures("other_program")
def test_labs_of_one_name_are_found_and_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "lan_addresses", lambda: LOOPBACK)
    with (
        serving(tmp_path, "echo") as lab,
        serving(tmp_path, None, api_key="s3cret") as keyed,
        announced(NAME, lab.server.port) as first,
        waited(QUIET_S),
        announced(NAME, keyed.server.port, key_needed=True) as second,
    ):
        assert (first, second) == (NAME, f"{NAME}-2")
        assert [lab for lab in find_labs() if lab.name.startswith(NAME)] == [
            FoundLab(name=first, address=lab.url, model="echo", key_needed=False),
            FoundLab(name=second, address=keyed.url, model=None, key_needed=True),
        ]
        found = discovery.discover()
        with attach(NAME.upper()) as remote:
            assert remote.url == lab.url
        with attach(second, api_key="s3cret") as remote:
            assert remote.url == keyed.url
    own = found[found["name"].str.startswith(NAME)]
    assert own["key_needed"].tolist() == [False, True]
    assert own["model"].isna().tolist() == [False, True]
    assert discovery.discover().dtypes.to_dict() == found.dtypes.to_dict()
    with pytest.raises(errors.UnreachableError, match=r"\(found: .*\); start it with --announce"):
        find_address(NAME)


@pytest.fixture
def many_names_without_address():
    """A device that continuously announces 100 names, and answers no question about them."""
    import zeroconf  # not needed by fast tests

    message = zeroconf.DNSOutgoing(0x8400)  # an authoritative answer
    for number in range(100):
        name = zeroconf.DNSPointer(discovery.SERVICE, 12, 1, 4500, f"{number}.{discovery.SERVICE}")
        message.add_answer_at_time(name, 0)
    ended = threading.Event()

    def announce(device):
        while not ended.wait(0.05):
            device.send(message)

    with contextlib.closing(zeroconf.Zeroconf(interfaces=LOOPBACK, ip_version=zeroconf.IPVersion.V4Only)) as device:
        thread = threading.Thread(target=announce, args=(device,))
        thread.start()
        yield
        ended.set()
        thread.join()


@pytest.mark.long
@pytest.mark.usefixtures("many_names_without_address")
def test_a_lab_is_found_by_its_name_among_many_others():
    with announced(NAME, 8400), waited(QUIET_S):
        assert find_address(NAME, interfaces=LOOPBACK) == "http://127.0.0.1:8400"


@pytest.mark.parametrize(
    ("name", "addresses", "message"),
    [
        ("lab", [], "no IPv4 address"),
        ("lab", ["::1"], "no IPv4 address"),
        ("x" * 64, LOOPBACK, "1 to 63 bytes"),
        ("a\nb", LOOPBACK, "without control characters"),
        ("my.lab", LOOPBACK, "without dots"),
        ("<b>lab</b>", LOOPBACK, "without dots"),
    ],
)
def test_what_cannot_be_announced_is_refused(name, addresses, message):
    with pytest.raises(errors.InvalidRequestError, match=message):
        Announcement(name, port=8400, addresses=addresses, key_needed=False)


def test_the_name_of_the_machine_has_no_domain(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop.local")
    assert Announcement(None, port=8400, addresses=LOOPBACK, key_needed=False).name == "laptop"


def test_names_are_distinguished_from_addresses():
    assert all(map(is_name, ("kitchen", "Anna's lab", "lab-2")))
    assert not any(map(is_name, ("localhost", "http://kitchen", "kitchen:8400", "192.168.1.20", "lab.example/path")))
