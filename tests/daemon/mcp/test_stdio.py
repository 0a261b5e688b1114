"""Splitting the output of an MCP server into lines."""

from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.daemon.mcp.stdio import LineSplitter


@given(st.lists(st.sampled_from([b"", b"a", b"\n", b"bcd\n", b"e" * 9, b"\n\nf"]), max_size=30))
def test_lines_do_not_depend_on_how_the_stream_is_cut(pieces):
    lines = LineSplitter(limit=8)
    found = [line for piece in pieces for line in lines.feed(piece)]
    *whole, rest = b"".join(pieces).split(b"\n")
    wanted = [line if len(line) <= 8 else None for line in whole] + [None] * (len(rest) > 8)
    assert found == wanted
