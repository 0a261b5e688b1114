"""Hostile bodies, one and then six at once: refused within two seconds, without delaying answers to health requests."""

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

from soak.hostile_bodies import CHATS, DAEMON, OTHERS, REPORTED, TOO_LONG, HostileBody, few
from soak.models import write_models
from soak.probe import GIVE_UP_S, PROBE_S
from soak.row import Row
from soak.served import SMALL_CACHE, Command, Daemon, Home, Server, end_well, until
from soak.soak import Soak, SoakError
from soak.watch import Watch

AT_ONCE = 6
ROUNDS_S = 2.0
"""Each is sent repeatedly for this long, so that health is requested about a hundred times meanwhile."""
ANSWER_S = 2.0
"""Each has to be answered within this time."""
HEALTH_S = 0.05
"""How much longer 99 of 100 health requests may take than while as many bytes are refused unread."""
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
"""Sends a body; the status of the answer, and what it says. A WebSocket's status is that of its close."""


def run(soak: Soak) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        homes = Home(Path(name, "s")), Home(Path(name, "d"))
        write_models(homes[0].folder / "models", soak, "MLX")
        options = ["--no-downloads", "--embedder", "tiny-embedder", "--reranker", "tiny-reranker", *SMALL_CACHE]
        with Server(homes[0], "tiny", *options) as server, Daemon(homes[1], server.url) as daemon:
            rows = beside_the_server(soak, server)
            with Probe(daemon.state.url, "/v3/health") as probe:
                place = Place("daemon", daemon, daemon.state.url, probe, daemon.state.token)
                rows += [attack(place, place.post, body) for body in chosen(soak, DAEMON)]
            for command in (daemon, server):
                end_well(command, rows[-1])
    return rows + launched(soak, "thread") + launched(soak, "kernel")


def beside_the_server(soak: Soak, server: Server) -> list[Row]:
    with Probe(server.url, "/healthz") as probe:
        place = Place("server", server, server.url, probe)
        rows = [attack(place, place.post, body) for body in chosen(soak, (*CHATS, *OTHERS))]
        place = Place("socket", server, server.url, probe)
        return rows + [attack(place, place.on_socket, body) for body in chosen(soak, CHATS)]


def launched(soak: Soak, loop: Literal["thread", "kernel"]) -> list[Row]:
    """The same in the process of a notebook."""
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        _Launched(Home(Path(name)), soak.folder, loop) as server,
        Probe(server.url, "/healthz") as probe,
    ):
        place = Place(f"launch, {loop}", server, server.url, probe)
        bodies = list(chosen(soak, REPORTED))
        return [attack(place, exchange, body) for exchange in (place.post, place.on_socket) for body in bodies]


def chosen(soak: Soak, bodies: tuple[HostileBody, ...]) -> Sequence[HostileBody]:
    return few(bodies) if soak.quick else bodies


class _Launched(Server):
    """``launch()`` in a process that does nothing else."""

    def __init__(self, home: Home, model: Path, loop: str) -> None:
        Command.__init__(self, home, code=LAUNCHED.format(model=str(model), loop=loop))
        self._url = ""


class Probe:
    """Health as another client has it all the time, as a context."""

    def __init__(self, url: str, path: str) -> None:
        self._printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is closed where the process has ended)
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
        """What each answer took that was asked for since then, the slowest last.

        Raises:
            SoakError: there is none any more.
        """
        if not until(lambda: self._read()[-1:] > [(since + 10 * PROBE_S, 0.0)], GIVE_UP_S):
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
class Place:
    name: str
    command: Command
    url: str
    probe: Probe
    token: str = ""

    @cached_property
    def otherwise(self) -> list[float]:
        """Health beside as many bytes, which are refused unread."""
        began = time.monotonic()
        while time.monotonic() < began + ROUNDS_S:
            _sent(self, self.post, TOO_LONG, AT_ONCE, Row(part="baseline"))
        return self.probe.seconds(began)

    def post(self, body: HostileBody) -> tuple[int, str]:
        place = urlsplit(self.url)
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {self.token}"} if self.token else {}
        )
        line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=GIVE_UP_S)
        with contextlib.closing(line):
            line.request(body.method, body.path, body.content, headers)
            answer = line.getresponse()
            return answer.status, answer.read().decode(errors="replace")

    def on_socket(self, body: HostileBody) -> tuple[int, str]:
        said = ""
        address = f"{self.url.replace('http', 'ws', 1)}/v1/chat/stream"
        with connect(address, proxy=None, max_size=None, open_timeout=GIVE_UP_S) as socket:
            try:
                socket.send(body.content.decode())
                said = str(socket.recv(timeout=GIVE_UP_S))
                socket.recv(timeout=GIVE_UP_S)
            except ConnectionClosed as exc:
                return exc.rcvd.code if exc.rcvd else 0, said
        return 1000, said


def attack(place: Place, exchange: Exchange, body: HostileBody) -> Row:
    """A row: the answers, the time until the last, what health took meanwhile, and the memory before and after."""
    row = Row(part=f"bodies: {body.name}, {place.name}")
    size = len(body.content)
    watch = Watch(place.command.pid)
    before = watch.read().rss_bytes
    began = time.monotonic()
    alone_s = _sent(place, exchange, body, 1, row)
    together_s = 0.0
    while time.monotonic() < began + ROUNDS_S:
        together_s = max(together_s, _sent(place, exchange, body, AT_ONCE, row))
    health = place.probe.seconds(began)
    row.slowest_s = max(alone_s, together_s)
    if p99(health) > HEALTH_S + p99(place.otherwise):
        row.hung += 1
        row.wrong.append(f"health took {_ms(health)} (p99, worst), otherwise {_ms(place.otherwise)}")
    until(lambda: watch.read().rss_bytes <= GROWTH * before, SETTLED_S, every_s=0.1)
    after = watch.read().rss_bytes
    row.leaked_mb = round(max(0.0, after - GROWTH * before) / 1e6, 1)
    row.notes = (
        f"{size / 1e6:.1f} MB; answered after {alone_s:.2f} s alone, {together_s:.2f} s {AT_ONCE} at once; "
        f"{row.notes}; health {_ms(health)} (p99, worst), otherwise {_ms(place.otherwise)}; "
        f"RSS {before / 1e6:.0f} to {after / 1e6:.0f} MB"
    )
    # The next one has to be made again; all of them together are hundreds of MB.
    body.__dict__.pop("content", None)
    return row


def _sent(place: Place, exchange: Exchange, body: HostileBody, count: int, row: Row) -> float:
    """Send so many at once; the seconds until the last answer."""
    row.requests += count
    row.faults += count
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(exchange, body) for _ in range(count)]
    took_s = time.perf_counter() - began
    for future in futures:
        try:
            status, said = future.result()
        except (OSError, TimeoutError) as exc:
            row.hung += 1
            row.wrong.append(f"not answered: {exc!r}")
            continue
        row.notes = f"{status} {_message(said)[:100]!r}"
        if (wrong := _wrong(body, status, said)) is not None:
            row.lost += 1
            row.wrong.append(wrong)
    if body.refused and took_s > ANSWER_S:
        row.hung += 1
        row.wrong.append(f"{count} at once: answered after {took_s:.1f} s")
    return took_s


def _wrong(body: HostileBody, status: int, said: str) -> str | None:
    """What is wrong with an answer. A WebSocket says why before it closes with 1011."""
    code = _code(said)
    if not body.refused:
        fine = status in (200, 201, 1000) or code not in ("", "internal-error")
    elif status == 1011:
        fine = code in ("invalid-request", "body-too-large")
    else:
        fine = status in (400, 413)
    return None if fine else f"answered with {status}: {said[:200]}"


def _error(said: str) -> dict[str, str]:
    try:
        document = json.loads(said)
    except ValueError:
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}


def _code(said: str) -> str:
    return _error(said).get("code", "")


def _message(said: str) -> str:
    return _error(said).get("message", "")
