"""Read the sections of ``docs/clients.md`` and run their code."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.docs import CURLRC, DOCS, Block, code_blocks, run_command

PAGE = DOCS / "clients.md"
SERVE = "lmx-lab serve "
INSTALL = ("pip install ", "npm install ")
LIMIT_S = 600.0
"""Time limit of the code of a section: importing some clients and their answers takes a minute on two busy cores."""
WEB_SITE = "python3 -m http.server "


def section(title: str) -> list[Block]:
    """Return the fenced blocks below a heading."""
    headings = [
        (at, line) for at, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1) if line.startswith("## ")
    ]
    bounds = itertools.pairwise([*headings, (10**9, "")])
    ((first, last),) = [(start, end) for (start, heading), (end, _) in bounds if heading == f"## {title}"]
    return [block for block in code_blocks(PAGE) if first < block.line < last]


def serve_arguments(title: str | None) -> list[str]:
    """Return the arguments of ``lmx-lab serve`` in a section, or in the introduction of the page if it is None."""
    blocks = section(title) if title else code_blocks(PAGE)
    return shlex.split(next(block.text for block in blocks if block.text.startswith(SERVE)))[2:]


def run_section(
    title: str, addresses: Mapping[str, str], folder: Path, *, prefix: Sequence[str] = (), programs: Path | None = None
) -> str:
    """Run the code of a section, its Python as one program, and return what it prints.

    Args:
        addresses: Replacements for the addresses in the page.
        folder: Working directory and home.
        prefix: What precedes each command, such as ``ip netns exec``.
        programs: Folder with ``python`` and the client's other programs.

    Raises:
        AssertionError: a command failed.
    """
    (folder / ".curlrc").write_text(CURLRC)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LMX_LAB_", "OPENAI_"))}
    path = os.pathsep.join([*([str(programs)] if programs else []), inherited["PATH"]])
    environ = {**inherited, "HOME": str(folder), "PATH": path, "LLM_USER_PATH": str(folder), "PYTHONUNBUFFERED": "1"}
    blocks = [block for block in section(title) if not block.text.startswith((SERVE, *INSTALL, WEB_SITE))]
    program = "\n".join(block.text for block in blocks if block.language == "python")
    commands = [["bash", "-euc", block.text] for block in blocks if block.language == "bash"]
    output = ""
    for old, new in addresses.items():
        program = program.replace(old, new)
        commands = [[*command[:-1], command[-1].replace(old, new)] for command in commands]
    # A file, because some clients read the source of functions.
    (folder / "program.py").write_text(program, encoding="utf-8")
    for command in [*commands, *([["python", "program.py"]] if program else [])]:
        output += run_command([*prefix, *command], folder, environ, limit_s=LIMIT_S)
    return output
