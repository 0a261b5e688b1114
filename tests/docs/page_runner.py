"""Run the examples of a page of the documentation."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.docs import CURLRC, ROOT, WAIT_S, Block, run_command
from tests.support.kernels import Notebook
from tests.support.waiting import until

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
        # The tiny model is stored in one format only.
        'engines=["mlx", "llama.cpp"]': 'engines=["mlx"]',
        "--engine mlx --engine llama.cpp": "--engine mlx",
        "bench --model tiny": "bench --model tiny -p 16 -n 4 --requests 2",
    },
}
PROGRAM = re.compile(r"# (\w+\.py)$")
"""First line of a block that is a program in a file of this name, not a notebook cell."""
SERVICE = re.compile(r"(?:\w+=\S+ )*lmx-lab (serve|daemon)\b[^\n]*$")
"""A block with a command that runs until it is stopped."""
READY = re.compile(r"(?:LMX Lab|The daemon) is ready at http://(\S+?),? ")
LMX_LAB = f"""\
#!{sys.executable}
import sys

if sys.argv[1:2] in (["serve"], ["chat"]):
    from tests.docs.short_answers import limit_answers

    limit_answers()
from lmx_lab.cli import main

main()
"""
BEFORE_LAUNCH = "from tests.docs.short_answers import limit_answers; limit_answers(); del limit_answers"
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
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("LMX_LAB_", "HF_", "XDG_"))
        }
        path = [str(command.parent), str(Path(sys.executable).parent), inherited.get("PATH", "")]
        self._environ = {
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
        self._kernel: Notebook | None = None
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
            if not SERVICE.match(text):
                return run_command(["bash", "-euc", text], self._folder, self._environ)
            service = Service(text, self._folder, self._environ)
            self._services.append(service)
            self._set_address(service.name, service.wait_until_ready())
            return service.output
        assert block.language == "python", block.location
        if program := PROGRAM.match(text.partition("\n")[0]):
            (self._folder / program[1]).write_text(text, encoding="utf-8")
            return run_command(["python", program[1]], self._folder, self._environ)
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
            self._kernel = Notebook(self._folder / ".lmx-lab", folder=self._folder, environ=self._environ)
        if ".launch(" in text:
            self._kernel.run(BEFORE_LAUNCH)
        self._kernel.start(text)
        output = self._kernel.read()
        assert output.error is None, (output.error, output.message, output.text)
        assert not output.stderr, output
        # The addresses of the lab and the daemon that the cells have started, if any.
        expressions = {"server": "lab.url", "daemon": "lab.daemon.url"}
        reply = self._kernel.client.execute_interactive("", silent=True, user_expressions=expressions, timeout=WAIT_S)
        for name, value in reply["content"]["user_expressions"].items():
            # A server in a terminal takes precedence over the kernel's.
            if value["status"] == "ok" and name not in {service.name for service in self._services}:
                self._set_address(name, ast.literal_eval(value["data"]["text/plain"]).removeprefix("http://"))
        return output.text + "".join(data.get("text/plain", "") + "\n" for data in output.shown)

    def _set_address(self, name: str, address: str) -> None:
        self._addresses[name] = address
        self._addresses.setdefault(f"first {name}", address)


class Service:
    """``lmx-lab serve`` or ``lmx-lab daemon`` in a process of its own, until it is closed."""

    def __init__(self, text: str, folder: Path, environ: Mapping[str, str]) -> None:
        command = SERVICE.match(text)
        assert command is not None
        self.name = {"serve": "server", "daemon": "daemon"}[command[1]]
        handle, name = tempfile.mkstemp(prefix=".log-", dir=folder)
        self._log = Path(name)
        with os.fdopen(handle, "w") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", text],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def wait_until_ready(self) -> str:
        """Return the address, without a scheme, once the service accepts requests."""
        until(lambda: READY.search(self.output) is not None or self._process.poll() is not None)
        ready = READY.search(self.output)
        assert ready is not None, self.output
        return ready[1]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(WAIT_S)
        assert "Traceback" not in self.output, self.output
