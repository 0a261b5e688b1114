"""The names of MCP tools."""

from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.daemon.tools.tool import mcp_tool_names


@given(st.lists(st.text(min_size=1, max_size=100), unique=True, max_size=20))
def test_names_for_models_are_valid_and_map_to_the_servers_names(own):
    names = mcp_tool_names("server-1", own)
    assert list(names.values()) == own
    assert all(len(name) <= 64 and name.isascii() and name.startswith("server-1__") for name in names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") for name in names)
