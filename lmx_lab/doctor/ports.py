"""Check which programs listen on the ports of labs: other programs, or other labs."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from lmx_lab.doctor import Finding
from lmx_lab.errors import PortTakenError
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.running import is_lab, running_labs
from lmx_lab.sanitize import single_line
from lmx_lab.settings import Settings
from lmx_lab.urls import local_url

COMMAND_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A program that listens on a port of this machine."""

    host: str
    port: int
    pid: int | None
    """``None`` if the process belongs to another user."""

    @property
    def url(self) -> str:
        return local_url(self.host, self.port)

    def __str__(self) -> str:
        if self.pid is None:
            return "another user's program"
        try:
            command = shlex.join(psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return f"process {self.pid}"
        return f"process {self.pid}: {single_line(command, COMMAND_CHARACTERS)}"


def list_listeners() -> list[Listener]:
    """Return one listener per address. If several processes share a socket, it is the first one.

    Returns an empty list on macOS, where only root may list the sockets of processes.
    """
    found: dict[tuple[str, int], Listener] = {}
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr:
                host, port = connection.laddr
                found.setdefault((host, port), Listener(host=host, port=port, pid=connection.pid))
    return list(found.values())


def check_port(settings: Settings) -> Iterator[Finding]:
    """Check that the configured port is free, or used by a lab."""
    name = f"{settings.host}:{settings.port}"
    try:
        bind(settings.host, settings.port, explicit=True).close()
    except PortTakenError:
        pass
    else:
        yield Finding(topic="port", verdict="fine", found=f"{name} is free")
        return
    listeners = [each for each in list_listeners() if each.port == settings.port]
    found = f"{name} is taken by {listeners[0] if listeners else 'a program that cannot be identified'}"
    if any(is_lab(each.host, each.port) for each in listeners):
        yield Finding(topic="port", verdict="fine", found=f"{found}: a lab, which clients of this address use")
    elif "LMX_LAB_PORT" in os.environ:
        yield Finding(
            topic="port",
            verdict="bad",
            found=found,
            means="LMX_LAB_PORT requires this port, so no lab can start",
            remedy="unset LMX_LAB_PORT",
        )
    else:
        yield Finding(
            topic="port",
            verdict="note",
            found=found,
            means="a new lab takes the next free port, and clients of this port reach the other program",
            remedy="lmx-lab serve --port 0 takes any free port",
        )


def check_labs(settings: Settings) -> Iterator[Finding]:
    """Check that at most one lab of this home runs, because each lab keeps its own model in memory."""
    labs = [Listener(host=lab.host, port=lab.port, pid=lab.pid) for lab in running_labs(settings.home)]
    if len(labs) < 2:
        found = f"one lab is running, {labs[0].url} ({labs[0]})" if labs else "no lab of this home is running"
        yield Finding(topic="labs", verdict="fine", found=found)
        return
    yield Finding(
        topic="labs",
        verdict="note",
        found=f"{len(labs)} labs are running: {', '.join(f'{lab.url} ({lab})' for lab in labs)}",
        means="each keeps its own model in memory, and a client reaches only the lab whose address it uses",
        remedy="lab.stop() in the notebook of one of them, or Ctrl-C in its terminal",
    )
