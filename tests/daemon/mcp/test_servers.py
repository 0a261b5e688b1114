"""MCP servers: several at once, servers that misbehave, and the processes that they leave."""

import asyncio
import json
import subprocess
import sys
import time

import psutil
import pytest

from lmx_lab.daemon.mcp.process import INVALID_LINE_BYTES
from lmx_lab.daemon.mcp.process_cleanup import is_alive
from lmx_lab.daemon.storage.store import Store
from lmx_lab.errors import InvalidRequestError, McpServerExistsError, McpServerNotFoundError, StoppingError
from lmx_lab.portal import LoopThread
from lmx_lab.wire.mcp import ChangeMcpServer, McpServerConfig, McpServerRecord
from tests.support.asking import each_value
from tests.support.mcp import HOSTILE, RUN, SECRET, McpHarness, hostile, killed_daemon, left_over, quick

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def new_repository(path):
    subprocess.run(["git", "init", "-q", "-b", "trunk", str(path)], check=True)
    (path / "new.txt").write_text("new")
    return path


# Servers that work


async def test_the_time_server_answers_and_its_tools_are_read_only(harness):
    await harness.ready(McpServerConfig(name="time", command=sys.executable, args=("-m", "mcp_server_time"), env=RUN))
    tools = {tool.name: tool for tool in harness.servers.offered_tools()}
    assert set(tools) == {"time__get_current_time", "time__convert_time"}
    assert tools["time__get_current_time"].read_only
    assert not tools["time__get_current_time"].needs_permission
    assert "timezone" in tools["time__get_current_time"].parameters["properties"]
    answer = await harness.call(
        "time__convert_time", source_timezone="Etc/UTC", time="12:00", target_timezone="Asia/Tokyo"
    )
    assert answer.status == "ok"
    assert json.loads(answer.text)["target"]["datetime"].endswith("T21:00:00+09:00")
    wrong = await harness.call("time__get_current_time", timezone="Mars/Olympus")
    assert wrong.status == "error"
    assert "Mars/Olympus" in wrong.text


async def test_the_git_server_works_on_a_repository_beside_another_server(harness, tmp_path):
    repository = await asyncio.to_thread(new_repository, tmp_path / "repository")
    git = McpServerConfig(
        name="git", command=sys.executable, args=("-m", "mcp_server_git"), env=RUN, cwd=str(repository)
    )
    await asyncio.gather(harness.ready(git), harness.ready(hostile()))
    status, echo = await asyncio.gather(
        harness.call("git__git_status", repo_path=str(repository)), harness.call("bad__echo", text="beside")
    )
    assert status.status == "ok"
    assert "new.txt" in status.text
    assert echo.text == "beside"


async def test_tools_of_all_pages_are_listed_and_results_and_progress_of_all_kinds_become_text(harness):
    record = await harness.ready(hostile())
    assert record.tools == 20
    assert (await harness.call("bad__structured")).text == '{"answer": 42}'
    image = await harness.call("bad__image")
    assert image.text == "look:\n[image of type image/png, 3,000 bytes; it cannot be shown here]"
    failed = await harness.call("bad__fail")
    assert (failed.status, failed.text) == ("error", "it went wrong")
    assert (await harness.call("bad__progress")).text == "done"
    assert harness.notes == ["1/2 half\ufffd[31m way"]
    assert (await harness.call("bad__two_answers")).text == "first"
    assert (await harness.call("bad__echo", text="on")).text == "on"


async def test_a_changed_list_of_tools_is_read_again_and_invalid_names_are_adapted(harness):
    before = await harness.ready(hostile())
    await harness.call("bad__grow")
    await harness.until("bad", lambda record: record.tools > before.tools)
    (grown,) = [tool.name for tool in harness.servers.offered_tools() if "grown" in tool.name]
    assert grown.startswith("bad__grown_tool_")
    assert grown.isascii()
    assert (await harness.events())[-1]["tools"] == before.tools + 1


async def test_an_endless_list_of_tools_ends_at_the_limit(harness):
    assert (await harness.ready(hostile("endless"))).tools == 256


@pytest.mark.parametrize("modes", [["modern"], ["modern", "newer"]])
async def test_a_server_that_supports_only_the_protocol_of_2026_works(harness, modes):
    """Such a server refuses ``initialize``, or answers it with a version that has no such request."""
    assert (await harness.ready(hostile(*modes))).tools == 20
    assert (await harness.call("bad__echo", text="new")).text == "new"


# States, secrets and changes


async def test_every_state_has_an_event_and_servers_start_again_with_the_daemon(harness):
    await harness.ready(hostile())
    await harness.servers.stop()
    assert [event["state"] for event in await harness.events()] == ["starting", "ready", "stopping"]
    await harness.again()
    await harness.until("bad", lambda record: record.state == "ready")
    await harness.servers.remove("bad")
    await harness.servers.remove("bad")
    assert (await harness.events())[-1]["state"] == "removed"
    with pytest.raises(McpServerNotFoundError):
        await harness.servers.read("bad")
    await harness.again()
    assert (await harness.servers.list_servers()).servers == []


async def test_secrets_are_redacted_everywhere(harness):
    config = hostile()
    await harness.ready(config)
    names = json.loads((await harness.call("bad__secrets")).text)
    assert "API_KEY" in names
    assert not [name for name in names if name.startswith("PYTEST")]
    error = await harness.call("bad__noisy_error")
    assert (error.status, error.text) == ("error", "The tool failed: no *** \ufffd[2J")
    await harness.call("bad__die")
    record = await harness.until("bad", lambda record: record.restarts == 1)
    record = await harness.until("bad", lambda record: record.state == "ready")
    await harness.call("bad__secrets")
    record = await harness.until("bad", lambda record: "key is" in record.stderr_tail)
    assert record.env == {"TEST_RUN": "***", "API_KEY": "***"}
    shown = [record.model_dump_json(), repr(config), repr(harness.servers), repr(error), str(await harness.events())]
    assert SECRET not in "".join(shown)
    changed = await harness.servers.change("bad", ChangeMcpServer(env={"API_KEY": "***", "OTHER": "1"}))
    assert changed.env == {"API_KEY": "***", "OTHER": "***"}
    await harness.until("bad", lambda record: record.state == "ready")
    assert {"API_KEY", "OTHER"} <= set(json.loads((await harness.call("bad__secrets")).text))
    with pytest.raises(InvalidRequestError, match="NEW"):
        await harness.servers.change("bad", ChangeMcpServer(env={"NEW": "***"}))


def printing(script, secret):
    """Return a program that does not speak the protocol and knows a secret."""
    env = {**RUN, "API_KEY": secret}
    return McpServerConfig(name="x", command=sys.executable, args=("-I", "-c", script), env=env, start_timeout_s=60)


@pytest.mark.parametrize(
    "script",
    [
        "print('a' * (LINE_BYTES - 10) + key, flush=True)",
        # The rest of the first secret is at the front of the kept text, and moves when the others are redacted.
        "print(key * 1000, file=sys.stderr)",
    ],
    ids=["the end of a line of stdout", "the front of stderr"],
)
async def test_no_part_of_a_secret_that_was_cut_is_shown(harness, script):
    key = "".join(chr(0x4E00 + i) for i in range(20))
    sizes = f"LINE_BYTES = {INVALID_LINE_BYTES}"
    begun = (
        f"import os, sys; sys.stderr.reconfigure(encoding='utf-8'); sys.stdout.reconfigure(encoding='utf-8'); {sizes}"
    )
    await harness.servers.add(printing(f"{begun}; key = os.environ['API_KEY']; {script}", key))
    record = await harness.until("x", lambda record: record.state == "failed")
    assert record.stderr_tail
    assert not set(key) & set(record.stderr_tail)


async def test_a_permission_is_changed_without_a_restart_and_denied_tools_are_not_offered(harness):
    record = await harness.ready(hostile())
    changed = await harness.servers.change("bad", ChangeMcpServer(permission="deny"))
    assert (changed.pid, changed.state) == (record.pid, "ready")
    assert harness.servers.offered_tools() == []
    assert await harness.servers.call("bad__echo", {}, print) is None
    assert len((await harness.servers.list_tools("bad")).tools) == record.tools
    again = await harness.servers.restart("bad")
    assert again.state == "starting"
    assert (await harness.until("bad", lambda record: record.state == "ready")).pid != record.pid
    disabled = await harness.servers.change("bad", ChangeMcpServer(enabled=False))
    assert (disabled.state, disabled.pid, disabled.tools) == ("disabled", None, 0)
    with pytest.raises(InvalidRequestError, match="disabled"):
        await harness.servers.restart("bad")
    assert left_over() == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *each_value(cwd=["/no/such/folder"], command=[str(HOSTILE), "/"], args=[("a\0b",)]),
        *each_value(env=[{"A=B": "1"}, {"A": "1\0"}, {"A": "***"}]),
        *(
            ({"transport": "http", "command": None, "url": url}, "url")
            for url in ("ftp://host/", "http:///path", "http://me:hunter2@host/", "http://host:99999/")
        ),
        ({"transport": "http", "command": None, "url": "http://host/", "headers": {"A": "1\r\nB: 2"}}, "headers"),
    ],
)
async def test_a_configuration_that_can_never_start_is_refused_with_the_field(harness, fields, named):
    config = McpServerConfig(**{"name": "wrong", "command": sys.executable, **fields})
    with pytest.raises(InvalidRequestError) as caught:
        await harness.servers.add(config)
    assert caught.value.param == named
    assert "hunter2" not in caught.value.message
    assert (await harness.servers.list_servers()).servers == []


async def test_a_change_to_an_invalid_configuration_is_refused_and_changes_nothing(harness):
    record = await harness.ready(hostile(cwd="/"))
    for change, said in [({"url": "http://host/"}, "url"), ({"cwd": "/no/such"}, "cwd"), ({"env": {"": "x"}}, "env")]:
        with pytest.raises(InvalidRequestError, match=said):
            await harness.servers.change("bad", ChangeMcpServer.model_validate(change))
    assert await harness.servers.read("bad") == record
    moved = await harness.servers.change(
        "bad", ChangeMcpServer.model_validate({"cwd": None, "args": ["-I", str(HOSTILE)]})
    )
    assert (moved.cwd, moved.state) == (None, "starting")
    again = await harness.until("bad", lambda record: record.state == "ready")
    assert again.pid != record.pid
    with pytest.raises(McpServerNotFoundError):
        await harness.servers.change("nobody", ChangeMcpServer(enabled=False))


async def test_a_name_can_be_used_once(harness):
    results = await asyncio.gather(
        harness.servers.add(hostile()), harness.servers.add(hostile()), return_exceptions=True
    )
    assert {type(result) for result in results} == {McpServerRecord, McpServerExistsError}


async def test_a_missing_command_fails_immediately_without_restarts(harness):
    await harness.servers.add(McpServerConfig(name="none", command="no-such-program-here"))
    record = await harness.until("none", lambda record: record.state == "failed")
    assert (record.error_kind, record.restarts) == ("command-not-found", 0)
    assert "'no-such-program-here'" in (record.error or "")
    assert "PATH" in (record.error or "")


# Tests of servers


async def test_a_test_passes_and_changes_nothing(harness):
    record = await harness.ready(hostile())
    events = await harness.events()
    passed = await harness.servers.test_named("bad")
    assert passed.ok
    assert len(passed.tools) == record.tools
    assert passed.latency_ms > 0
    other = await harness.servers.test(hostile(env={"API_KEY": "***"}))
    assert other.ok
    assert await harness.events() == events
    assert await harness.servers.read("bad") == record
    assert [process.pid for process in left_over()] == [record.pid]


@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        (hostile("exits"), "exited", "code 4"),
        (hostile("mute", start_timeout_s=0.3), "start-timeout", "0.3 s"),
        (hostile("babble"), "protocol", "not messages"),
        (hostile("prints", "mute", start_timeout_s=5.0), "start-timeout", "not messages"),
        (McpServerConfig(name="x", command="no-such-program-here"), "command-not-found", "no-such-program-here"),
        (McpServerConfig(name="x", command="/no/such" * 1000), "command-not-found", "the file '/no/such"),
        (McpServerConfig(name="x", command=sys.executable, cwd="/no/such"), "invalid", "/no/such"),
        (McpServerConfig(name="x", transport="http", url="http://127.0.0.1:9/"), "unreachable", "cannot be reached"),
    ],
)
async def test_a_failed_test_reports_the_reason(harness, config, kind, said):
    failed = await harness.servers.test(config)
    assert not failed.ok
    assert failed.error_kind == kind
    assert said in failed.error
    assert left_over() == []
    assert await harness.events() == []


# Servers that misbehave


async def test_lines_that_are_not_messages_are_ignored(harness):
    record = await harness.ready(hostile("prints"))
    assert "(stdout) Welcome to the server!" in record.stderr_tail
    assert (await harness.call("bad__garbage")).text == "after garbage"
    assert (await harness.call("bad__echo", text="on")).text == "on"


async def test_a_server_that_exits_during_a_call_fails_it_immediately_and_is_restarted(harness):
    first = await harness.ready(hostile())
    await harness.ready(hostile(name="other"))
    result = await harness.call("bad__die")
    assert result.status == "error"
    assert "exited with code 3" in result.text
    assert "I have had enough" in result.text
    while_away = await harness.call("bad__echo", text="?")
    assert while_away.status == "error"
    assert "was not called" in while_away.text
    assert (await harness.call("other__echo", text="untouched")).text == "untouched"
    again = await harness.until("bad", lambda record: record.restarts == 1 and record.state == "ready")
    assert again.pid != first.pid
    assert (await harness.call("bad__echo", text="back")).text == "back"
    assert [event["state"] for event in await harness.events() if event["name"] == "bad"][2:] == ["restarting", "ready"]


async def test_a_program_that_exits_immediately_is_reported_as_exited(harness):
    """The closed stdin is noticed before the end of the output."""
    config = McpServerConfig(name="q", command="/bin/sh", args=("-c", "echo oops >&2; exit 4"), env=RUN)
    failed = await asyncio.gather(*(harness.servers.test(config) for _ in range(3)))
    said = {test.error for test in failed}
    assert said == {"the server exited with code 4; its last line was: oops, before it answered initialize"}


async def test_a_server_that_always_exits_fails_after_the_last_restart(harness):
    await harness.servers.add(hostile("exits"))
    record = await harness.until("bad", lambda record: record.state == "failed")
    assert (record.restarts, record.error_kind) == (2, "exited")
    assert "code 4" in (record.error or "")
    assert record.stderr_tail == "no license"
    again = await harness.servers.restart("bad")
    assert (again.state, again.restarts) == ("starting", 0)


async def test_the_restarts_of_a_server_that_was_ready_for_long_are_counted_from_zero(harness):
    await harness.servers.stop()
    harness.restarts = quick(reset_after_s=0.0)
    await harness.again()
    await harness.ready(hostile())
    for _ in range(4):
        before = (await harness.servers.read("bad")).pid
        await harness.call("bad__die")
        record = await harness.until("bad", lambda record: record.state == "ready" and record.pid not in (None, before))  # noqa: B023
        assert record.restarts == 1


@pytest.mark.parametrize("tool", ["deaf", "bad_utf8", "long_line"])
async def test_a_call_without_an_answer_ends_at_its_limit_and_the_server_continues(harness, tool):
    await harness.ready(hostile(tool_timeout_s=4.0))
    result = await harness.call(f"bad__{tool}")
    assert result.status == ("error" if tool == "long_line" else "timeout")
    assert (await harness.call("bad__echo", text="on")).text == "on"
    record = await harness.until("bad", lambda record: tool != "deaf" or "was cancelled" in record.stderr_tail)
    assert record.restarts == 0


async def test_a_hundred_megabytes_of_output_are_read_and_discarded(harness):
    await harness.ready(hostile("floods_stderr", tool_timeout_s=60))
    before = psutil.Process().memory_info().rss
    result = await harness.call("bad__flood")
    assert result.text == "after the flood"
    assert psutil.Process().memory_info().rss - before < 50 * 2**20
    assert len((await harness.servers.read("bad")).stderr_tail.encode()) <= 16_384


@pytest.mark.parametrize("tool", ["close", "not_an_object", "hang_up"])
async def test_broken_pipes_and_invalid_answers_are_errors_of_the_call(harness, tool):
    await harness.ready(hostile(tool_timeout_s=10.0))
    result = await harness.call(f"bad__{tool}")
    assert result.status == ("ok" if tool == "hang_up" else "error")
    if tool != "not_an_object":
        assert (await harness.call("bad__echo", text="?")).status == "error"
        await harness.until("bad", lambda record: record.restarts == 1 and record.state == "ready")
    assert (await harness.call("bad__echo", text="on")).text == "on"


async def test_a_server_that_floods_its_output_fails_without_affecting_others(harness):
    await asyncio.gather(harness.ready(hostile("late_babble")), harness.ready(hostile(name="other")))
    babbling = asyncio.create_task(harness.call("bad__echo"))
    while not babbling.done():
        assert (await harness.call("other__echo", text="still here")).text == "still here"
    assert (await babbling).status == "error"
    assert "not messages" in (await babbling).text
    record = await harness.until("bad", lambda record: record.restarts == 1)
    assert record.error_kind in ("protocol", None)


async def test_a_call_ends_when_its_server_is_stopped(harness):
    await harness.ready(hostile())
    call = asyncio.create_task(harness.call("bad__deaf"))
    await harness.until("bad", lambda record: "deaf begun" in record.stderr_tail)
    await harness.servers.restart("bad")
    expected = "The connection to the server was lost during the call: the server was stopped."
    assert (await call).text.startswith(expected)


async def test_a_cancelled_call_notifies_the_server_and_ends_soon(harness):
    await harness.ready(hostile())
    call = asyncio.create_task(harness.call("bad__deaf"))
    await harness.until("bad", lambda record: "deaf begun" in record.stderr_tail)
    call.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await call
    await harness.until("bad", lambda record: "was cancelled" in record.stderr_tail)
    assert (await harness.call("bad__echo", text="on")).text == "on"


@pytest.mark.parametrize("mode", ["mute", "babble"])
async def test_a_server_that_does_not_answer_is_stopped_without_delay(harness, mode):
    await harness.servers.add(hostile(mode, start_timeout_s=3000.0))
    record = await harness.until("bad", lambda record: record.pid is not None)
    async with asyncio.timeout(10):
        await harness.servers.remove("bad")
    assert not psutil.pid_exists(record.pid or 0)


PARENT = McpServerConfig(name="x", command="/bin/sh", args=("-c", "sleep 600 & exec sleep 600"), env=RUN)


async def test_a_server_can_be_removed_at_any_moment_of_its_start(harness):
    for moment in range(0, 40, 8):
        await harness.servers.add(PARENT)
        for _ in range(moment):
            await asyncio.sleep(0.001)
        await harness.servers.remove("x")
        assert left_over() == []


async def test_a_child_of_a_process_whose_start_is_cancelled_is_ended(harness):
    test = asyncio.create_task(harness.servers.test(PARENT))
    while not left_over():
        assert not test.done()
        await asyncio.sleep(0)
    # The process runs, but its pipes are not connected before the next iterations of the event loop.
    deadline = time.monotonic() + 30
    while len(left_over()) < 2:
        assert time.monotonic() < deadline
    await harness.servers.stop()
    with pytest.raises(StoppingError):
        await test
    assert left_over() == []


async def test_a_server_is_removed_while_its_lost_process_is_being_stopped(harness):
    record = await harness.ready(hostile("ignore_term"))
    child, grandchild = json.loads((await harness.call("bad__family")).text)
    processes = [psutil.Process(record.pid), psutil.Process(grandchild)]
    # The child would keep the output open.
    psutil.Process(child).kill()
    await harness.call("bad__close")
    # The process has some time to exit after the end of its input.
    await harness.until("bad", lambda record: "end of input" in record.stderr_tail)
    await harness.servers.remove("bad")
    assert not any(map(is_alive, processes))


async def test_nothing_is_left_of_a_server_that_ignores_term_and_has_grandchildren(harness):
    record = await harness.ready(hostile("ignore_term"))
    pids = [record.pid, *json.loads((await harness.call("bad__family")).text)]
    processes = [psutil.Process(pid) for pid in pids]
    assert all(map(is_alive, processes))
    await harness.servers.remove("bad")
    assert not any(map(is_alive, processes))


async def test_grandchildren_of_a_server_that_exited_are_ended_before_its_restart(harness):
    await harness.ready(hostile())
    processes = [psutil.Process(pid) for pid in json.loads((await harness.call("bad__family")).text)]
    await harness.call("bad__die")
    await harness.until("bad", lambda record: record.restarts == 1 and record.state == "ready")
    assert not any(map(is_alive, processes))


KILLED_AT_START = """
import asyncio, os, signal, sys
from pathlib import Path
from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.mcp.watchdog import ServerProcesses
from lmx_lab.daemon.storage.store import Store
from tests.support.mcp import hostile

class KilledAtStart(ServerProcesses):
    async def add(self, root):
        if root.pid:
            print(f"[{root.pid}]", flush=True)
            os.kill(self.watchdog_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        await super().add(root)

async def main():
    folder = Path(sys.argv[1])
    servers = McpServers(store=await Store.open(folder / "daemon.db"), processes=KilledAtStart(folder))
    await servers.start()
    sleeps = ("-I", "-c", "import time; time.sleep(600)")
    await servers.add(hostile().model_copy(update={"args": sleeps}))
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path):
    """The folder of a daemon that was killed."""
    folder = tmp_path / "killed"
    folder.mkdir()
    return folder


async def test_a_server_whose_daemon_was_killed_during_its_start_is_ended_too(harness, folder):
    (pid,) = await asyncio.to_thread(killed_daemon, folder, program=KILLED_AT_START)
    process = psutil.Process(pid)
    try:
        assert is_alive(process)
        next_one = McpHarness(harness.store, folder)
        await next_one.again()
        await next_one.servers.stop()
        assert not is_alive(process)
    finally:
        if is_alive(process):
            process.kill()


async def test_processes_of_a_killed_daemon_are_ended_at_the_next_start(harness, folder):
    killed = await asyncio.to_thread(killed_daemon, folder, "with its watchdog")
    processes = [psutil.Process(pid) for pid in killed["servers"]]
    assert all(map(is_alive, processes))
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", "input()", stdin=subprocess.PIPE, start_new_session=True
    )
    next_one = McpHarness(harness.store, folder)
    await next_one.again()
    await next_one.servers.stop()
    assert not any(map(is_alive, processes))
    assert stranger.returncode is None
    await stranger.communicate(b"\n")
    assert stranger.returncode == 0


def test_servers_run_on_the_event_loop_of_a_thread_and_end_with_it(tmp_path):
    """As in a notebook, even if the servers were not stopped before."""
    thread = LoopThread()
    thread.start()

    async def begin():
        harness = McpHarness(await Store.open(tmp_path / "daemon.db"), tmp_path)
        await harness.again()
        await harness.ready(hostile())
        return harness

    harness = thread.run(begin())
    assert thread.run(harness.call("bad__echo", text="here")).text == "here"
    record = thread.run(harness.servers.read("bad"))
    assert record.pid is not None
    process = psutil.Process(record.pid)
    thread.run(harness.store.close())
    thread.stop()
    assert not is_alive(process)
