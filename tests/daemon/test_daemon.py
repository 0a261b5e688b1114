"""Starting and stopping the daemon: one in a home, and nothing is left behind however it ends."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from logging.handlers import RotatingFileHandler

import httpx2
import pytest

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.home import DaemonHome, read_state
from lmx_lab.errors import DaemonRunningError, HostingError, InvalidRequestError
from lmx_lab.settings import Settings
from tests.support.commands import serving as command
from tests.support.daemons import UPSTREAM, client, serving, settled
from tests.support.model_server import STALL, Gate, Scripted, says
from tests.support.waiting import WAIT_S, until

pytestmark = pytest.mark.slow
THREADS = ("lmx-lab-daemon", "lmx-lab-store", "lmx-lab-reading")
"""Names of a daemon's threads. Others, such as that of a blocking client, live as long as the process."""


def new(home, **settings):
    return Daemon(settings=Settings(**{"home": home, "daemon_port": 0, "upstream": UPSTREAM, **settings}))


def check_nothing_left(home):
    """Check that no threads, lock or state file are left."""
    until(lambda: not any(thread.name.startswith(THREADS) for thread in threading.enumerate()))
    assert not (home / "daemon" / "state.json").exists()
    free = DaemonHome(home / "daemon")
    free.acquire(timeout_s=0)
    free.release()


# --- in this process


def test_the_lock_is_released_even_if_the_log_file_cannot_be_closed(tmp_path, monkeypatch):
    """On a full disk, neither the state file nor the last lines of the log can be written."""

    def full(*_):
        raise OSError(28, "No space left on device")

    daemon = new(tmp_path)
    close = RotatingFileHandler.close

    def fail_to_publish(*_: object) -> None:
        logging.getLogger("lmx_lab").warning("A line, so that the log is open.")
        full()

    def close_incompletely(handler: RotatingFileHandler) -> None:
        close(handler)
        full()

    monkeypatch.setattr(DaemonHome, "publish", fail_to_publish)
    monkeypatch.setattr(RotatingFileHandler, "close", close_incompletely)
    with pytest.raises(OSError, match="No space left"):
        daemon.start()
    check_nothing_left(tmp_path)


def test_the_daemon_stops_even_if_the_stopping_event_cannot_be_written(tmp_path, monkeypatch):
    daemon = new(tmp_path)
    daemon.start()

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("as an example")

    monkeypatch.setattr(daemon.services.store, "write", broken)
    daemon.stop()
    check_nothing_left(tmp_path)


def test_a_start_publishes_the_address_and_a_stop_leaves_nothing_behind(tmp_path):
    daemon = new(tmp_path)
    with pytest.raises(HostingError, match="not started"):
        _ = daemon.url
    daemon.start()
    daemon.start()
    state = read_state(tmp_path / "daemon")
    told = (daemon.url, daemon.token, daemon.daemon_id, os.getpid())
    assert (state.url, state.token, state.daemon_id, state.pid) == told
    with client(daemon) as http:
        assert http.get("/v3/health").json()["status"] == "ok"
    with pytest.raises(InvalidRequestError, match="drain"):
        daemon.stop(mode="banana")
    with pytest.raises(InvalidRequestError, match="coroutine"):
        daemon.run(5)
    assert (daemon.running, daemon.wait(0)) == (True, False)
    daemon.stop()
    daemon.stop()
    assert (daemon.running, daemon.wait(0)) == (False, True)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", daemon.port), 5)
    check_nothing_left(tmp_path)
    with pytest.raises(HostingError, match="create a new one"):
        daemon.start()


def test_no_request_is_answered_before_the_token_can_be_read(tmp_path, monkeypatch):
    publish = DaemonHome.publish

    def ask_and_publish(home, state):
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.get(f"{state.url}/v3/health", timeout=0.5)
        publish(home, state)

    monkeypatch.setattr(DaemonHome, "publish", ask_and_publish)
    with serving(tmp_path) as daemon, client(daemon) as http:
        assert http.get("/v3/health").status_code == 200


def test_each_start_has_a_new_token_and_keeps_the_sessions(tmp_path):
    with serving(tmp_path) as first, client(first) as http:
        http.post("/v3/sessions", json={"session_id": "kept"})
        cursor = http.get("/v3/sessions/kept").json()["cursor"]
    with serving(tmp_path) as second, client(second) as http:
        assert second.token != first.token
        assert second.daemon_id != first.daemon_id
        assert http.get("/v3/sessions/kept").status_code == 200
        events = http.get("/v3/events", params={"after": cursor}).json()["events"]
        assert [event["event"] for event in events] == ["daemon.stopping", "daemon.started"]
        http.headers["authorization"] = f"Bearer {first.token}"
        assert http.get("/v3/daemon").status_code == 401


def test_an_invalid_setting_is_refused_before_the_start(tmp_path):
    with pytest.raises(InvalidRequestError, match="cors_origins"):
        new(tmp_path, cors_origins=("*",))
    assert not (tmp_path / "daemon").exists()


COMPONENTS = [
    *("Store.open", "bind", "EventLog", "McpServers", "Toolbox", "TurnRunner"),
    *("create_daemon_app", "serve", "StateFile"),
]


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_start_that_fails_at_any_component_leaves_nothing_behind(tmp_path, monkeypatch, name):
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(f"lmx_lab.daemon.daemon.{name}", fail)
    with pytest.raises(RuntimeError, match=name):
        new(tmp_path).start()
    check_nothing_left(tmp_path)
    monkeypatch.undo()
    with serving(tmp_path):
        pass


def test_of_several_concurrent_starts_one_succeeds(tmp_path, monkeypatch):
    # The first start may take long on a busy computer.
    monkeypatch.setattr(DaemonHome, "acquire", functools.partialmethod(DaemonHome.acquire, timeout_s=60.0))
    daemons = [new(tmp_path) for _ in range(4)]
    refused = []

    def start(daemon: Daemon) -> None:
        try:
            daemon.start()
        except DaemonRunningError as exc:
            refused.append(exc.message)

    threads = [threading.Thread(target=start, args=[daemon]) for daemon in daemons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (running,) = [daemon for daemon in daemons if daemon.running]
    assert [(running.url in message, running.token in message) for message in refused] == [(True, False)] * 3
    running.stop()
    check_nothing_left(tmp_path)


def test_a_waiting_poll_does_not_delay_the_stop(tmp_path):
    with serving(tmp_path) as daemon, client(daemon) as http:
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(http.get("/v3/events", params={"wait": 60})))
        waiting.start()
        while not daemon.run(busy()):
            pass
        daemon.stop()
        waiting.join(WAIT_S)
    assert answers[0].status_code == 200


async def busy():
    """Return whether a poll is waiting."""
    return any("wait_for_page" in repr(task.get_coro()) for task in asyncio.all_tasks())


def submit(http):
    http.post("/v3/sessions", json={"session_id": "s"})
    answer = http.post("/v3/sessions/s/turns", json={"turn_id": "t", "content": "go"})
    assert answer.status_code == 202, answer.text


def test_a_draining_daemon_refuses_new_turns_and_completes_the_running_one(tmp_path):
    gate = Gate()
    first, *rest = says("one ", "two")
    with Scripted([first, gate, *rest]) as upstream, serving(tmp_path, upstream=upstream.url) as daemon:
        with client(daemon) as http:
            submit(http)
            asyncio.run(gate.reached())
            assert http.post("/v3/daemon/shutdown").status_code == 202
            while http.get("/v3/health").json()["status"] != "stopping":
                pass
            # The status changes slightly before turns are refused.
            assert settled(daemon, lambda: daemon.services.turns.is_stopping)
            refused = http.post("/v3/sessions/s/turns", json={"content": "more"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "daemon-stopping")
            gate.open()
        assert daemon.wait(WAIT_S)
    assert ends(tmp_path) == ["turn.done"]


def ends(home):
    """Return the terminal events in the log, read by the next daemon."""
    with serving(home) as daemon, client(daemon) as http:
        events = http.get("/v3/events", params={"after": 0, "types": "turn.done,turn.error"}).json()["events"]
        return [event["event"] for event in events]


def test_the_tool_decorator_registers_a_function(tmp_path):
    with serving(tmp_path) as daemon, client(daemon) as http:

        @daemon.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @daemon.tool(name="named", read_only=True)
        def other() -> str:
            """Say something."""
            return "something"

        assert (add(1, 2), other()) == (3, "something")
        assert http.get("/v3/daemon").json()["counts"]["tools"] == 2


# --- in separate processes

SCRIPT = """
import os, sys, time
from pathlib import Path
from lmx_lab.daemon.daemon import Daemon
from lmx_lab.settings import Settings
daemon = Daemon(settings=Settings(home=Path(sys.argv[1]), daemon_port=0, upstream="http://127.0.0.1:9"))
daemon.start()
"""


def script(home, rest):
    options = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    command = [sys.executable, *options, "-c", SCRIPT + rest, str(home)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_program_that_exits_stops_its_daemon(tmp_path):
    ended = script(tmp_path, "")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    check_nothing_left(tmp_path)
    with serving(tmp_path) as daemon, client(daemon) as http:
        events = http.get("/v3/events", params={"after": 0}).json()["events"]
        assert [event["event"] for event in events] == ["daemon.started", "daemon.stopping", "daemon.started"]


def test_a_fork_does_not_affect_the_daemon(tmp_path):
    rest = """
if os.fork() == 0:
    daemon.stop()
    sys.exit(0)
os.wait()
print(daemon.running, (daemon.folder / "state.json").exists())
"""
    ended = script(tmp_path, rest)
    assert (ended.returncode, ended.stdout) == (0, "True True\n"), ended.stderr
    check_nothing_left(tmp_path)


@contextlib.contextmanager
def program(home, *arguments):
    """Run ``lmx-lab daemon`` until it is ready."""
    with command(home, "--port", "0", *arguments, command="daemon") as running:
        running.wait_for("state.json")
        yield running, read_state(home / "daemon")


def test_the_command_prints_the_address_and_stops_on_ctrl_c(tmp_path):
    with program(tmp_path) as (running, state):
        assert (state.pid, f"ready at {state.url}" in running.output) == (running.process.pid, True)
        assert running.end(signal.SIGINT) == (0, "")
    log = tmp_path / "daemon" / "daemon.log"
    assert (state.token in running.output + log.read_text(), log.stat().st_mode & 0o077) == (False, 0)
    check_nothing_left(tmp_path)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_running_turn_delays_the_stop_only_briefly_and_a_second_signal_ends_it(tmp_path, signals):
    first, *_ = says("one ", "two")
    with Scripted([first, STALL]) as upstream, program(tmp_path, "--upstream", upstream.url) as (running, state):
        with client(state) as http:
            submit(http)
            while http.get("/v3/daemon").json()["counts"]["running_turns"] == 0:
                pass
            running.process.send_signal(signal.SIGTERM)
            while http.get("/v3/health").json()["status"] != "stopping":
                pass
        if signals == 2:
            running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(WAIT_S) == 0
    assert ends(tmp_path) == ["turn.error"]


def test_a_daemon_starts_after_another_one_was_killed(tmp_path):
    with program(tmp_path) as (running, _):
        running.end(signal.SIGKILL)
    assert read_state(tmp_path / "daemon") is None
    with serving(tmp_path) as daemon:
        assert read_state(tmp_path / "daemon").daemon_id == daemon.daemon_id
    check_nothing_left(tmp_path)


@pytest.mark.long
def test_of_two_concurrent_commands_one_serves_and_the_other_prints_the_address(tmp_path):
    with contextlib.ExitStack() as closed:
        programs = [closed.enter_context(command(tmp_path, "--port", "0", command="daemon")) for _ in range(2)]
        until(lambda: any(one.process.poll() is not None for one in programs))
        loser, winner = sorted(programs, key=lambda one: one.process.poll() is None)
        winner.wait_for("state.json")
        state = read_state(tmp_path / "daemon")
        status, err = loser.end(0)
        assert (status, loser.output, err.count("\n")) == (1, "", 1)
        assert err.startswith("daemon-running: ")
        assert state.url in err or "starting or stopping" in err
        assert winner.end(signal.SIGTERM)[0] == 0
