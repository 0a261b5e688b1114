"""Load one model with llama.cpp and serve it on a socket. Run as a script; imports no other module of the package.

Arguments: the folder of its socket, which it removes at its end, and the id of the parent process, with which it ends.
The first line of standard input is a JSON object: ``fields`` of ``CommonParams`` by name, ``api_key`` and ``socket``.
The process prints a line when the model answers, and ends when standard input is closed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from typing import Any


def main() -> None:
    folder, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    code = 1
    try:
        code = _serve()
    except Exception:
        # For example when the parent process has ended before it sent the order.
        traceback.print_exc()
    finally:
        _end(folder, code)


def _serve() -> int:
    """Load the model and answer until the input ends; return the exit status."""
    order = json.loads(sys.stdin.readline())
    # Imported after reading, because it takes a while.
    import xllamacpp

    params = xllamacpp.CommonParams()
    if (pooling := order["fields"].pop("pooling_type", None)) is not None:
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling}")
    _set(params, order["fields"])
    params.hostnames, params.api_keys = [order["socket"]], [order["api_key"]]
    try:
        server = xllamacpp.Server(params)
        # Returns when the server's task loop runs. Ending the process before that can hang.
        server.handle_metrics()
    except RuntimeError as exc:
        print(exc, file=sys.stderr, flush=True)
        return 1
    print(json.dumps({"ready": True, "system": xllamacpp.get_system_info()}), flush=True)
    sys.stdin.read()
    return 0


def _end(folder: str, code: int = 0) -> None:
    # If the parent process was killed, it cannot do this.
    shutil.rmtree(folder, ignore_errors=True)
    # Without a regular shutdown, which takes longer and releases nothing more.
    os._exit(code)


def _end_with(parent: int, folder: str) -> None:
    """End with the parent process. Standard input does not show its end if a fork of the parent is still running."""
    while os.getppid() == parent:
        time.sleep(1)
    _end(folder)


def _set(params: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        *path, last = name.split(".")
        target = params
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)


if __name__ == "__main__":
    main()
