"""All tools under one roof, proposals from files, and names and lines that nobody can trust."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.lines import LineSplitter, OutputTail, shown
from lmx_lab.daemon.mcp.names import tool_names
from lmx_lab.daemon.mcp.project_file import read_mcp_file
from lmx_lab.daemon.mcp.redaction import SecretRedactor
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.toolbox import CombinedToolbox
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.mcp import ChangeMcpServer, McpServerConfig
from tests.daemon.mcp_place import Place, hostile, opened_place


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with opened_place(tmp_path) as place:
        yield place


@pytest.mark.anyio
async def test_functions_and_servers_are_called_by_their_names(place: Place) -> None:
    python = PythonTools()
    toolbox = CombinedToolbox(python, place.servers, Limits())
    python.register(lambda: "of Python", name="zebra")
    python.register(lambda: "no", name="denied", permission="deny")
    await place.ready(hostile())
    names = [tool.name for tool in toolbox.tools()]
    assert names == sorted(names)
    assert {"zebra", "bad__echo"} <= set(names)
    assert "denied" not in names
    assert (await toolbox.call("zebra", {}, note=print)).text == "of Python"
    assert (await toolbox.call("bad__echo", {"text": "of MCP"}, note=print)).text == "of MCP"
    for missing in ("nobody", "bad__nothing", "other__echo", "denied", ""):
        result = await toolbox.call(missing, {}, note=print)
        assert (result.status, "no tool" in result.text) == ("error", True)


@pytest.mark.anyio
async def test_a_tool_that_is_away_is_told_with_what_became_of_its_server(place: Place) -> None:
    toolbox = CombinedToolbox(PythonTools(), place.servers, Limits())
    await place.servers.add(McpServerConfig(name="lost", command="/no/such/program"))
    await place.servers.add(McpServerConfig(name="off", command="cat", enabled=False))
    await place.until("lost", lambda server: server.state == "failed")
    failed = await toolbox.absence("lost__echo")
    assert failed is not None
    assert failed.startswith("the MCP server 'lost' has failed")
    assert "/no/such/program" in failed
    assert failed in (await toolbox.call("lost__echo", {}, note=print)).text
    assert "disabled" in (await toolbox.absence("off__echo") or "")
    for name in ("lost", "nobody__echo", "", "required"):
        assert await toolbox.absence(name) is None


@pytest.mark.anyio
async def test_a_server_that_is_there_is_no_reason_but_for_its_permission(place: Place) -> None:
    toolbox = CombinedToolbox(PythonTools(), place.servers, Limits())
    await place.ready(hostile())
    assert await toolbox.absence("bad__nothing") is None
    await place.servers.change("bad", ChangeMcpServer(permission="deny"))
    assert "denied" in (await toolbox.absence("bad__echo") or "")


# Files


def written(folder: Path, content: object) -> Path:
    path = folder / ".mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_projects_file_is_read_and_starts_nothing(tmp_path: Path) -> None:
    servers = {
        "my files": {"command": "npx", "args": ["-y", "files", "."], "env": {"KEY": "1"}, "type": "stdio"},
        "remote.one": {"type": "http", "url": "https://host/mcp", "headers": {"A": "b"}},
        "off": {"command": "x", "cwd": "sub", "disabled": True},
    }
    files, remote, off = read_mcp_file(written(tmp_path, {"mcpServers": servers}))
    assert (files.name, files.args, files.env, files.cwd) == (
        "my-files",
        ("-y", "files", "."),
        {"KEY": "1"},
        str(tmp_path),
    )
    assert (remote.name, remote.transport, remote.url) == ("remote-one", "http", "https://host/mcp")
    assert (off.enabled, off.cwd) == (False, str(tmp_path / "sub"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ([], "mcpServers"),
        ({"mcpServers": []}, "mcpServers"),
        ({"mcpServers": {"a": 1}}, "server 'a'"),
        ({"mcpServers": {"a": {}}}, "command"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://h/"}}}, "command"),
        ({"mcpServers": {"a": {"command": "x", "args": "y"}}}, "args"),
        ({"mcpServers": {"a": {"command": "x", "env": {"KEY": 1}}}}, "env.KEY"),
        ({"mcpServers": {"a": {"command": "x", "env": {"KEY": "${HOME}"}}}}, r"\$\{HOME\}"),
        ({"mcpServers": {"a": {"command": "x", "shell": True}}}, "'shell'"),
        ({"mcpServers": {"a": {"type": "sse", "url": "http://h/"}}}, "sse"),
        ({"mcpServers": {"a": {"command": "x", "cwd": 3}}}, "cwd"),
        ({"mcpServers": {"!!": {"command": "x"}}}, "name"),
        ({"mcpServers": {str(number): {"command": "x"} for number in range(65)}}, "65"),
        (" " * 2_000_000, "bytes"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_mcp_file(written(tmp_path, content))


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_mcp_file(tmp_path / "none.json")


# Names, lines, secrets


@given(st.lists(st.text(min_size=1, max_size=100), unique=True, max_size=20))
def test_names_for_models_are_fit_and_lead_back(own: list[str]) -> None:
    names = tool_names("server-1", own)
    assert list(names.values()) == own
    assert all(len(name) <= 64 and name.isascii() and name.startswith("server-1__") for name in names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") for name in names)


@given(st.lists(st.sampled_from([b"", b"a", b"\n", b"bcd\n", b"e" * 9, b"\n\nf"]), max_size=30))
def test_lines_are_the_same_however_they_are_cut(pieces: list[bytes]) -> None:
    lines = LineSplitter(limit=8)
    found = [line for piece in pieces for line in lines.feed(piece)]
    *whole, rest = b"".join(pieces).split(b"\n")
    wanted = [line if len(line) <= 8 else None for line in whole] + [None] * (len(rest) > 8)
    assert found == wanted


def test_a_tail_is_bounded_harmless_and_without_secrets() -> None:
    tail = OutputTail()
    secret = "very-secret-value"
    for number in range(1000):
        tail.feed(f"line {number} \x1b[31m{secret}\x00\r\nüñ\u202e\n".encode())
    text = shown(SecretRedactor([f"Bearer {secret}", "short"]).hidden(tail.text()))
    assert len(text.encode()) <= 16_384
    assert len(text.splitlines()) == 50
    assert text.splitlines()[-2] == "line 999 \ufffd[31m***\ufffd"
    assert secret not in text
    tail.feed(b"x" * 100_000)
    assert len(tail.text()) <= 20_480
    assert shown(tail.text()) == "x" * 2000
