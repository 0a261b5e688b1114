"""Who listens where a lab would: another program, or another lab."""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from lmx_lab.doctor.finding import Finding
from lmx_lab.errors import PortTakenError
from lmx_lab.http.uvicorn_server import PORTS_TRIED, bind
from lmx_lab.settings import Settings
from lmx_lab.urls import LOOPBACK_FOR, local_url

ANSWER_S = 1.0
ASKED_AT_ONCE = 16
COMMAND_CHARACTERS = 80
HEADER = "x-lmx-lab"


@dataclass(frozen=True, kw_only=True)
class Listener:
    """What listens on a port of this machine."""

    host: str
    port: int
    pid: int | None
    """None where it is another user's."""

    @property
    def url(self) -> str:
        return local_url(self.host, self.port)

    def __str__(self) -> str:
        if self.pid is None:
            return "a program of another user"
        try:
            command = shlex.join(psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return f"process {self.pid}"
        short = command if len(command) <= COMMAND_CHARACTERS else command[: COMMAND_CHARACTERS - 1] + "…"
        return f"process {self.pid}: {''.join(char if char.isprintable() else '?' for char in short)}"


def listeners() -> list[Listener]:
    """One for each address; of a socket that several processes share, the first."""
    found: dict[tuple[str, int], Listener] = {}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr:
            host, port = connection.laddr
            found.setdefault((host, port), Listener(host=host, port=port, pid=connection.pid))
    return list(found.values())


def examine_port(settings: Settings) -> Iterator[Finding]:
    name = f"{settings.host}:{settings.port}"
    try:
        bind(settings.host, settings.port, explicit=True).close()
    except PortTakenError:
        yield _taken(name, settings.port)
    else:
        yield Finding(topic="port", verdict="fine", found=f"{name} is free")


def _taken(name: str, port: int) -> Finding:
    holders = [each for each in _listeners() if each.port == port]
    found = f"{name} is taken by {holders[0] if holders else 'a program that cannot be seen from here'}"
    if any(map(_is_lab, holders)):
        return Finding(topic="port", verdict="fine", found=f"{found}: a lab, which clients of that address reach")
    chosen = "LMX_LAB_PORT" in os.environ
    means = "a lab takes the next free port instead, and clients of this one reach something else"
    remedy = "unset LMX_LAB_PORT" if chosen else "lmx-lab serve --port 0 takes any free one"
    if holders and holders[0].pid is not None:
        remedy = f"kill {holders[0].pid} ends that program; {remedy}"
    return Finding(
        topic="port",
        verdict="bad" if chosen else "note",
        found=found,
        means="LMX_LAB_PORT asks for this port, so a lab will not start" if chosen else means,
        remedy=remedy,
    )


def _listeners() -> list[Listener]:
    # On macOS only root may see them.
    with contextlib.suppress(psutil.Error):
        return listeners()
    return []


def examine_labs(settings: Settings) -> Iterator[Finding]:
    """The labs of this machine on the usual ports: one is enough, and each has a model of its own in memory."""
    usual = {*range(settings.port, settings.port + PORTS_TRIED + 1)}
    usual |= {*range(Settings.port, Settings.port + PORTS_TRIED + 1)}
    asked = [each for each in _listeners() if each.port in usual]
    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="lmx-lab-doctor") as pool:
        labs = [each for each, is_lab in zip(asked, pool.map(_is_lab, asked), strict=True) if is_lab]
    if len(labs) < 2:
        yield Finding(topic="labs", verdict="fine", found=f"one runs, {_named(labs[0])}" if labs else "none runs")
        return
    ends = " ".join(str(lab.pid) for lab in labs[1:] if lab.pid is not None)
    yield Finding(
        topic="labs",
        verdict="note",
        found=f"{len(labs)} run here: {', '.join(map(_named, labs))}",
        means="each has a model of its own in memory, and a client only reaches the one whose address it has",
        remedy=f"lab.stop() in its notebook, or kill {ends}" if ends else "lab.stop() in its notebook",
    )


def _named(lab: Listener) -> str:
    home = _home_of(lab)
    return f"{lab.url} ({lab}{f', home {home}' if home else ''})"


def _is_lab(listener: Listener) -> bool:
    """Whether what listens there says so. One whose loop is busy says nothing for now."""
    host = LOOPBACK_FOR.get(listener.host, listener.host)
    connection = http.client.HTTPConnection(host, listener.port, timeout=ANSWER_S)
    try:
        connection.request("HEAD", "/healthz")
        answer = connection.getresponse()
        # The daemon has the header, too, and no such route.
        return answer.status == 200 and answer.getheader(HEADER) is not None
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _home_of(lab: Listener) -> str | None:
    if lab.pid is None:
        return None
    try:
        return psutil.Process(lab.pid).environ().get("LMX_LAB_HOME", str(Settings().home))
    except psutil.Error:
        return None
