"""Start the measured servers, each in its own process and with the same model."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks import client, prompts
from benchmarks.bench import BenchError
from benchmarks.processes import START_S, Reply, Worker, end, folder_argument, log_tail, spawn
from lmx_lab.engine.llama_cpp.memory_plan import plan_context
from lmx_lab.engine.mlx.memory import limit_bytes
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.facts import read_gguf
from tests.support.sockets import free_port

POLL_S = 0.002


class LabServer:
    """The lab's server, with a pipe for reading the engine's figures."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.url: str = worker.ready["url"]
        self.extras: dict[str, Any] = {}
        """``ignore_eos`` if the server supports it; otherwise answers may end before ``max_tokens``."""

    @property
    def pid(self) -> int:
        return self._worker.pid

    def snapshot(self) -> Reply:
        return self._worker.ask(limit_s=60)

    def cpu_s(self) -> float:
        """Return the CPU time of the server so far."""
        times = psutil.Process(self._worker.pid).cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self._worker.pid).memory_info().rss)

    def tree_bytes(self) -> int:
        """Return the resident memory of the process and its children. Only used pages of mapped files count."""
        own = psutil.Process(self._worker.pid)
        return sum(int(process.memory_info().rss) for process in (own, *own.children(recursive=True)))

    async def until(self, reached: Any, *, limit_s: float, what: str) -> float:
        """Wait until ``reached(snapshot)`` is true for the engine's figures, and return the seconds."""
        started = time.perf_counter()
        while not reached(now := self.snapshot()):
            if time.perf_counter() - started > limit_s:
                raise BenchError(f"{what}: not within {limit_s:g} s; {now}")
            await asyncio.sleep(POLL_S)
        return time.perf_counter() - started

    async def until_idle(self, limit_s: float = 120) -> None:
        await self.until(is_idle, limit_s=limit_s, what="idle")


def is_idle(now: Reply) -> bool:
    return bool(now["active_requests"] == now["queued_requests"] == 0)


@contextlib.contextmanager
def lab_server(
    folder: Path, *, prompt_lookup: bool = False, draft: Path | None = None, **settings: Any
) -> Iterator[LabServer]:
    """Run the lab's server, with the model loaded and warmed up. Prompt lookup is off, so that a step is one token."""
    options = {"prompt_lookup": prompt_lookup, "draft": draft and str(draft)}
    with Worker("benchmarks.lab_process", model=folder_argument(folder), options=options, **settings) as worker:
        server = LabServer(worker)
        asyncio.run(_warm(server))
        yield server


async def _warm(server: LabServer) -> None:
    body = prompts.chat_body(prompts.story(0), max_tokens=4)
    with contextlib.suppress(InvalidRequestError):
        await client.whole(server.url, body | {"ignore_eos": True})
        server.extras = {"ignore_eos": True}
    await client.stream(server.url, body)


@contextlib.contextmanager
def bare_generator(folder: Path) -> Iterator[Worker]:
    """Run a process with mlx-lm's ``BatchGenerator``, with the model loaded and warmed up."""
    with Worker("benchmarks.bare_process", model=folder_argument(folder)) as worker:
        worker.ask(prompts=[prompts.story(0)], max_tokens=4)
        yield worker


@contextlib.contextmanager
def mlx_lm_server(folder: Path) -> Iterator[str]:
    """Run ``mlx_lm.server`` with its defaults, with the model loaded and warmed up. Yields its URL."""
    port = free_port()
    arguments = ["--model", folder_argument(folder), "--port", str(port), "--log-level", "WARNING"]
    process = spawn("mlx_lm_server", ["-m", "mlx_lm", "server", *arguments], channel=False)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"mlx_lm.server did not start: {log_tail('mlx_lm_server')}")
            time.sleep(0.2)
        asyncio.run(client.stream(url, prompts.chat_body(prompts.story(0), max_tokens=4, model="default_model")))
        yield url
    finally:
        end(process)


@contextlib.contextmanager
def llama_server(entry: ModelEntry) -> Iterator[str]:
    """Run xllamacpp's server with the slots and context of our engine, with the model loaded and warmed up.

    Yields its URL.

    Raises:
        BenchError: xllamacpp is not installed.
    """
    if find_spec("xllamacpp") is None:
        raise BenchError("llama.cpp is not installed: pip install 'lmx-lab[gguf]'")
    limit = limit_bytes(None)
    planned = plan_context(entry, read_gguf(entry.path), slots=Settings().slots, limit_bytes=limit)
    size: dict[str, Any] = {"slots": planned.slots, "total_tokens": planned.total_tokens}
    with Worker("benchmarks.llama_process", model=str(entry.path), port=free_port(), **size) as worker:
        url: str = worker.ready["url"]
        asyncio.run(client.stream(url, prompts.chat_body(prompts.story(0), max_tokens=4)))
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
