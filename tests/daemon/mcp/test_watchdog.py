"""The watchdog: it ends the servers of a daemon that was killed, and nothing else."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lmx_lab.daemon.mcp.process_cleanup import MARK, RootProcess, end_processes, is_alive, root_of_child
from lmx_lab.daemon.mcp.watchdog import Watchdog
from tests.support.mcp import STUBBORN, killed_daemon
from tests.support.waiting import WAIT_S, auntil

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "lmx_lab" / "daemon" / "mcp" / "watchdog_process.py"


async def killed(folder, moment):
    """Run the daemon. Return the processes of its servers, and its watchdog."""
    line = await asyncio.to_thread(killed_daemon, folder, moment)
    return [psutil.Process(pid) for pid in line["servers"]], psutil.Process(line["watchdog"])


@pytest.mark.long
@pytest.mark.parametrize("moment", ["ready", "at start"])
async def test_all_servers_of_a_killed_daemon_and_their_processes_are_ended(tmp_path, moment):
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", "input()", stdin=subprocess.PIPE, env={MARK: "another daemon's"}
    )
    processes, watchdog = await killed(tmp_path, moment)
    assert len(processes) == (7 if moment == "at start" else 6)
    await auntil(lambda: not any(map(is_alive, [*processes, watchdog])))
    assert stranger.returncode is None
    await stranger.communicate(b"\n")


@pytest.mark.long
async def test_servers_are_ended_although_a_fork_of_the_daemon_holds_the_pipe_open(tmp_path):
    processes, watchdog = await killed(tmp_path, "fork")
    try:
        await auntil(lambda: not any(map(is_alive, [*processes, watchdog])))
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("LMX_TEST") == str(tmp_path):
                    process.kill()


@pytest.fixture
async def watchdog():
    watchdog = Watchdog(restart_s=0.01)
    yield watchdog
    await watchdog.stop()


@pytest.fixture
async def server():
    """A process that ignores SIGTERM and has a session of its own."""
    # Unique, because other runs of the tests end the processes with their mark.
    mark = secrets.token_hex(16)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", STUBBORN), stdout=subprocess.PIPE, env={MARK: mark}, start_new_session=True
    )
    await process.stdout.readline()
    root = root_of_child(process.pid, mark)
    yield root
    await asyncio.to_thread(end_processes, [root], term_s=0)
    await process.wait()


def running(watchdog):
    assert watchdog.pid is not None
    return psutil.Process(watchdog.pid)


async def test_the_process_runs_only_if_there_is_a_server(watchdog, server):
    watchdog.watch([])
    assert watchdog.pid is None
    watchdog.watch([server])
    process = running(watchdog)
    assert os.getsid(process.pid) != os.getsid(0)
    watchdog.watch([])
    await watchdog.stop()
    assert not is_alive(process)
    assert is_alive(psutil.Process(server.pid))


async def test_servers_that_are_still_listed_end_when_it_is_stopped(watchdog, server):
    watchdog.watch([server])
    await watchdog.stop()
    await auntil(lambda: not psutil.pid_exists(server.pid))


async def test_a_pid_that_was_reused_is_not_affected(watchdog, server):
    watchdog.watch([RootProcess(pid=server.pid, started=server.started - 60, mark="of-another")])
    process = running(watchdog)
    await watchdog.stop()
    assert not is_alive(process)
    assert is_alive(psutil.Process(server.pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_watchdog_that_was_ended_or_does_not_read_is_started_again(watchdog, server, number, caplog):
    watchdog.watch([server])
    first = running(watchdog)
    first.send_signal(number)
    many = [RootProcess(pid=0, started=0.0, mark=f"{at:02000}") for at in range(20)]

    def is_replaced():
        if number == signal.SIGSTOP:
            watchdog.watch([*many, server])
            watchdog.watch([server])
        return watchdog.pid not in (None, first.pid)

    with caplog.at_level(logging.WARNING):
        await auntil(is_replaced)
    assert "started again" in caplog.text
    assert not is_alive(first)
    await watchdog.stop()
    await auntil(lambda: not psutil.pid_exists(server.pid))


async def test_a_watchdog_that_cannot_be_started_is_tried_again(watchdog, server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent/python")
        watchdog.watch([server])
        assert watchdog.pid is None
    await auntil(lambda: watchdog.pid is not None)


# The program


def program(*arguments):
    # Without -S, so that its coverage can be measured.
    return subprocess.Popen([sys.executable, "-P", str(PROGRAM), *arguments], stdin=subprocess.PIPE)


@pytest.fixture
def show(tmp_path):
    """A program that writes its argument to the file ``shown``."""
    script = tmp_path / "show.py"
    script.write_text(f"import sys; open({str(tmp_path / 'shown')!r}, 'w').write(sys.argv[1])")
    return str(script)


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_program_passes_the_last_complete_line_on_and_ignores_signals(tmp_path, show, kill):
    process = program(str(os.getpid()), show)
    # The program has read this much only if it ignores signals by then.
    process.stdin.write(b"[1]\n" * 100_000)
    process.stdin.flush()
    process.send_signal(kill)
    process.stdin.write(b"[2]\n[3")
    process.stdin.close()
    assert process.wait(WAIT_S) == 0
    assert (tmp_path / "shown").read_text() == "[2]"


@pytest.mark.parametrize("lines", [b"", b"[1]\n[]\n", b"[1"])
def test_the_program_does_nothing_without_servers(tmp_path, show, lines):
    process = program(str(os.getpid()), show)
    process.communicate(lines)
    assert process.returncode == 0
    assert not (tmp_path / "shown").exists()


def test_the_program_notices_that_its_parent_is_another_process(tmp_path, show):
    process = program(str(os.getpid() + 1), show)
    process.stdin.write(b"[1]\n")
    process.stdin.flush()
    assert process.wait(WAIT_S) == 0
    assert (tmp_path / "shown").read_text() == "[1]"
    process.stdin.close()
