"""The process that holds one model for llama.cpp. Run by its path and never imported: it needs nothing of the package.

It is given the folder of its socket, which it removes when it ends, and the process that it ends with. The first line
of its input is what to load, as JSON: ``fields`` of ``CommonParams`` by name, ``api_key`` and ``socket``. It prints a
line when the model answers, and ends with its input: nobody is left to ask it then.
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
        # Such as that nobody is left to give an order, or to be told that the model answers.
        traceback.print_exc()
    finally:
        _end(folder, code)


def _serve() -> int:
    """Load what is ordered and answer until the input ends; the exit status."""
    order = json.loads(sys.stdin.readline())
    # After reading: it takes a while, and the order is on its way meanwhile.
    import xllamacpp

    params = xllamacpp.CommonParams()
    if (pooling := order["fields"].pop("pooling_type", None)) is not None:
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling}")
    _set(params, order["fields"])
    params.hostnames, params.api_keys = [order["socket"]], [order["api_key"]]
    try:
        server = xllamacpp.Server(params)
        # Returns once the loop of its tasks runs; ending before that has been seen to hang.
        server.handle_metrics()
    except RuntimeError as exc:
        print(exc, file=sys.stderr, flush=True)
        return 1
    print(json.dumps({"ready": True, "system": xllamacpp.get_system_info()}), flush=True)
    sys.stdin.read()
    return 0


def _end(folder: str, code: int = 0) -> None:
    # If the other side was killed, nobody else does.
    shutil.rmtree(folder, ignore_errors=True)
    # Without tearing it down, which takes longer and frees no more.
    os._exit(code)


def _end_with(parent: int, folder: str) -> None:
    """Our input stays open where the parent has forked, and its child lives on."""
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
