"""A reader of one page, who does what it says: a home, a kernel, a terminal, all real.

Addresses of the examples stand for those that the reader's servers have; ``STANDS_FOR`` and ``SHORTER`` are all that is
changed in the pages' code.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.docs.pages import ROOT, Block
from tests.kernels import a_kernel

WAIT_S = 120
STANDS_FOR = {
    "127.0.0.1:8400": "server",
    "192.168.1.20:8400": "server",  # another machine's
    "127.0.0.1:8080": "first server",  # another make's
    "127.0.0.1:8401": "daemon",
}
"""Which of the reader's servers answers in the place of an address: the last one that was started, or the first."""
SHORTER: Mapping[str, Mapping[str, str]] = {
    # Tests listen on loopback alone.
    "*": {"--host 0.0.0.0": "--host 127.0.0.1"},
    # A model of two layers: this page is about what surrounds it.
    "notebook.md": {"smollm2-135m": "tiny"},
    # The same, and a small part of the requests.
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
"""The first line of a block that is a program of its own, and no cell."""
SERVICE = re.compile(r"(?:\w+=\S+ )*lmx-lab (serve|daemon)\b[^\n]*$")
"""A block that goes on until it is stopped."""
READY = re.compile(r"(?:LMX Lab|The daemon) is ready at http://(\S+?),? ")
CURLRC = "fail-with-body\nno-progress-meter\nmax-time = 60\n"
"""As a reader would notice: an answer that is an error fails the block."""
LMX_LAB = f"""\
#!{sys.executable}
import sys

if sys.argv[1:2] == ["serve"]:
    from tests.docs.brevity import be_brief

    be_brief()
from lmx_lab.cli import main

main()
"""
BEGIN = "from tests.docs.brevity import be_brief; be_brief(); del be_brief"
"""In a kernel before it serves."""


class Reader:
    """Use it as a context: at its end everything that the page has started ends."""

    def __init__(self, folder: Path, models: Mapping[str, Path]) -> None:
        """
        Args:
            folder: The reader's own, empty.
            models: What is in the lab's store, by id.
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

    def do(self, block: Block) -> str:
        """What the block prints; it must not fail."""
        text = self._as_here(block)
        if block.language == "bash":
            return self._serve(text) if SERVICE.match(text) else self._bash(text)
        assert block.language == "python", block.place
        if program := PROGRAM.match(text.partition("\n")[0]):
            (self._folder / program[1]).write_text(text, encoding="utf-8")
            return self._bash(f"python {program[1]}")
        return self._cell(text)

    def _as_here(self, block: Block) -> str:
        text = block.text
        for changes in (SHORTER["*"], SHORTER.get(block.page.name, {})):
            for there, here in changes.items():
                text = text.replace(there, here)
        for there, name in STANDS_FOR.items():
            if there in text:
                assert name in self._addresses, f"the page has no {name} yet, for {there}"
                text = text.replace(there, self._addresses[name])
        return text

    def _cell(self, text: str) -> str:
        if self._kernel is None:
            self._kernel = Kernel(self._folder, self._environ)
        if ".launch(" in text:
            self._kernel.run(BEGIN)
        output = self._kernel.run(text)
        for name, url in self._kernel.addresses().items():
            # As long as the page has one in a terminal, that is meant.
            if name not in {service.name for service in self._services}:
                self._is_at(name, url.removeprefix("http://"))
        return output

    def _is_at(self, name: str, address: str) -> None:
        self._addresses[name] = address
        self._addresses.setdefault(f"first {name}", address)

    def _bash(self, text: str) -> str:
        return printed(["bash", "-euc", text], self._folder, self._environ)

    def _serve(self, text: str) -> str:
        service = Service(text, self._folder, self._environ)
        self._services.append(service)
        self._is_at(service.name, service.wait_until_ready())
        return service.output


class Kernel:
    """A kernel whose cells must not fail, nor say anything on standard error."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._manager = a_kernel()
        self._manager.start_kernel(cwd=str(folder), env=dict(environ))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=WAIT_S)

    def run(self, text: str) -> str:
        printed: dict[str, str] = {"stdout": "", "stderr": ""}

        def keep(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed[content["name"]] += content["text"]
            elif message["msg_type"] in ("execute_result", "display_data"):
                printed["stdout"] += content["data"].get("text/plain", "") + "\n"

        reply = self._client.execute_interactive(text, output_hook=keep, timeout=WAIT_S, allow_stdin=False)["content"]
        assert reply["status"] == "ok", (reply.get("ename"), reply.get("evalue"), printed)
        assert not printed["stderr"], printed
        return printed["stdout"]

    def addresses(self) -> dict[str, str]:
        """Of the lab and the daemon that the cells have started, if they have."""
        asked = {"server": "lab.url", "daemon": "lab.daemon.url"}
        reply = self._client.execute_interactive("", silent=True, user_expressions=asked, timeout=WAIT_S)["content"]
        told = {name: value for name, value in reply["user_expressions"].items() if value["status"] == "ok"}
        return {name: ast.literal_eval(value["data"]["text/plain"]) for name, value in told.items()}

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()


def printed(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> str:
    """What a command has written to both streams; it has to end well."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}"
    return done.stdout


class Service:
    """``lmx-lab serve`` or ``lmx-lab daemon`` in a terminal of its own, until it is closed."""

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
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if found := READY.search(line):
                self._address = found[1]
                self._told.set()
        self._told.set()

    def wait_until_ready(self) -> str:
        """Its address, without a scheme."""
        assert self._told.wait(WAIT_S), self.output
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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LMX_LAB_", "HF_", "XDG_"))}
    path = [str(folder / "bin"), str(Path(sys.executable).parent), kept.get("PATH", "")]
    return {
        **kept,
        "HOME": str(folder),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
        # Any free ones: others may have the usual ports.
        "LMX_LAB_PORT": "0",
        "LMX_LAB_DAEMON_PORT": "0",
        # Nothing is fetched: what the examples need is there.
        "HF_HUB_OFFLINE": "1",
    }
