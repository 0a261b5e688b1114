"""Send hostile bodies, one and then six at once.

They must be refused within two seconds, without delaying health requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from soak.hostile_bodies import CHATS, DAEMON, OTHERS, REPORTED, TOO_LONG, HostileBody, selection
from soak.models import write_models
from soak.probe import PROBE_S, TIMEOUT_S
from soak.programs import SMALL_CACHE, Command, Daemon, Home, Server, end_and_check, wait_until
from soak.report import Row, Soak, SoakError
from soak.resources import ResourceMonitor

AT_ONCE = 6
ROUNDS_S = 2.0
"""Duration for which each body is sent repeatedly; about a hundred health requests are sent meanwhile."""
ANSWER_S = 2.0
"""Limit for the answer to a hostile body."""
HEALTH_S = 0.05
"""Allowed increase of the 99th percentile of health requests, over that while as many bytes are refused unread."""
PROBE = Path(__file__).parent / "probe.py"
GROWTH = 1.2
SETTLED_S = 60.0
LAUNCHED = """
import asyncio, lmx_lab

async def launched():
    lab = lmx_lab.launch({model!r}, port=0, loop={loop!r})
    print("ready at", lab.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(launched())
"""
Exchange = Callable[[HostileBody], tuple[int, str]]
"""Sends a body; returns the status and the text of the answer. For a WebSocket, the status is the close code."""


def run(soak: Soak) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        homes = Home(Path(name, "s")), Home(Path(name, "d"))
        write_models(homes[0].folder / "models", soak, "MLX")
        options = ["--no-downloads", "--embedder", "tiny-embedder", "--reranker", "tiny-reranker", *SMALL_CACHE]
        with Server(homes[0], "tiny", *options) as server, Daemon(homes[1], server.url) as daemon:
            rows = attack_server(soak, server)
            with Probe(daemon.state.url, "/v3/health") as probe:
                target = Target("daemon", daemon, daemon.state.url, probe, daemon.state.token)
                rows += [attack(target, target.post, body) for body in selected(soak, DAEMON)]
            for command in (daemon, server):
                end_and_check(command, rows[-1])
    return rows + launched(soak, "thread") + launched(soak, "kernel")


def attack_server(soak: Soak, server: Server) -> list[Row]:
    with Probe(server.url, "/healthz") as probe:
        target = Target("server", server, server.url, probe)
        rows = [attack(target, target.post, body) for body in selected(soak, (*CHATS, *OTHERS))]
        target = Target("socket", server, server.url, probe)
        return rows + [attack(target, target.over_websocket, body) for body in selected(soak, CHATS)]


def launched(soak: Soak, loop: Literal["thread", "kernel"]) -> list[Row]:
    """Attack a server that ``launch()`` has started in its process."""
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        _LaunchedLab(Home(Path(name)), soak.folder, loop) as server,
        Probe(server.url, "/healthz") as probe,
    ):
        target = Target(f"launch, {loop}", server, server.url, probe)
        bodies = list(selected(soak, REPORTED))
        return [attack(target, exchange, body) for exchange in (target.post, target.over_websocket) for body in bodies]


def selected(soak: Soak, bodies: tuple[HostileBody, ...]) -> Sequence[HostileBody]:
    return selection(bodies) if soak.quick else bodies


class _LaunchedLab(Server):
    """A process that calls ``launch()`` and then waits."""

    def __init__(self, home: Home, model: Path, loop: str) -> None:
        Command.__init__(self, home, code=LAUNCHED.format(model=str(model), loop=loop))
        self._url = ""


class Probe:
    """Measure health requests in a separate process, as a context manager."""

    def __init__(self, url: str, path: str) -> None:
        self._printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, str(PROBE), url, path], stdin=subprocess.PIPE, stdout=self._printed, stderr=self._printed
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._printed.close()

    def seconds(self, since: float) -> list[float]:
        """Return the durations of all requests sent since a time, in ascending order.

        Raises:
            SoakError: health requests are no longer answered.
        """
        if not wait_until(lambda: self._read()[-1:] > [(since + 10 * PROBE_S, 0.0)], TIMEOUT_S):
            raise SoakError(f"health is not answered: {self._text()[-500:]}")
        return sorted(took_s for began, took_s in self._read() if began >= since)

    def _read(self) -> list[tuple[float, float]]:
        lines = [line.split() for line in self._text().splitlines()[:-1]]
        return [(float(line[0]), float(line[1])) for line in lines if len(line) == 2]

    def _text(self) -> str:
        self._printed.seek(0)
        return self._printed.read()


def p99(seconds: Sequence[float]) -> float:
    return seconds[int(len(seconds) * 0.99)]


def _ms(seconds: Sequence[float]) -> str:
    return f"{p99(seconds) * 1e3:.0f}, {seconds[-1] * 1e3:.0f} ms"


@dataclass(frozen=True)
class Target:
    name: str
    command: Command
    url: str
    probe: Probe
    token: str = ""

    @cached_property
    def baseline_s(self) -> list[float]:
        """Durations of health requests while as many bytes are refused unread, in ascending order."""
        began = time.monotonic()
        while time.monotonic() < began + ROUNDS_S:
            _send_at_once(self, self.post, TOO_LONG, AT_ONCE, Row(part="baseline"))
        return self.probe.seconds(began)

    def post(self, body: HostileBody) -> tuple[int, str]:
        url = urlsplit(self.url)
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {self.token}"} if self.token else {}
        )
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(body.method, body.path, body.content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")

    def over_websocket(self, body: HostileBody) -> tuple[int, str]:
        text = ""
        address = f"{self.url.replace('http', 'ws', 1)}/v1/chat/stream"
        with connect(address, proxy=None, max_size=None, open_timeout=TIMEOUT_S) as socket:
            try:
                socket.send(body.content.decode())
                text = str(socket.recv(timeout=TIMEOUT_S))
                socket.recv(timeout=TIMEOUT_S)
            except ConnectionClosed as exc:
                return exc.rcvd.code if exc.rcvd else 0, text
        return 1000, text


def attack(target: Target, exchange: Exchange, body: HostileBody) -> Row:
    """Send a body once and then ``AT_ONCE`` times at once; record answers, durations, health requests and memory."""
    row = Row(part=f"bodies: {body.name}, {target.name}")
    size = len(body.content)
    monitor = ResourceMonitor(target.command.pid)
    before = monitor.read().rss_bytes
    began = time.monotonic()
    alone_s = _send_at_once(target, exchange, body, 1, row)
    together_s = _send_at_once(target, exchange, body, AT_ONCE, row)
    while time.monotonic() < began + ROUNDS_S:
        together_s = max(together_s, _send_at_once(target, exchange, body, AT_ONCE, row))
    health = target.probe.seconds(began)
    row.slowest_s = max(alone_s, together_s)
    if p99(health) > HEALTH_S + p99(target.baseline_s):
        row.hung += 1
        row.wrong.append(f"health took {_ms(health)} (p99, worst), otherwise {_ms(target.baseline_s)}")
    wait_until(lambda: monitor.read().rss_bytes <= GROWTH * before, SETTLED_S, every_s=0.1)
    after = monitor.read().rss_bytes
    row.leaked_mb = round(max(0.0, after - GROWTH * before) / 1e6, 1)
    row.notes = (
        f"{size / 1e6:.1f} MB; answered after {alone_s:.2f} s alone, {together_s:.2f} s {AT_ONCE} at once; "
        f"{row.notes}; health {_ms(health)} (p99, worst), otherwise {_ms(target.baseline_s)}; "
        f"RSS {before / 1e6:.0f} to {after / 1e6:.0f} MB"
    )
    # Free the body, because all of them together are hundreds of MB.
    body.__dict__.pop("content", None)
    return row


def _send_at_once(target: Target, exchange: Exchange, body: HostileBody, count: int, row: Row) -> float:
    """Send a body ``count`` times at once; return the seconds until the last answer."""
    row.requests += count
    row.faults += count
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(exchange, body) for _ in range(count)]
    took_s = time.perf_counter() - began
    for future in futures:
        try:
            status, text = future.result()
        except (OSError, TimeoutError) as exc:
            row.hung += 1
            row.wrong.append(f"not answered: {exc!r}")
            continue
        error = _error(text)
        row.notes = f"{status} {error.get('message', '')[:100]!r}"
        code = error.get("code", "")
        if not body.refused:
            fine = status in (200, 201, 1000) or code not in ("", "internal-error")
        elif status in (1008, 1009):
            # A WebSocket sends an error before it closes.
            fine = code in ("invalid-request", "body-too-large")
        else:
            fine = status in (400, 413)
        if not fine:
            row.lost += 1
            row.wrong.append(f"answered with {status}: {text[:200]}")
    if body.refused and took_s > ANSWER_S:
        row.hung += 1
        row.wrong.append(f"{count} at once: answered after {took_s:.1f} s")
    return took_s


def _error(text: str) -> dict[str, str]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}
