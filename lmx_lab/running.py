"""Record the running labs of a home on this machine in the folder of the home."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from lmx_lab.urls import LOOPBACK_FOR, local_url

FOLDER = "labs"
"""The folder of a home with a file for each running lab."""
PROBE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RunningLab:
    """A running lab on this machine."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        return local_url(self.host, self.port)


def record_lab(home: Path, host: str, port: int) -> Callable[[], None]:
    """Record that a lab of this process runs; the returned function removes the record and may be called twice.

    If the home cannot be written to, the lab runs without a record.
    """
    file = home.resolve() / FOLDER / f"{socket.gethostname()}-{port}.json"
    content = {
        "machine": socket.gethostname(),
        "host": host,
        "port": port,
        "pid": os.getpid(),
        # Distinguishes it from a later lab of this process at the same port.
        "id": secrets.token_hex(8),
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written atomically, because another process may read it. A file of an earlier lab at this port is replaced.
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(file)

    def remove() -> None:
        # Another lab may have taken the port.
        with contextlib.suppress(OSError, ValueError):
            if json.loads(file.read_bytes()) == content:
                file.unlink()

    return remove


def running_labs(home: Path) -> list[RunningLab]:
    """Return the running labs of a home on this machine, sorted by port. Remove the records of labs that have ended."""
    found: dict[Path, RunningLab] = {}
    records: dict[Path, bytes] = {}
    for file in (home / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(record := file.read_bytes())
            # A home may be on a disk that several machines share.
            if content["machine"] == socket.gethostname() and file.stat().st_uid == os.geteuid():
                found[file] = RunningLab(host=str(content["host"]), port=int(content["port"]), pid=int(content["pid"]))
                records[file] = record
    if not found:
        return []
    with ThreadPoolExecutor(16, thread_name_prefix="lmx-lab-probe") as pool:
        probes = dict(zip(found, pool.map(lambda lab: is_lab(lab.host, lab.port), found.values()), strict=True))
    for file, answer in probes.items():
        if answer is False:
            # A lab may have started at this port since the record was read.
            with contextlib.suppress(OSError):
                if file.read_bytes() == records[file]:
                    file.unlink()
    return sorted((lab for file, lab in found.items() if probes[file]), key=lambda lab: lab.port)


def is_lab(host: str, port: int) -> bool | None:
    """Return whether a lab listens at this port of this machine.

    None if this is not known: there is no answer in time or no connection, or the server has too many connections.
    """
    connection = http.client.HTTPConnection(LOOPBACK_FOR.get(host, host), port, timeout=PROBE_S)
    try:
        connection.request("HEAD", "/healthz")
        answer = connection.getresponse()
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            return None
        # The daemon also sends this header, but has no route /healthz.
        return answer.status == 200 and answer.getheader("x-lmx-lab") is not None
    except (ConnectionError, http.client.HTTPException):
        return False
    except OSError:
        return None
    finally:
        connection.close()
