"""Run small versions of the parts that load a server or attack it, and test that they detect problems."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

from lmx_lab.daemon.limits import Limits
from soak import bodies, connections, cycles, load, unreachable_clients
from soak.chat_requests import CUT, HUNG, ChatResult, ReferenceChat, record_reference, reference_body, send_chat
from soak.hostile.attacked_server import AttackedServer
from soak.hostile.attacks import ATTACKS, loads
from soak.hostile.models import CONFIGS, TEMPLATES, VALID, write_hostile_models
from soak.hostile.senders import Answer
from soak.hostile_bodies import REPORTED, HostileBody
from soak.kills import daemons, pulls, servers
from soak.mutated_models import PARTS, MutatedModels
from soak.mutations import MutatedLoads
from soak.programs import SMALL_CACHE, Command, Daemon, Home, Server, end_and_check, record_leftovers
from soak.report import Row, Soak
from soak.slow_hub import SlowHub
from tests.support.models import write_tiny_llama
from tests.support.sockets import answering, streamed, whole

pytestmark = pytest.mark.long

NOTICE_SOON = (
    "from lmx_lab.http import connections as options; "
    "options.KEEPALIVE_IDLE_S, options.KEEPALIVE_INTERVAL_S, options.KEEPALIVE_PROBES = 1, 1, 1"
)


@pytest.fixture(scope="module")
def soak(tmp_path_factory, smollm2):
    folder = tmp_path_factory.mktemp("soak") / "tiny-long"
    write_tiny_llama(folder, smollm2.path, seed=0, context=8192)
    return Soak(folder=folder, quick=True, seed=3)


@pytest.fixture(scope="module")
def server(soak, tmp_path_factory):
    with Server(Home(tmp_path_factory.mktemp("home")), soak.folder, *SMALL_CACHE) as server:
        yield server


def check(*rows):
    for row in rows:
        assert row.passed, (row.wrong, row)
        assert row.requests > 0, row


# The parts


def test_disconnecting_and_slow_clients(soak, server, monkeypatch):
    monkeypatch.setattr(load, "CLIENTS", 40)
    monkeypatch.setattr(load, "QUICK_SLOW_READING_S", 1.0)
    monkeypatch.setattr(load, "SLOW_TOKENS", 500)
    valid = asyncio.run(ReferenceChat.record(server.url))
    rows = [load.flood(soak, server, valid), load.slow_readers(soak, server, valid)]
    check(*rows)
    assert all(row.faults > 0 for row in rows)


def test_hostile_bodies_are_refused_and_an_accepted_one_is_detected(server, monkeypatch):
    monkeypatch.setattr(bodies, "ROUNDS_S", 0.1)
    valid = HostileBody(name="good", path="/v1/chat/completions", make=lambda: json.dumps(reference_body()).encode())
    with bodies.Probe(server.url, "/healthz") as probe:
        place = bodies.Target("server", server, server.url, probe)
        for exchange in (place.post, place.over_websocket):
            refused, accepted = (bodies.attack(place, exchange, body) for body in (REPORTED[1], valid))
            # The duration of health requests depends on the machine, so it is not tested.
            assert refused.lost == 0, refused
            assert refused.requests >= 1 + bodies.AT_ONCE, refused
            assert "50,000 lists and objects" in refused.notes
            assert accepted.lost == accepted.requests > 0, accepted


def test_unreachable_clients_are_noticed_and_their_slots_are_freed(soak):
    (row,) = unreachable_clients.run(soak, code=NOTICE_SOON)
    if row.notes.startswith("skipped"):
        pytest.skip(row.notes)
    check(row)
    assert row.faults == 5


def test_idle_connections_beside_an_active_one(soak, server, monkeypatch):
    monkeypatch.setattr(connections, "QUICK_IDLE", 16)
    check(connections.beside_a_chat(soak, server), connections.beside_the_daemon(soak))


def test_loads_and_unloads_leave_no_process_and_no_socket(tiny_gguf, monkeypatch):
    monkeypatch.setattr(cycles, "WARM_UP", 1)
    check(cycles.load_and_unload(tiny_gguf, 2, Row(part="llama.cpp")))


def test_servers_that_are_terminated_and_killed(soak, monkeypatch):
    monkeypatch.setattr(servers, "QUICK_KILLS", 1)
    monkeypatch.setattr(servers, "QUICK_TERMS", 1)
    monkeypatch.setattr(servers, "AT_ONCE", 9)
    check(servers.terminated_under_load(soak), servers.killed_with_streams(soak))


@pytest.mark.parametrize("deletes", [False, True])
def test_a_daemon_that_is_killed_during_turns(soak, monkeypatch, deletes):
    if deletes:
        # Tokens that the log has deleted are not missed.
        delete_early = (
            "from lmx_lab.daemon.limits import Limits; from lmx_lab.daemon.storage import retention; "
            "Limits.__init__.__kwdefaults__['fold_after_s'] = 0.5; "
            "retention.run_retention.__kwdefaults__['interval_s'] = 0.2"
        )
        monkeypatch.setattr(daemons, "Daemon", partial(Daemon, code=delete_early))
        monkeypatch.setattr(daemons, "Limits", partial(Limits, fold_after_s=0.5))
    check(*daemons.run(replace(soak, kills=2 if deletes else 6)))


def test_a_download_that_is_killed(soak, tmp_path):
    starter, wheels = pulls.build_wheel(soak.folder, tmp_path / "wheels")
    with SlowHub(soak.folder, wheels=wheels, whole_s=0.5) as hub:
        from_hub = next(pulls.pulls(soak, hub, starter))
        row = pulls.killed(soak, from_hub)
    check(row)
    assert row.faults == 1


# Detection of problems


def test_a_process_left_running_is_detected_and_killed(tmp_path):
    leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    home, row = Home(tmp_path / "home"), Row(part="left")
    with Command(home, "--help", code=leave) as command:
        assert command.wait() == 0
    record_leftovers(home, row, limit_s=0.1)
    assert (row.leaked_processes, home.processes()) == (1, [])


def test_a_wrong_exit_status_is_recorded(tmp_path):
    row = Row(part="status")
    with Command(Home(tmp_path / "home"), "--help", code="import sys; sys.exit(3)") as command:
        command.wait()
        end_and_check(command, row)
    assert "exit status 3" in row.wrong[0]


def test_answers_errors_closed_connections_and_silence_are_distinguished():
    refusal = whole('{"error": {"code": "queue-full", "message": "m", "type": "t"}}', status="503 Busy")
    stream = streamed('data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n', end=False)
    with answering(refusal, stream) as raw:
        assert asyncio.run(send_chat(raw.url, reference_body())).outcome == "queue-full"
        assert asyncio.run(send_chat(raw.url, reference_body(), mode="SSE")).outcome == CUT
    with answering([]) as raw:
        assert asyncio.run(send_chat(raw.url, reference_body(), limit_s=0.05)).outcome in (HUNG, CUT)


@pytest.mark.parametrize(
    ("end", "lost", "hung"),
    [
        (ChatResult(outcome="stop", seconds=0.1), 0, 0),
        (ChatResult(outcome="stop", seconds=9.0), 0, 1),
        (ChatResult(outcome=HUNG, seconds=30.0), 0, 1),
        (ChatResult(outcome="wrong", text="x", seconds=0.1), 1, 0),
        (ChatResult(outcome=CUT, seconds=0.1), 1, 0),
    ],
)
def test_a_reference_request_is_counted_by_its_result(end, lost, hung):
    row = Row(part="good")
    record_reference(row, end)
    assert (row.lost, row.hung, row.passed) == (lost, hung, lost + hung == 0)


# Hostile and changed models


@pytest.fixture(scope="module")
def models(soak, tmp_path_factory):
    return write_hostile_models(tmp_path_factory.mktemp("models"), soak)


@pytest.fixture(scope="module")
def target(soak, models, tmp_path_factory):
    with AttackedServer(soak, tmp_path_factory.mktemp("homes"), models, []) as target:
        yield target


def test_wrong_and_late_answers_and_failing_chats_are_detected(target, models):
    def unload(url):
        target._http.post("/admin/models/unload").raise_for_status()
        return [Answer(text="500 internal-error", seconds=6.0)]

    row = target.run("unload", [replace(ATTACKS[0], name="unload", send=unload)], VALID)
    problems = " ".join(row.wrong)
    assert "500 internal-error, not one of 400" in problems
    assert "later than 5 s" in problems
    assert "chats of another client fail: 503 no-model-loaded" in problems


def test_every_hostile_model_is_loaded_by_an_attack(models):
    names = {attack.name.removeprefix("a load: ").removesuffix(", GGUF") for attack in loads(models)[:-1]}
    assert names == {*CONFIGS, *TEMPLATES}


def test_changed_models_are_refused_or_loaded_and_the_server_stays_usable(soak, tmp_path):
    rows = MutatedLoads(soak, tmp_path).run(range(len(PARTS)))
    assert [row for row in rows if not row.passed] == []
    assert rows[-1].faults == len(PARTS)
    assert len(rows) > len(PARTS) // 2


def test_the_same_seed_and_number_write_the_same_model(soak, tmp_path):
    written = []
    for name in "ab":
        (tmp_path / name).mkdir()
        models = MutatedModels(tmp_path / name, soak)
        part, path = models.write(0)
        written.append((part.name, (path / part.file).read_bytes()))
        assert written[-1][1] != (models.valid / part.file).read_bytes()
    assert written[0] == written[1]
