"""Let coding agents fix a bug with scripted answers: a part of ``make clients``.

``python -m tests.other_clients.try_agents FOLDER`` starts the echo engine with a script, and each agent of
``docs/clients.md`` from ``FOLDER/node_modules``, configured as the page shows. The agent has to fix a planted bug
through tool calls, and to continue the session in another process, whose prompt must be in the prefix cache. Then it
has to call a tool of an MCP server by a name of 100 characters, and to return a picture as the result of another tool.
The exit status is 1 if an agent fails.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.other_clients.clients_page import section
from tests.other_clients.picture_server import PICTURE
from tests.support.commands import Serving, request

ADDRESS = "127.0.0.1:8400"
BUG, FIXED = "result -= price", "result += price"
PROGRAM = f"def total(prices):\n    result = 0\n    for price in prices:\n        {BUG}\n    return result\n"
FIRST, SECOND, THIRD = "Fix the bug in prices.py.", "Is anything else wrong?", "Describe picture.png."
ENDS = ("The total is now a sum.", "Nothing else is wrong.")
"""The last answers to the first two prompts. The answer to the third one repeats the result of the last tool."""
PICTURE_SERVER = Path(__file__).with_name("picture_server.py")
SHOWN = "[image, not shown to this model]"
NAME_CHARACTERS = 100
"""Length of the MCP tool's name in requests."""
LEAST_CACHED = 0.95
"""Part of the second session's prompt that must be in the prefix cache."""
COUNTERS = ("prompt_tokens", "cached_tokens")
WAIT_S = 120


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A coding agent, and the session that is scripted for it."""

    title: str
    """Heading of its section in ``docs/clients.md``."""
    package: str
    read_file: Callable[[Path], dict[str, Any]]
    """Returns the call that reads a file."""
    edit_file: Callable[[Path], dict[str, Any]]
    """Returns the call that fixes the bug in a file."""
    view_picture: Callable[[Path], dict[str, Any]]
    """Returns the call that reads a picture."""
    tool_prefix: str | None = "mcp__pictures__"
    """Prefix of the names of tools of the MCP server ``pictures``; None if the agent does not offer these tools."""
    first: Sequence[str]
    """Command that starts a session; the prompt is appended."""
    second: Sequence[str]
    """Command that continues the last session."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables besides those of the page."""

    @property
    def painter(self) -> str:
        """Name of the MCP server's tool, without the prefix."""
        return "paint_".ljust(NAME_CHARACTERS - len(self.tool_prefix or ""), "x")


def shell_call(command: str) -> dict[str, Any]:
    return {"name": "exec_command", "arguments": {"cmd": command}}


def read_file(file: Path) -> dict[str, Any]:
    return {"name": "read", "arguments": {"filePath": str(file)}}


CODEX = ("codex", "exec")
CODEX_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
KNOWN_MODEL = ("-c", 'model="gpt-5.5"')
OPENCODE = ("opencode", "run", "--title", "Prices")
ALLOWED = "Read,Edit,mcp__pictures"
WITH_IMAGES = {"provider": {"lab": {"models": {"default": {"modalities": {"input": ["text", "image"]}}}}}}
PATCH = f"*** Begin Patch\n*** Update File: {{name}}\n@@\n-        {BUG}\n+        {FIXED}\n*** End Patch\n"
CODEX_AGENT = Agent(
    title="Codex CLI",
    package="@openai/codex",
    read_file=lambda file: shell_call(f"cat {file.name}"),
    edit_file=lambda file: shell_call(f"sed -i 's/{BUG}/{FIXED}/' {file.name} && cat {file.name}"),
    view_picture=lambda file: {"name": "view_image", "arguments": {"path": str(file)}},
    first=(*CODEX, *CODEX_OPTIONS),
    second=(*CODEX, "resume", "--last", *CODEX_OPTIONS),
)
AGENTS = (
    CODEX_AGENT,
    # Codex offers the custom tool apply_patch to a model that it knows, which must search for the tools of MCP servers.
    replace(
        CODEX_AGENT,
        edit_file=lambda file: {"name": "apply_patch", "arguments": {"input": PATCH.format(name=file.name)}},
        tool_prefix=None,
        first=(*CODEX, *KNOWN_MODEL, *CODEX_OPTIONS),
        second=(*CODEX, "resume", "--last", *KNOWN_MODEL, *CODEX_OPTIONS),
    ),
    Agent(
        title="Claude Code",
        package="@anthropic-ai/claude-code",
        read_file=lambda file: {"name": "Read", "arguments": {"file_path": str(file)}},
        edit_file=lambda file: {
            "name": "Edit",
            "arguments": {"file_path": str(file), "old_string": BUG, "new_string": FIXED},
        },
        view_picture=lambda file: {"name": "Read", "arguments": {"file_path": str(file)}},
        first=("claude", "--allowedTools", ALLOWED, "-p"),
        second=("claude", "--allowedTools", ALLOWED, "--continue", "-p"),
    ),
    # Without these modalities, opencode would tell the model that it cannot read pictures.
    Agent(
        title="opencode",
        package="opencode-ai",
        read_file=read_file,
        edit_file=lambda file: {
            "name": "edit",
            "arguments": {"filePath": str(file), "oldString": BUG, "newString": FIXED},
        },
        view_picture=read_file,
        tool_prefix="pictures_",
        first=OPENCODE,
        second=(*OPENCODE, "--continue"),
        environ={"OPENCODE_CONFIG_CONTENT": json.dumps(WITH_IMAGES), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
)


def main(folder: Path) -> int:
    modules = folder.absolute() / "node_modules"
    # npm does not run the installation scripts of packages; this one makes the program executable.
    subprocess.run(["node", "install.cjs"], cwd=modules / "@anthropic-ai" / "claude-code", check=True)
    failed = 0
    for agent in AGENTS:
        version = json.loads((modules / agent.package / "package.json").read_text())["version"]
        with tempfile.TemporaryDirectory(prefix="lmx-lab-agents-") as place:
            problem, report = try_agent(agent, Path(place), modules / ".bin")
        print(f"\n--- {agent.title} {version}: {problem or 'works'}\n{report}", flush=True)
        failed += bool(problem)
    print(f"{len(AGENTS) - failed} of {len(AGENTS)} agents work")
    return int(failed > 0)


def try_agent(agent: Agent, place: Path, programs: Path) -> tuple[str, str]:
    """Send three prompts to an agent in one session; return what is wrong, or "", and a report."""
    project, home = place / "project", place / "home"
    project.mkdir()
    home.mkdir()
    file, picture, calls = project / "prices.py", project / "picture.png", place / "calls.txt"
    file.write_text(PROGRAM)
    picture.write_bytes(base64.b64decode(PICTURE))
    calls.touch()
    answers: list[Any] = [
        {"reasoning": "I read the file first.", "tool_calls": [agent.read_file(file)]},
        {"text": "The sign is wrong.", "tool_calls": [agent.edit_file(file)]},
        *ENDS,
    ]
    if agent.tool_prefix is not None:
        painting = {"name": agent.tool_prefix + agent.painter, "arguments": {"title": "sea"}}
        answers.append({"tool_calls": [painting]})
    answers.append({"tool_calls": [agent.view_picture(picture)]})
    script = place / "script.json"
    script.write_text(json.dumps(answers))
    os.environ["LMX_LAB_ECHO_SCRIPT"] = str(script)
    server = Serving(home, "--model", "echo", "--context-length", "200000", "--any-model", "--port", "0")
    try:
        environ = configure(agent, home, programs, {ADDRESS: f"127.0.0.1:{server.port}"}) | agent.environ
        painter = (sys.executable, str(PICTURE_SERVER), agent.painter, str(calls))
        run((agent.first[0], "mcp", "add", "pictures", "--", *painter), project, environ)
        outputs = [run((*agent.first, FIRST), project, environ)]
        before = prompt_tokens(server.port)
        outputs.append(run((*agent.second, SECOND), project, environ))
        total, cached = (now - then for now, then in zip(prompt_tokens(server.port), before, strict=True))
        outputs.append(run((*agent.second, THIRD), project, environ))
    finally:
        server.close()
    problems = [] if FIXED in file.read_text() else ["did not fix the bug"]
    expected = zip((*ENDS, SHOWN), outputs, strict=True)
    problems += [f"did not print {end!r}" for end, output in expected if end not in output]
    called = [] if agent.tool_prefix is None else [agent.painter]
    problems += [] if calls.read_text().split() == called else ["did not call the tool of the MCP server"]
    problems += [] if total and cached >= LEAST_CACHED * total else ["computed a prompt again"]
    share = f"{cached / total:.1%} of the second session's {total:,.0f} prompt tokens were cached" if total else ""
    return "; ".join(problems), share if not problems else "\n".join([share, *outputs])


def configure(agent: Agent, home: Path, programs: Path, addresses: Mapping[str, str]) -> dict[str, str]:
    """Apply the configuration in the agent's section, commands or variables before a command, and return the
    environment.
    """
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home)}
    for block in section(agent.title):
        text = block.text
        for old, new in addresses.items():
            text = text.replace(old, new)
        if block.not_run:
            environ |= dict(re.findall(r"\b([A-Z_]+)=(\S+)", text))
        else:
            subprocess.run(["bash", "-euc", text], env=environ, check=True)
    return environ


def run(command: Sequence[str], project: Path, environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=project,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.stdout


def prompt_tokens(port: int) -> tuple[float, float]:
    """Return the numbers of prompt tokens of all requests: computed or cached, and cached."""
    with request(port, "GET", "/metrics") as response:
        text = response.read().decode()
    counts = [re.search(rf"^lmx_lab_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in COUNTERS]
    prompt, cached = (float(found[1]) for found in counts if found is not None)
    return prompt, cached


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
