"""MCP servers over HTTP, and the reference server for Node."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmx_lab.wire.mcp import McpServerConfig
from tests.daemon.mcp.http_mcp import TOKEN
from tests.support.mcp import RUN

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("http_mcp.py")
EVERYTHING = "@modelcontextprotocol/server-everything@2026.8.31"
CACHE = Path(__file__).parents[3] / ".cache" / "npm"


@contextlib.contextmanager
def served(*args):
    process = subprocess.Popen([sys.executable, str(SCRIPT), *args], stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def port():
    with served("0") as (port, _):
        yield port


def remote(port, path="mcp", **fields):
    given = {"headers": {"Authorization": f"Bearer {TOKEN}"}, "tool_timeout_s": 10.0, "start_timeout_s": 60.0, **fields}
    return McpServerConfig(name="far", transport="http", url=f"http://127.0.0.1:{port}/{path}", **given)


async def test_a_server_over_http_is_called_with_its_headers_which_are_redacted(harness, port):
    record = await harness.ready(remote(port))
    assert (record.headers, record.pid) == ({"Authorization": "***"}, None)
    assert (await harness.call("far__greet", name="you")).text == "Hello you"
    assert harness.notes == ["1/2 thinking"]
    assert TOKEN not in record.model_dump_json() + str(await harness.events())


async def test_a_call_over_http_without_an_answer_or_with_a_long_one_fails_and_the_next_one_works(harness, port):
    await harness.ready(remote(port, tool_timeout_s=3.0))
    assert (await harness.call("far__sleep")).status == "timeout"
    assert (await harness.call("far__greet", name="me")).text == "Hello me"
    result = await harness.call("far__big")
    assert (result.status, len(result.text) < 1000) == ("error", True)
    assert (await harness.call("far__greet", name="me")).text == "Hello me"


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"headers": {"Authorization": "Bearer wrong-token-here"}}, "protocol", "401"),
        ({"path": "nothing-here"}, "protocol", "404"),
        ({"path": "elsewhere"}, "protocol", "127.0.0.2"),
    ],
)
async def test_a_failed_test_over_http_reports_the_refusal(harness, port, fields, kind, said):
    failed = await harness.servers.test(remote(port, **fields))
    assert not failed.ok
    assert failed.error_kind == kind
    assert said in failed.error
    assert "wrong-token" not in failed.error


async def test_a_server_that_denies_access_is_not_asked_again(harness, port):
    await harness.servers.add(remote(port, headers={}))
    record = await harness.until("far", lambda record: record.state != "starting")
    assert (record.state, record.restarts) == ("failed", 0)
    assert "401 Unauthorized: set a header with a valid token" in record.error
    assert "OAuth" in record.error
    assert [event["state"] for event in await harness.events()] == ["starting", "failed"]


@pytest.mark.long
async def test_a_server_over_http_that_is_killed_fails_its_calls_and_is_connected_again(harness):
    with served("0") as (port, process):
        await harness.ready(remote(port))
        call = asyncio.create_task(harness.call("far__sleep"))
        assert await asyncio.to_thread(process.stdout.readline) == "sleeping\n"
        process.kill()
        result = await call
    assert result.status == "error"
    assert "lost" in result.text
    with served(str(port)):
        # The new server does not know the session of the previous one.
        while (await harness.call("far__greet", name="again")).text != "Hello again":
            record = await harness.servers.read("far")
            if record.state == "failed":
                await harness.servers.restart("far")
            await asyncio.sleep(0.05)
    assert (await harness.servers.read("far")).error is None


# Node


@pytest.fixture(scope="session")
def everything():
    """Install the reference server if necessary and return its program."""
    program = CACHE / "node_modules" / ".bin" / "mcp-server-everything"
    if not program.exists():
        if shutil.which("npm") is None:
            pytest.skip("no npm here, which installs the reference server for Node")
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(CACHE), EVERYTHING]
        run = subprocess.run(command, capture_output=True, timeout=200, check=False)
        if run.returncode:
            pytest.skip("npm cannot install the reference server for Node: no registry, perhaps")
    if shutil.which("node") is None:
        pytest.skip("no node here, which runs the reference server")
    return str(program)


async def test_the_reference_server_for_node_works(harness, everything):
    record = await harness.ready(McpServerConfig(name="all", command=everything, args=("stdio",), env=RUN))
    assert record.tools >= 8
    names = {tool.name for tool in harness.servers.offered_tools()}
    assert "all__echo" in names
    assert (await harness.call("all__echo", message="hello")).text == "Echo: hello"
    assert (await harness.call("all__get-sum", a=2, b=3)).text.startswith("The sum of 2 and 3 is 5")
    image = await harness.call("all__get-tiny-image")
    assert "[image of type image/png" in image.text
    slow = await harness.call("all__trigger-long-running-operation", duration=0.5, steps=2)
    assert slow.status == "ok"
    assert harness.notes
    assert (await harness.call("all__get-structured-content", location="New York")).status == "ok"
    assert (await harness.call("all__echo")).status == "error"
