"""llama.cpp's own server in a child, with nothing of the lab's between: what it does by itself."""

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
wanted = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.hostnames = wanted["model"], [wanted["socket"]]
params.verbosity, params.endpoint_metrics, params.fit_params, params.cache_ram_mib = 1, True, False, 0
# Two that wait for each other stand still for long beside other tests.
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted["threads"]
for name, value in wanted["params"].items():
    setattr(params, name, value)
if wanted["rank"]:
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
server = xllamacpp.Server(params)
server.handle_metrics()  # it may end only when its loop runs
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


class NoServerError(Exception):
    """The child ended before it was ready; the text is what it wrote to stderr."""


@contextmanager
def raw_server(model: Path, *, rank: bool = False, threads: int = 1, **params: Any) -> Iterator[httpx2.Client]:
    """A client of ``xllamacpp.Server`` in a child process, over a UNIX socket; the child ends with the block.

    Args:
        model: The file.
        rank: It scores documents.
        threads: It computes with so many.
        params: Fields of ``CommonParams``; where not given, ``n_ctx`` is 512 in one slot.

    Raises:
        NoServerError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="lmx") as name, (Path(name) / "stderr").open("w+b") as stderr:
        fields: Mapping[str, Any] = {"n_ctx": 512, "n_parallel": 1, "n_batch": 256, "n_ubatch": 256} | params
        wanted = {"model": str(model), "socket": f"{name}/s.sock", "rank": rank, "threads": threads, "params": fields}
        command = [sys.executable, "-c", CHILD, json.dumps(wanted)]
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
