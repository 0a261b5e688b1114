"""Hostile bodies, one and then six at once: refused within two seconds, while health is answered as if nothing were."""

from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from soak.hostile_bodies import CHATS, DAEMON, OTHERS, REPORTED, HostileBody, few
from soak.models import write_models
from soak.row import Row
from soak.served import SMALL_CACHE, Command, Daemon, Home, Server, end_well, until
from soak.soak import Soak
from soak.watch import Watch

AT_ONCE = 6
ANSWER_S = 2.0
"""In which each has to be answered."""
GIVE_UP_S = 120.0
HEALTH_S = 0.05
"""What 99 of 100 requests for health may take beyond what they take when nothing else happens."""
PROBE_S = 0.005
"""Between two of them."""
BASELINE_S = 1.0
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
            place = _Place("server", server, server.url)
            rows = [attack(place, place.post, body) for body in chosen(soak, (*CHATS, *OTHERS))]
            rows += [
                attack(_Place("socket", server, server.url), place.on_socket, body) for body in chosen(soak, CHATS)
            ]
            state = daemon.state
            place = _Place("daemon", daemon, state.url, health="/v3/health", token=state.token)
            rows += [attack(place, place.post, body) for body in chosen(soak, DAEMON)]
            for command in (daemon, server):
                end_well(command, rows[-1])
    return rows + launched(soak, "thread") + launched(soak, "kernel")


def launched(soak: Soak, loop: Literal["thread", "kernel"]) -> list[Row]:
    """The same in the process of a notebook."""
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        _Launched(Home(Path(name)), soak.folder, loop) as server,
    ):
        place = _Place(f"launch, {loop}", server, server.url)
        bodies = list(chosen(soak, REPORTED))
        return [attack(place, exchange, body) for exchange in (place.post, place.on_socket) for body in bodies]


def chosen(soak: Soak, bodies: tuple[HostileBody, ...]) -> Sequence[HostileBody]:
    return list(few(bodies)) if soak.quick else bodies


class _Launched(Server):
    """``launch()`` in a process that does nothing else."""

    def __init__(self, home: Home, model: Path, loop: str) -> None:
        Command.__init__(self, home, code=LAUNCHED.format(model=str(model), loop=loop))
        self._url = ""


@dataclass(kw_only=True)
class Probe:
    """Asks for health again and again, on one connection, as a context."""

    url: str
    path: str = "/healthz"
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Probe:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        place = urlsplit(self.url)
        line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=GIVE_UP_S)
        with contextlib.closing(line):
            while not self._ended.wait(PROBE_S):
                began = time.perf_counter()
                try:
                    line.request("GET", self.path)
                    answer = line.getresponse()
                    answer.read()
                except OSError as exc:
                    self.failures.append(f"health was not answered: {exc!r}")
                    return
                self.seconds.append(time.perf_counter() - began)
                if answer.status != 200:
                    self.failures.append(f"health was answered with {answer.status}")

    @property
    def p99_s(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


@dataclass(frozen=True)
class _Place:
    name: str
    command: Command
    url: str
    health: str = "/healthz"
    token: str = ""

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

    @contextlib.contextmanager
    def probed(self) -> Iterator[Probe]:
        with Probe(url=self.url, path=self.health) as probe:
            yield probe


def attack(place: _Place, exchange: Exchange, body: HostileBody) -> Row:
    """A row: the answers, the time until the last, what health took meanwhile, and the memory before and after."""
    row = Row(part=f"bodies: {body.name}, {place.name}", requests=1 + AT_ONCE, faults=1 + AT_ONCE)
    size = len(body.content)
    watch = Watch(place.command.pid)
    before = watch.read().rss_bytes
    with place.probed() as quiet:
        time.sleep(BASELINE_S)
    with place.probed() as probe:
        alone_s = _sent(place, exchange, body, 1, row)
        together_s = _sent(place, exchange, body, AT_ONCE, row)
        # At least a few times, where the answers come at once.
        time.sleep(10 * PROBE_S)
    row.slowest_s = max(alone_s, together_s)
    row.wrong += probe.failures
    if probe.p99_s > quiet.p99_s + HEALTH_S:
        row.hung += 1
        row.wrong.append(f"health took {probe.p99_s * 1e3:.0f} ms (p99), otherwise {quiet.p99_s * 1e3:.0f} ms")
    until(lambda: watch.read().rss_bytes <= GROWTH * before, SETTLED_S, every_s=0.1)
    after = watch.read().rss_bytes
    row.leaked_mb = round(max(0.0, after - GROWTH * before) / 1e6, 1)
    row.notes = (
        f"{size / 1e6:.1f} MB; answered after {alone_s:.2f} s alone, {together_s:.2f} s {AT_ONCE} at once; "
        f"{row.notes}; health p99 {probe.p99_s * 1e3:.0f} ms, worst {max(probe.seconds) * 1e3:.0f} ms, "
        f"otherwise {quiet.p99_s * 1e3:.0f} and {max(quiet.seconds) * 1e3:.0f}; RSS {before / 1e6:.0f} to {after / 1e6:.0f} MB"
    )
    # The next one has to be made again; all of them together are hundreds of MB.
    body.__dict__.pop("content", None)
    return row


def _sent(place: _Place, exchange: Exchange, body: HostileBody, count: int, row: Row) -> float:
    """Send so many at once; the seconds until the last answer."""
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
