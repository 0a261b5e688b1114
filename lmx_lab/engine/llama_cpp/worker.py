"""Load one model with llama.cpp and serve it on a socket. Runs as a script, and imports no other module of the package.

Arguments: the folder of the socket, which is removed at the end, and the id of the parent process, with which this
process ends. The first line of standard input is a JSON object: ``fields`` of ``CommonParams`` by name, ``api_key``,
``socket`` and ``data_bytes``, the memory limit. The process prints a line when the model answers, and ends when
standard input is closed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import shutil
import sys
import threading
import time
import traceback


def main() -> None:
    """Run the server until its input or its parent process ends."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=exit_with_parent, args=(parent, folder), daemon=True).start()
    code = 1
    try:
        code = _serve(folder)
    except Exception:
        # For example if the parent process has ended before it sent the parameters.
        traceback.print_exc()
    finally:
        exit_with(folder, code)


def _serve(folder: str) -> int:
    """Load the model and answer until the input ends; return the exit status. Slots are saved in the folder."""
    parameters = json.loads(sys.stdin.readline())
    data_bytes = parameters["data_bytes"]
    # Mapped files are not counted. macOS does not enforce this limit. A container may have set a lower one.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    # Imported after reading, because it takes a while.
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.slot_save_path = f"{folder}{os.sep}"
    if (pooling := parameters["fields"].pop("pooling_type", None)) is not None:
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling}")
    if (speculative := parameters["fields"].pop("speculative_type", None)) is not None:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{speculative}")]
    for name, value in parameters["fields"].items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, params), last, value)
    params.hostnames, params.api_keys = [parameters["socket"]], [parameters["api_key"]]
    try:
        server = xllamacpp.Server(params)
        # Returns when the server's task loop is running. Ending the process before that can hang.
        server.handle_metrics()
    except RuntimeError as exc:
        print(exc, file=sys.stderr, flush=True)
        return 1
    print(json.dumps({"ready": True, "system": xllamacpp.get_system_info()}), flush=True)
    sys.stdin.read()
    return 0


def exit_with(folder: str, code: int) -> None:
    """Remove the folder and end this process."""
    # Removed here, because a parent process that was killed cannot do it.
    shutil.rmtree(folder, ignore_errors=True)
    # A regular shutdown takes longer and releases nothing more.
    os._exit(code)


def exit_with_parent(parent: int, folder: str) -> None:
    """End this process when its parent has ended. Standard input stays open while a fork of the parent is running."""
    while os.getppid() == parent:
        time.sleep(1)
    exit_with(folder, 0)


if __name__ == "__main__":
    main()
