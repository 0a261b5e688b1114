"""The parts of the long runs that load, connect, cycle and kill, in a small form; and that they see what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmx_lab.values.models import ModelEntry
from soak import bodies, connections, cycles, killed_daemons, killed_pulls, killed_servers, load, vanishing
from soak.chats import CUT, HUNG, End, Good, ask, good_body, note_good
from soak.hostile_bodies import REPORTED, HostileBody
from soak.row import Row
from soak.served import SMALL_CACHE, Command, Home, Server, end_well, note_left
from soak.slow_hub import SlowHub
from soak.soak import Soak
from tests.client.raw import answering, streamed, whole
from tests.tiny import write_tiny_llama

pytestmark = pytest.mark.long

NOTICE_SOON = "from lmx_lab import transport; transport.SILENT_S, transport.AGAIN_S, transport.TIMES = 1, 1, 1"


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Soak:
    folder = tmp_path_factory.mktemp("soak") / "tiny-long"
    write_tiny_llama(folder, smollm2.path, seed=0, context=8192)
    return Soak(folder=folder, quick=True, seed=3)


@pytest.fixture(scope="module")
def server(soak: Soak, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(Home(tmp_path_factory.mktemp("home")), soak.folder, *SMALL_CACHE) as server:
        yield server


def check(*rows: Row) -> None:
    for row in rows:
        assert row.holds, row
        assert row.requests > 0, row


# The parts


def test_clients_that_leave_and_clients_that_hardly_read(
    soak: Soak, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "CLIENTS", 40)
    monkeypatch.setattr(load, "QUICK_SIPPING_S", 1.0)
    monkeypatch.setattr(load, "SIPPED_TOKENS", 500)
    good = asyncio.run(Good.first(server.url))
    rows = [load.flood(soak, server, good), load.slow_readers(soak, server, good)]
    check(*rows)
    assert all(row.faults > 0 for row in rows)


def test_hostile_bodies_are_refused_and_one_that_is_not_is_seen(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "ROUNDS_S", 0.1)
    good = HostileBody(name="good", path="/v1/chat/completions", make=lambda: json.dumps(good_body()).encode())
    with bodies.Probe(server.url, "/healthz") as probe:
        place = bodies.Place("server", server, server.url, probe)
        for exchange in (place.post, place.on_socket):
            refused, accepted = (bodies.attack(place, exchange, body) for body in (REPORTED[1], good))
            # How long health takes is this machine's affair.
            assert refused.lost == 0, refused
            assert refused.requests >= 1 + bodies.AT_ONCE, refused
            assert "50,000 lists and objects" in refused.notes
            assert accepted.lost == accepted.requests > 0, accepted


def test_peers_that_vanish_are_noticed_and_their_slots_are_free(soak: Soak) -> None:
    (row,) = vanishing.run(soak, code=NOTICE_SOON)
    if row.notes.startswith("not done"):
        pytest.skip(row.notes)
    check(row)
    assert row.faults == 5


def test_idle_connections_beside_one_that_works(soak: Soak, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "QUICK_IDLE", 16)
    check(connections.beside_a_chat(soak, server), connections.beside_the_daemon(soak))


def test_loads_and_unloads_leave_no_process_and_no_socket(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "WARM_UP", 1)
    check(cycles.cycled(tiny_gguf, 2, Row(part="llama.cpp")))


def test_a_server_that_is_told_to_end_and_one_that_is_killed(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killed_servers, "QUICK_KILLS", 1)
    monkeypatch.setattr(killed_servers, "QUICK_TERMS", 1)
    monkeypatch.setattr(killed_servers, "AT_ONCE", 9)
    check(killed_servers.told_to_end(soak), killed_servers.killed_with_streams(soak))


def test_a_daemon_that_is_killed_in_turns(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killed_daemons, "QUICK_KILLS", 2)
    check(*killed_daemons.run(soak))


def test_a_download_that_is_killed(soak: Soak, tmp_path: Path) -> None:
    starter, wheels = killed_pulls.wheel_of(soak.folder, tmp_path / "wheels")
    with SlowHub(soak.folder, wheels=wheels, whole_s=0.5) as hub:
        from_hub = next(killed_pulls.pulls(soak, hub, starter))
        row = killed_pulls.killed(soak, from_hub)
    check(row)
    assert row.faults == 1


# That they see what is wrong


def test_a_process_that_is_left_is_found_and_ended(tmp_path: Path) -> None:
    leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    home, row = Home(tmp_path / "home"), Row(part="left")
    with Command(home, "--help", code=leave) as command:
        assert command.wait() == 0
    note_left(home, row, limit_s=0.1)
    assert (row.leaked_processes, home.family()) == (1, [])


def test_a_wrong_exit_status_is_noted(tmp_path: Path) -> None:
    row = Row(part="status")
    with Command(Home(tmp_path / "home"), "--help", code="import sys; sys.exit(3)") as command:
        command.wait()
        end_well(command, row)
    assert "exit status 3" in row.wrong[0]


def test_an_answer_is_told_from_an_error_from_a_cut_and_from_silence() -> None:
    refusal = whole('{"error": {"code": "queue-full", "message": "m", "type": "t"}}', status="503 Busy")
    stream = streamed('data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n', end=False)
    with answering(refusal, stream) as raw:
        assert asyncio.run(ask(raw.url, good_body())).outcome == "queue-full"
        assert asyncio.run(ask(raw.url, good_body(), way="SSE")).outcome == CUT
    with answering([]) as raw:
        assert asyncio.run(ask(raw.url, good_body(), limit_s=0.05)).outcome in (HUNG, CUT)


@pytest.mark.parametrize(
    ("end", "lost", "hung"),
    [
        (End(outcome="stop", seconds=0.1), 0, 0),
        (End(outcome="stop", seconds=9.0), 0, 1),
        (End(outcome=HUNG, seconds=30.0), 0, 1),
        (End(outcome="wrong", text="x", seconds=0.1), 1, 0),
        (End(outcome=CUT, seconds=0.1), 1, 0),
    ],
)
def test_a_good_request_counts_as_what_became_of_it(end: End, lost: int, hung: int) -> None:
    row = Row(part="good")
    note_good(row, end)
    assert (row.lost, row.hung, row.holds) == (lost, hung, lost + hung == 0)
