"""Run a worker script in a process with limits, for ``engine.sandbox``.

A worker script defines:

- ``MEMORY_BYTES``: the largest address space of the process; macOS does not enforce it;
- ``CPU_S``: the CPU seconds that one message may take;
- ``handle(message: bytes) -> bytes``.

Messages and replies are preceded by their length, as eight bytes. This file and ``heap.py``, which it loads, import
only the standard library, and worker scripts import no module of this package. The process therefore starts quickly,
and code that breaks out of a sandbox finds no other part of the package in its process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType


def serve(script: str, connection: socket.socket, parent: int) -> None:
    """Answer messages until the connection is closed or the parent has ended."""
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    worker = _load("sandbox_script", script)
    heap = _load("heap", str(Path(__file__).parent.parent / "heap.py"))
    _limit(resource.RLIMIT_AS, worker.MEMORY_BYTES, worker.MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0, 0)
    stream = connection.makefile("rwb")
    reply = b"ready"
    while True:
        stream.write(len(reply).to_bytes(8, "big") + reply)
        stream.flush()
        if len(head := stream.read(8)) < 8:
            return
        message = stream.read(int.from_bytes(head, "big"))
        # The parent may have died, and then no other process stops this one.
        started_s = time.process_time()
        _limit(resource.RLIMIT_CPU, int(started_s) + worker.CPU_S, resource.RLIM_INFINITY)
        reply = worker.handle(message)
        del message
        if time.process_time() - started_s > 0.25:
            heap.return_freed_memory()


def _load(name: str, script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _limit(kind: int, soft: int, hard: int) -> None:
    # Not every system supports every limit, and a container may have set lower ones.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft, hard))


def exit_with_parent(parent: int) -> None:
    """End this process when its parent has ended, even while a message is being handled."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # The parent closed the connection during a reply.
        serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), parent=int(sys.argv[3]))
