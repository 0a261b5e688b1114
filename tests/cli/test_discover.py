"""Tests of ``lmx-lab discover``, with real multicast DNS on loopback."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmx_lab.notebook import discovery
from tests.support.commands import run_command
from tests.support.labs import serving

LOOPBACK = ["127.0.0.1"]
NAME = "[bold]Anna's <lab>"


@pytest.fixture(autouse=True)
def _own_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use loopback, and a type of service of this test alone, because other tests announce labs at the same time."""
    monkeypatch.setattr(discovery, "SERVICE", f"_lmx-{secrets.token_hex(4)}._tcp.local.")
    monkeypatch.setattr(discovery, "lan_addresses", lambda: LOOPBACK)


# Announcements take a second.
@pytest.mark.slow
def test_the_labs_on_the_network_are_a_table(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lab = stack.enter_context(serving(tmp_path, "echo"))
        keyed = stack.enter_context(serving(tmp_path, None, api_key="s3cret"))
        for name, port, key_needed in ((NAME, lab.port, False), ("keyed", keyed.port, True)):
            announcement = discovery.Announcement(name, port=port, addresses=LOOPBACK, key_needed=key_needed)
            stack.callback(announcement.stop)
            announcement.start()
        lines: list[str] = []
        # On a busy machine, an answer may come later.
        while len(lines) < 3:
            lines = run_command(tmp_path, "discover", "--seconds", "3").stdout.splitlines()
    assert lines[0].split() == ["name", "address", "model", "needs", "a", "key"]
    assert [line.split() for line in lines[1:]] == [
        [*NAME.split(), lab.url, "echo", "no"],
        ["keyed", keyed.url, "yes"],
    ]


@pytest.mark.parametrize(
    ("addresses", "hint"), [(["192.0.2.5"], "serve --host 0.0.0.0 --announce"), ([], "no network connection")]
)
def test_without_labs_the_note_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: list[str], hint: str
) -> None:
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: addresses)
    ended = run_command(tmp_path, "discover", "--seconds", "0.1")
    assert (ended.status, ended.stdout) == (0, "")
    assert ended.stderr.startswith("no lab is announced on the local network; ")
    assert hint in ended.stderr
