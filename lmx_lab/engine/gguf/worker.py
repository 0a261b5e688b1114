"""The process that holds one model for llama.cpp. Run by its path and never imported: it needs nothing of the package.

The first line of its input is what to load, as JSON: ``fields`` of ``CommonParams`` by name, ``api_key`` and
``socket``. It prints a line when the model answers, and ends with its input: nobody is left to ask it then.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from typing import Any


def main() -> None:
    order = json.loads(sys.stdin.readline())
    # After reading: it takes a while, and the order is on its way meanwhile.
    import xllamacpp

    threading.Thread(target=_end_with, args=(os.getppid(), order["socket"]), daemon=True).start()
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
        os._exit(1)
    print(json.dumps({"ready": True, "system": xllamacpp.get_system_info()}), flush=True)
    sys.stdin.read()
    _end(order["socket"])


def _end(socket: str) -> None:
    # If the other side was killed, nobody else does.
    shutil.rmtree(os.path.dirname(socket), ignore_errors=True)
    # Without tearing it down, which takes longer and frees no more.
    os._exit(0)


def _end_with(parent: int, socket: str) -> None:
    """Our input stays open where the parent has forked, and its child lives on."""
    while os.getppid() == parent:
        time.sleep(1)
    _end(socket)


def _set(params: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        *path, last = name.split(".")
        target = params
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)


if __name__ == "__main__":
    main()
