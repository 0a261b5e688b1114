"""Serve two long streams in a process with little memory, and compare its footprint with its limit.

The caches of ended requests may use more than the whole limit, so that they are dropped all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil

from lmx_lab.engine.memory import CGROUPS, MEMBERSHIP
from soak.programs import Home, Server, end_and_check, wait_until
from soak.report import Row, Soak
from tests.support.models import write_tiny_llama

LIMIT_BYTES, QUICK_LIMIT_BYTES = 3 * 10**9, 10**9
"""Memory of the process. The server may use 80 % of it."""
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 8000, 2000
ANSWER_TOKENS = 64
CONTEXT_TOKENS = 8192
HEADS, HEAD_SIZE = 8, 256
"""With two layers, the KV cache of a token has 32 kB, and that of a stream of 8,192 tokens 268 MB."""
SECONDS, QUICK_SECONDS = 1200.0, 60.0
STREAMS = 2
REQUEST_S = 900.0
"""Limit for one request, which takes up to 100 s on two cores that are not used by other programs."""
EXCESS = 1.03
"""Largest footprint that is allowed, as a multiple of the limit."""
SAMPLE_S = 0.02
REPEATED, LEFT = 0.25, 0.15
"""Shares of the requests that repeat an earlier prompt, and whose client disconnects."""
ENDED = re.compile(r"^lmx_lab_requests_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass
class Footprint:
    """Measures the memory of a process, without mapped files, on a thread."""

    process: psutil.Process
    largest_bytes: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with contextlib.suppress(psutil.Error):
            while not self.stopped.wait(SAMPLE_S):
                known = self.process.memory_info()
                self.largest_bytes = max(self.largest_bytes, known.rss - known.shared)


def run(soak: Soak) -> list[Row]:
    limit = QUICK_LIMIT_BYTES if soak.quick else LIMIT_BYTES
    seconds = soak.seconds or (QUICK_SECONDS if soak.quick else SECONDS)
    row = Row(part=f"memory: {STREAMS} streams within {limit / 1e9:g} GB")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name, _limited(limit) as (code, how):
        model = Path(name) / "wide"
        write_tiny_llama(model, soak.folder, seed=0, context=CONTEXT_TOKENS, heads=HEADS, head_size=HEAD_SIZE)
        options = ("--slots", str(STREAMS), "--prefix-cache", str(limit / 1e9))
        environment = {"LMX_LAB_REQUEST_TIMEOUT_S": str(REQUEST_S)}
        with Server(Home(Path(name) / "home"), model, *options, code=code, environment=environment) as server:
            _serve(soak, server, row, seconds, how)
            end_and_check(server, row)
    return [row]


@contextlib.contextmanager
def _limited(limit: int) -> Iterator[tuple[str, str]]:
    """Yield Python with which a process limits its memory, and the name of the limit: a control group if one can be
    made, or else ``RLIMIT_DATA``.
    """
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    own = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    for parent, file in (
        (CGROUPS / "memory" / own.get("memory", ""), "memory.limit_in_bytes"),
        (CGROUPS / own.get("", ""), "memory.max"),
    ):
        group = parent / f"lmx-lab-soak-{time.time_ns()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
            yield f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))", "a control group"
            return
        except PermissionError:
            continue
        finally:
            # Killed processes leave the group when the system has released their memory.
            wait_until(lambda: not (group / "cgroup.procs").read_text(), 30.0)  # noqa: B023 (only called here)
            group.rmdir()
    yield f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))", "RLIMIT_DATA"


def _serve(soak: Soak, server: Server, row: Row, seconds: float, how: str) -> None:
    """Send requests until the time is over, and record how they ended and how much memory the server used."""
    footprint, allowed = Footprint(psutil.Process(server.pid)), 0.0
    assert server.url
    allowed = server.metrics()["memory_limit_bytes"]
    measuring = threading.Thread(target=footprint.run)
    measuring.start()
    outcomes: Counter[str] = Counter()
    try:
        asyncio.run(_send(soak, server, row, outcomes, time.monotonic() + seconds))
    finally:
        footprint.stopped.set()
        measuring.join()
    if not server.running:
        row.wrong.append(f"the server has ended: {server.output[-500:]}")
        return
    if not server.wait_until_idle():
        row.hung += 1
        row.wrong.append(f"requests without a client still run: {server.metrics()}")
    metrics = httpx2.get(f"{server.url}/metrics", timeout=30, trust_env=False).text
    if (ended := sum(float(count) for count in ENDED.findall(metrics))) != row.requests:
        row.doubled += max(0, int(ended) - row.requests)
        row.lost += max(0, row.requests - int(ended))
        row.wrong.append(f"the server counts {ended:g} ends of {row.requests} requests")
    ratio = footprint.largest_bytes / allowed
    if ratio > EXCESS:
        row.wrong.append(f"the footprint was {ratio:.3f} times the limit")
    row.notes = (
        f"{seconds:g} s in {how}; footprint {footprint.largest_bytes / 1e9:.3f} GB, limit {allowed / 1e9:.3f} GB: "
        f"{ratio:.3f}; " + ", ".join(f"{count} {what}" for what, count in outcomes.most_common())
    )
    row.detail = {"largest_bytes": footprint.largest_bytes, "allowed_bytes": allowed, "ratio": ratio}


async def _send(soak: Soak, server: Server, row: Row, outcomes: Counter[str], until: float) -> None:
    tokens = QUICK_PROMPT_TOKENS if soak.quick else PROMPT_TOKENS
    sent: list[list[int]] = []

    async def stream(number: int) -> None:
        choose = random.Random(soak.seed * STREAMS + number)
        async with httpx2.AsyncClient(base_url=server.url, timeout=REQUEST_S, trust_env=False) as http:
            while time.monotonic() < until and server.running:
                prompt = [choose.randrange(100, 40_000) for _ in range(tokens)]
                if sent and choose.random() < REPEATED:
                    prompt = choose.choice(sent[-4:])
                sent.append(prompt)
                row.requests += 1
                leaves = choose.random() < LEFT
                row.faults += leaves
                began = time.perf_counter()
                outcome = await _complete(http, prompt, leaves=leaves)
                outcomes[outcome] += 1
                if outcome == "length":
                    row.slowest_s = max(row.slowest_s, time.perf_counter() - began)
                elif outcome != "left":
                    row.lost += 1
                    row.wrong.append(f"a request ended with {outcome}")
                    return

    await asyncio.gather(*map(stream, range(STREAMS)))


async def _complete(http: httpx2.AsyncClient, prompt: list[int], *, leaves: bool) -> str:
    """Send a request, and return how it ended: its finish reason, ``left``, or an error.

    Args:
        leaves: Whether to disconnect after the first token.
    """
    body = {"model": "default", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
    finished = []
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return str(event["error"])[:200]
                finished += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
                if leaves and event["choices"]:
                    return "left"
    except httpx2.HTTPError as exc:
        return repr(exc)
    return finished[0] if len(finished) == 1 else f"{len(finished)} ends"
