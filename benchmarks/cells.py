"""Measure how long a blocked cell delays streams, WebSockets and connections of other programs."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import websockets
from jupyter_client.manager import KernelManager

from benchmarks.bench import Bench, BenchError
from benchmarks.report import Limit, Row
from lmx_lab.notebook.local import LoopChoice

FIGURE = "longest gap of other clients while a cell sleeps"
IDLE = "CPU time of an idle kernel with a lab, kernel ÷ thread"
SLEEP_S, QUICK_SLEEP_S = 20.0, 3.0
IDLE_S, QUICK_IDLE_S = 20.0, 3.0
LEAD_S = 1.0
"""Time for which the clients are also measured before and after the sleep."""
TOKENS_PER_S = 100
POLL_S = 0.02
WAIT_S = 60.0
LAUNCH = """
import time, lmx_lab
lab = lmx_lab.launch("echo", loop={loop!r}, port=0, home={home!r}, echo_tokens_per_s={rate})
print(lab.url)
"""


def measure(bench: Bench) -> list[Row]:
    sleep_s = QUICK_SLEEP_S if bench.quick else SLEEP_S
    with _kernel("auto") as kernel:
        gaps = asyncio.run(_gaps(kernel, sleep_s))
    rows = [
        Row(
            figure=FIGURE,
            case=f"{client}, time.sleep({sleep_s:g})",
            model=bench.model,
            value=max(times),
            unit="s",
            limit=Limit(sign="≤", bound=0.5),
            summary=f"{len(times)} gaps, {sorted(times)[len(times) // 2] * 1e3:.1f} ms in the median",
            detail={"gaps": times},
        )
        for client, times in gaps.items()
    ]
    return [*rows, _idle(bench)]


def _idle(bench: Bench) -> Row:
    idle_s = QUICK_IDLE_S if bench.quick else IDLE_S
    shares: dict[LoopChoice, float] = {}
    for loop in ("kernel", "thread"):
        with _kernel(loop) as kernel:
            time.sleep(LEAD_S)
            before, began = kernel.cpu_s(), time.perf_counter()
            time.sleep(idle_s)
            shares[loop] = (kernel.cpu_s() - before) / (time.perf_counter() - began)
    return Row(
        figure=IDLE,
        case=f"{idle_s:g} s",
        model=bench.model,
        value=shares["kernel"] / shares["thread"],
        summary=f"{shares['kernel']:.2%} against {shares['thread']:.2%} of a core",
        detail={"shares": shares},
    )


class _Kernel:
    """A kernel with a lab of the echo engine."""

    def __init__(self, manager: KernelManager) -> None:
        self._client = manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=WAIT_S)
        self.url = ""

    def run(self, code: str) -> str:
        """Run a cell and return what it prints."""
        printed: list[str] = []

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(code, timeout=WAIT_S, output_hook=keep)
        if reply["content"]["status"] != "ok":
            raise BenchError(f"the cell failed: {reply['content'].get('evalue')}")
        return "".join(printed).strip()

    def cpu_s(self) -> float:
        # Measured in the kernel: psutil reads ticks of 10 ms, which are too long for an idle process.
        return float(self.run("print(time.process_time())"))

    def close(self) -> None:
        self._client.stop_channels()


@contextmanager
def _kernel(loop: LoopChoice) -> Iterator[_Kernel]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    try:
        with tempfile.TemporaryDirectory() as home:
            kernel = _Kernel(manager)
            kernel.url = kernel.run(LAUNCH.format(loop=loop, home=home, rate=TOKENS_PER_S))
            yield kernel
            kernel.close()
    finally:
        manager.shutdown_kernel()


async def _gaps(kernel: _Kernel, sleep_s: float) -> dict[str, list[float]]:
    """Return the times between the pieces that each client receives, and the times of requests."""
    words = " ".join(["word"] * int((sleep_s + 4 * LEAD_S) * TOKENS_PER_S))
    body = {"model": "default", "messages": [{"role": "user", "content": words}], "max_tokens": 100_000}
    async with httpx2.AsyncClient(base_url=kernel.url, timeout=WAIT_S) as http:
        sources = {
            "stream": _stream(http, body),
            "WebSocket": _socket(kernel.url, body),
            "kept-alive connection": _requests(http),
            "new connections": _new_connections(kernel.url),
        }
        reading = {name: asyncio.create_task(_read(source)) for name, source in sources.items()}
        await asyncio.sleep(LEAD_S)
        await asyncio.to_thread(kernel.run, f"time.sleep({sleep_s})")
        await asyncio.sleep(LEAD_S)
        for task in reading.values():
            task.cancel()
        return {name: await task for name, task in reading.items()}


async def _read(source: AsyncIterator[None]) -> list[float]:
    """Return the gaps between the items of a source, until the task is cancelled."""
    gaps: list[float] = []
    last: float | None = None
    try:
        async for _ in source:
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
    except asyncio.CancelledError:
        if last is not None:
            gaps.append(time.perf_counter() - last)
    return gaps


async def _stream(http: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncIterator[None]:
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield


async def _socket(url: str, body: dict[str, Any]) -> AsyncIterator[None]:
    async with websockets.connect(f"{url.replace('http', 'ws', 1)}/v1/chat/stream") as socket:
        await socket.send(json.dumps(body))
        async for _ in socket:
            yield


async def _requests(http: httpx2.AsyncClient) -> AsyncIterator[None]:
    while True:
        (await http.get("/healthz")).raise_for_status()
        yield
        await asyncio.sleep(POLL_S)


async def _new_connections(url: str) -> AsyncIterator[None]:
    while True:
        async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S) as http:
            (await http.get("/healthz")).raise_for_status()
        yield
        await asyncio.sleep(POLL_S)
