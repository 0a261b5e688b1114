"""Check which programs listen on the ports of labs: other programs, or other labs."""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from lmx_lab.doctor import Finding
from lmx_lab.errors import PortTakenError
from lmx_lab.http.uvicorn_server import PORTS_TRIED, bind
from lmx_lab.sanitize import single_line
from lmx_lab.settings import PREFIX, Settings
from lmx_lab.urls import LOOPBACK_FOR, local_url

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
    if any(map(_is_lab, listeners)):
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


def running_labs(settings: Settings) -> list[Listener]:
    """Return the labs of this home: ``lmx-lab serve`` on any port, and labs of notebooks on the usual ports. None on
    macOS, as ``list_listeners``.
    """
    usual = {*range(settings.port, settings.port + PORTS_TRIED + 1)}
    usual |= {*range(Settings.port, Settings.port + PORTS_TRIED + 1)}
    home = settings.home.resolve()
    likely = [each for each in list_listeners() if each.port in usual or _is_command(each)]
    candidates = [each for each in likely if _home_of(each) == home]
    with ThreadPoolExecutor(16, thread_name_prefix="lmx-lab-doctor") as pool:
        return [each for each, is_lab in zip(candidates, pool.map(_is_lab, candidates), strict=True) if is_lab]


def check_labs(settings: Settings) -> Iterator[Finding]:
    """Check that at most one lab of this home uses the usual ports, because each lab keeps its own model in memory."""
    labs = running_labs(settings)
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


def _is_lab(listener: Listener) -> bool:
    """Whether the listener identifies itself as a lab in time."""
    host = LOOPBACK_FOR.get(listener.host, listener.host)
    connection = http.client.HTTPConnection(host, listener.port, timeout=1.0)
    try:
        connection.request("HEAD", "/healthz")
        answer = connection.getresponse()
        # The daemon also sends this header, but has no route /healthz.
        return answer.status == 200 and answer.getheader("x-lmx-lab") is not None
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _is_command(listener: Listener) -> bool:
    """Whether the process is the command ``lmx-lab``."""
    try:
        command = psutil.Process(listener.pid).cmdline() if listener.pid else []
    except psutil.Error:
        return False
    # The script, or Python's option -m.
    return not {"lmx-lab", "lmx_lab"}.isdisjoint(Path(part).name for part in command[:3])


def _home_of(lab: Listener) -> Path | None:
    """Return the home of a lab, without links. The lab has read it from its environment as this process does."""
    if lab.pid is None:
        return None
    try:
        process = psutil.Process(lab.pid)
        variable = f"{PREFIX}HOME"
        home = Settings.read({variable: process.environ().get(variable, "")}).home
        return (home if home.is_absolute() else Path(process.cwd(), home)).resolve()
    except psutil.Error:
        return None
