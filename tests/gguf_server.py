"""Run llama.cpp's own server in a child process, to test its behaviour without the lab."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

CHILD = """
import json, os, sys
import xllamacpp
options = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.hostnames = options["model"], [options["socket"]]
params.verbosity, params.endpoint_metrics, params.fit_params, params.cache_ram_mib = 1, True, False, 0
# With two threads that wait for each other, other tests would slow the server down a lot.
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
for name, value in options["params"].items():
    setattr(params, name, value)
if options["rank"]:
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
server = xllamacpp.Server(params)
server.handle_metrics()  # returns once the loop runs; the process must not end before
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


class NoServerError(Exception):
    """The child process ended before it was ready; the message is its standard error."""


@contextmanager
def raw_server(model: Path, *, rank: bool = False, threads: int = 1, **params: Any) -> Iterator[httpx2.Client]:
    """Start ``xllamacpp.Server`` in a child process, and yield a client over a UNIX socket.

    Args:
        model: The GGUF file.
        rank: Whether the model scores documents.
        threads: Number of threads.
        params: Fields of ``CommonParams``; by default ``n_ctx`` is 512 in one slot.

    Raises:
        NoServerError: the server did not start.
    """
    with tempfile.TemporaryDirectory(prefix="lmx") as name, (Path(name) / "stderr").open("w+b") as stderr:
        fields: Mapping[str, Any] = {"n_ctx": 512, "n_parallel": 1, "n_batch": 256, "n_ubatch": 256} | params
        options = {"model": str(model), "socket": f"{name}/s.sock", "rank": rank, "threads": threads, "params": fields}
        command = [sys.executable, "-c", CHILD, json.dumps(options)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                if b"ready" not in child.stdout.read(6):
                    child.wait()
                    raise NoServerError((Path(name) / "stderr").read_text(errors="replace"))
                transport = httpx2.HTTPTransport(uds=f"{name}/s.sock")
                with httpx2.Client(transport=transport, base_url="http://llama", timeout=60) as client:
                    yield client
            finally:
                child.kill()
