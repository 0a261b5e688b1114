"""Read the pages of the documentation and the notebooks, and run the examples of a page."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.kernels import a_kernel

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, *sorted(DOCS.glob("*.md")))
PAGES_WITH_LINKS = (*PAGES, *sorted(ROOT.glob("[A-Z]*.md")))
"""All pages whose links are checked, including those at the root that are no documentation."""
FENCE = re.compile(r"```(\w*)$")
NOT_RUN = re.compile(r"<!-- not run: (.*?) *-->$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
INLINE_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced code block of a page."""

    page: Path
    line: int
    """Line number of its opening fence, starting at 1."""
    language: str
    text: str
    not_run: str | None
    """Why the block is not run, from the comment above it; None if it is run."""

    @property
    def location(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def code_blocks(page: Path) -> list[Block]:
    """Return the page's fenced blocks, in order."""
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and (opened := FENCE.match(line)):
            start, language = number, opened[1]
        elif start is not None and line == "```":
            reason = NOT_RUN.match(lines[start - 1]) if start else None
            text = "\n".join(lines[start + 1 : number])
            blocks.append(Block(page=page, line=start + 1, language=language, text=text, not_run=reason and reason[1]))
            start = None
    assert start is None, f"{page}: the block that starts at line {start} is not closed"
    return blocks


def prose(page: Path) -> str:
    """Return the text of the page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and images."""
    return LINK.findall(prose(page))


def inline_code(page: Path) -> list[str]:
    """Return the texts in single backticks."""
    return INLINE_CODE.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub generates them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def table_rows(page: Path, first: str) -> Iterator[dict[str, str]]:
    """Yield the rows of all tables whose first column is named ``first``, as dicts with the column names as keys."""
    names: list[str] | None = None
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            names = None
        elif names is None:
            names = cells
        elif names[0] == first and set(cells[0]) != {"-"}:
            yield dict(zip(names, cells, strict=True))


WAIT_S = 120
SERVER_OF_ADDRESS = {
    "127.0.0.1:8400": "server",
    "192.168.1.20:8400": "server",  # the server on another machine
    "127.0.0.1:8080": "first server",  # a server of another kind
    "127.0.0.1:8401": "daemon",
}
"""Which server of the page replaces an address: the last one that was started, or the first."""
REPLACEMENTS: Mapping[str, Mapping[str, str]] = {
    # Tests listen on loopback only.
    "*": {"--host 0.0.0.0": "--host 127.0.0.1"},
    # A model with two layers, because the examples of these pages do not depend on the text of the answers.
    "notebook.md": {"smollm2-135m": "tiny"},
    "batch.md": {"smollm2-135m": "tiny"},
    "evaluate.md": {"smollm2-135m": "tiny"},
    # The same, with fewer and smaller requests.
    "benchmarks.md": {
        "smollm2-135m": "tiny",
        "(1, 4, 8)": "(1, 2)",
        "1,4,8": "1,2",
        "repeats=3": "prompt_tokens=16, output_tokens=4, requests=2",
        "--repeats 3": "-p 16 -n 4 --requests 2",
        "prompt_tokens=256, output_tokens=64": "prompt_tokens=16, output_tokens=4, requests=2",
        "bench --model tiny": "bench --model tiny -p 16 -n 4 --requests 2",
    },
}
PROGRAM = re.compile(r"# (\w+\.py)$")
"""First line of a block that is a program in a file of this name, not a notebook cell."""
SERVICE = re.compile(r"(?:\w+=\S+ )*lmx-lab (serve|daemon)\b[^\n]*$")
"""A block with a command that runs until it is stopped."""
READY = re.compile(r"(?:LMX Lab|The daemon) is ready at http://(\S+?),? ")
CURLRC = "fail-with-body\nno-progress-meter\nmax-time = 60\n"
"""Makes curl fail on error responses, so that they fail the block."""
LMX_LAB = f"""\
#!{sys.executable}
import sys

if sys.argv[1:2] in (["serve"], ["chat"]):
    from tests.support.short_answers import limit_answers

    limit_answers()
from lmx_lab.cli import main

main()
"""
BEFORE_LAUNCH = "from tests.support.short_answers import limit_answers; limit_answers(); del limit_answers"
"""Runs in a kernel before its first cell that launches a lab."""


class PageRunner:
    """Run the blocks of one page. As a context manager, it ends everything that the page has started."""

    def __init__(self, folder: Path, models: Mapping[str, Path]) -> None:
        """
        Args:
            folder: An empty folder, which becomes the home and the working directory.
            models: Folders of models to put into the lab's store, by id.
        """
        self._folder = folder
        store = folder / ".lmx-lab" / "models"
        store.mkdir(parents=True)
        for name, path in models.items():
            (store / name).symlink_to(path)
        (folder / ".curlrc").write_text(CURLRC)
        command = folder / "bin" / "lmx-lab"
        command.parent.mkdir()
        command.write_text(LMX_LAB)
        command.chmod(0o755)
        self._environ = _environment(folder)
        self._kernel: Kernel | None = None
        self._services: list[Service] = []
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._kernel is not None:
                self._kernel.close()
        finally:
            for service in reversed(self._services):
                service.close()

    def run(self, block: Block) -> str:
        """Run a block and return what it prints.

        Raises:
            AssertionError: the block failed, or it needs a server that the page has not started.
        """
        text = self._replaced(block)
        if block.language == "bash":
            return self._start_service(text) if SERVICE.match(text) else self._run_bash(text)
        assert block.language == "python", block.location
        if program := PROGRAM.match(text.partition("\n")[0]):
            (self._folder / program[1]).write_text(text, encoding="utf-8")
            return self._run_bash(f"python {program[1]}")
        return self._run_cell(text)

    def _replaced(self, block: Block) -> str:
        text = block.text
        for replacements in (REPLACEMENTS["*"], REPLACEMENTS.get(block.page.name, {})):
            for old, new in replacements.items():
                text = text.replace(old, new)
        for address, name in SERVER_OF_ADDRESS.items():
            if address in text:
                assert name in self._addresses, f"the page has not started a {name} yet, for {address}"
                text = text.replace(address, self._addresses[name])
        return text

    def _run_cell(self, text: str) -> str:
        if self._kernel is None:
            self._kernel = Kernel(self._folder, self._environ)
        if ".launch(" in text:
            self._kernel.run(BEFORE_LAUNCH)
        output = self._kernel.run(text)
        for name, url in self._kernel.addresses().items():
            # A server in a terminal takes precedence over the kernel's.
            if name not in {service.name for service in self._services}:
                self._set_address(name, url.removeprefix("http://"))
        return output

    def _set_address(self, name: str, address: str) -> None:
        self._addresses[name] = address
        self._addresses.setdefault(f"first {name}", address)

    def _run_bash(self, text: str) -> str:
        return run_command(["bash", "-euc", text], self._folder, self._environ)

    def _start_service(self, text: str) -> str:
        service = Service(text, self._folder, self._environ)
        self._services.append(service)
        self._set_address(service.name, service.wait_until_ready())
        return service.output


class Kernel:
    """A kernel whose cells must neither fail nor write to standard error."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._manager = a_kernel()
        self._manager.start_kernel(cwd=str(folder), env=dict(environ))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=WAIT_S)

    def run(self, text: str) -> str:
        """Run a cell and return its standard output, and its results as plain text."""
        printed: dict[str, str] = {"stdout": "", "stderr": ""}

        def collect(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed[content["name"]] += content["text"]
            elif message["msg_type"] in ("execute_result", "display_data"):
                printed["stdout"] += content["data"].get("text/plain", "") + "\n"

        reply = self._client.execute_interactive(text, output_hook=collect, timeout=WAIT_S, allow_stdin=False)
        content = reply["content"]
        assert content["status"] == "ok", (content.get("ename"), content.get("evalue"), printed)
        assert not printed["stderr"], printed
        return printed["stdout"]

    def addresses(self) -> dict[str, str]:
        """Return the addresses of the lab and the daemon that the cells have started, if any."""
        expressions = {"server": "lab.url", "daemon": "lab.daemon.url"}
        reply = self._client.execute_interactive("", silent=True, user_expressions=expressions, timeout=WAIT_S)
        values = reply["content"]["user_expressions"]
        found = {name: value for name, value in values.items() if value["status"] == "ok"}
        return {name: ast.literal_eval(value["data"]["text/plain"]) for name, value in found.items()}

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()


def run_command(command: Sequence[str], folder: Path, environ: Mapping[str, str], *, limit_s: float = WAIT_S) -> str:
    """Run a command in a folder and return its standard output and standard error together.

    Raises:
        AssertionError: the exit status is not 0.
    """
    completed = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert completed.returncode == 0, f"exit status {completed.returncode}:\n{completed.stdout}"
    return completed.stdout


class Service:
    """``lmx-lab serve`` or ``lmx-lab daemon`` in a process of its own, until it is closed."""

    def __init__(self, text: str, folder: Path, environ: Mapping[str, str]) -> None:
        command = SERVICE.match(text)
        assert command is not None
        self.name = {"serve": "server", "daemon": "daemon"}[command[1]]
        self.output = ""
        self._process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._address = ""
        self._is_ready_or_ended = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if match := READY.search(line):
                self._address = match[1]
                self._is_ready_or_ended.set()
        self._is_ready_or_ended.set()

    def wait_until_ready(self) -> str:
        """Return the address, without a scheme, once the service accepts requests."""
        assert self._is_ready_or_ended.wait(WAIT_S), self.output
        assert self._address, self.output
        return self._address

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert "Traceback" not in self.output, self.output


def _environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LMX_LAB_", "HF_", "XDG_"))}
    path = [str(folder / "bin"), str(Path(sys.executable).parent), inherited.get("PATH", "")]
    return {
        **inherited,
        "HOME": str(folder),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
        # Any free ports, because other programs may use the default ones.
        "LMX_LAB_PORT": "0",
        "LMX_LAB_DAEMON_PORT": "0",
        # Nothing is downloaded: the models that the examples need are in the store.
        "HF_HUB_OFFLINE": "1",
    }


NOTEBOOK_FOLDER = Path(__file__).parent.parent.parent / "notebooks"
NOTEBOOKS = sorted(NOTEBOOK_FOLDER.glob("*.ipynb"))
