"""Python functions and MCP tools in one toolbox, and the names of MCP tools."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.daemon.toolbox import Toolbox
from lmx_lab.daemon.tools import PythonTools, mcp_tool_name
from lmx_lab.wire.mcp import ChangeMcpServer, McpServerConfig
from tests.support.mcp import hostile


@pytest.mark.slow
@pytest.mark.anyio
async def test_python_functions_and_mcp_tools_are_called_by_their_names(harness):
    python = PythonTools()
    toolbox = Toolbox(python, harness.servers)
    python.register(lambda: "of Python", name="zebra")
    python.register(lambda: "no", name="denied", permission="deny")
    await harness.ready(hostile())
    names = [tool.name for tool in toolbox.list_tools()]
    assert names == sorted(names)
    assert {"zebra", "bad__echo"} <= set(names)
    assert "denied" not in names
    assert (await toolbox.call("zebra", {}, on_progress=print)).text == "of Python"
    assert (await toolbox.call("bad__echo", {"text": "of MCP"}, on_progress=print)).text == "of MCP"
    for missing in ("nobody", "bad__nothing", "other__echo", "denied", ""):
        result = await toolbox.call(missing, {}, on_progress=print)
        assert (result.status, "no longer exists" in result.text) == ("error", True)


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_absence_of_a_tool_is_explained_by_the_state_of_its_server_or_its_permission(harness):
    toolbox = Toolbox(PythonTools(), harness.servers)
    await harness.servers.add(McpServerConfig(name="lost", command="/no/such/program"))
    await harness.servers.add(McpServerConfig(name="off", command="cat", enabled=False))
    await harness.until("lost", lambda server: server.state == "failed")
    await harness.ready(hostile())
    failed = await toolbox.explain_absence("lost__echo")
    assert failed.startswith("the MCP server 'lost' has failed")
    assert "/no/such/program" in failed
    assert failed in (await toolbox.call("lost__echo", {}, on_progress=print)).text
    assert "disabled" in await toolbox.explain_absence("off__echo")
    for name in ("lost", "nobody__echo", "bad__nothing", "", "required"):
        assert await toolbox.explain_absence(name) is None
    await harness.servers.change("bad", ChangeMcpServer(permission="deny"))
    assert "denied" in await toolbox.explain_absence("bad__echo")


@given(st.lists(st.text(min_size=1, max_size=100), unique=True, max_size=20))
def test_names_for_models_are_valid_and_unique(own):
    names = [mcp_tool_name("server-1", name) for name in own]
    assert len(set(names)) == len(own)
    assert all(len(name) <= 64 and name.startswith("server-1__") for name in names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") for name in names)
