"""``docs/clients.md`` by its sections, and the doing of what one says."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.docs.pages import DOCS, Block, blocks
from tests.docs.reading import printed

PAGE = DOCS / "clients.md"
SERVER = "lmx-lab serve "
INSTALL = "pip install "
PAGES_OF = "python3 -m http.server "
CURLRC = "fail-with-body\nno-progress-meter\nmax-time = 60\n"
"""An answer that is an error fails the block."""


def section(title: str) -> list[Block]:
    """The fenced blocks below a heading."""
    heads = [
        (at, line) for at, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1) if line.startswith("## ")
    ]
    bounds = itertools.pairwise([*heads, (10**9, "")])
    ((first, last),) = [(start, end) for (start, head), (end, _) in bounds if head == f"## {title}"]
    return [block for block in blocks(PAGE) if first < block.line < last]


def server_of(title: str | None) -> list[str]:
    """The arguments of the server that a section starts, or of the page's own."""
    given = section(title) if title else blocks(PAGE)
    return shlex.split(next(block.text for block in given if block.text.startswith(SERVER)))[2:]


def done(
    title: str, addresses: Mapping[str, str], folder: Path, *, before: Sequence[str] = (), programs: Path | None = None
) -> str:
    """What the code of a section prints; it must not fail. Its Python is one program.

    Args:
        addresses: What stands for the page's addresses.
        folder: To do it in, and the home of whoever does.
        before: What the commands are put behind, such as ``ip netns exec``.
        programs: Where ``python`` and what was installed beside it are found.
    """
    (folder / ".curlrc").write_text(CURLRC)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LMX_LAB_", "OPENAI_"))}
    path = os.pathsep.join([*([str(programs)] if programs else []), kept["PATH"]])
    environ = {**kept, "HOME": str(folder), "PATH": path, "LLM_USER_PATH": str(folder), "PYTHONUNBUFFERED": "1"}
    given = [block for block in section(title) if not block.text.startswith((SERVER, INSTALL, PAGES_OF))]
    program = "\n".join(block.text for block in given if block.language == "python")
    commands = [["bash", "-euc", block.text] for block in given if block.language == "bash"]
    output = ""
    for command in [*commands, *([["python", "-c", program]] if program else [])]:
        for there, here in addresses.items():
            command[-1] = command[-1].replace(there, here)
        output += printed([*before, *command], folder, environ)
    return output
