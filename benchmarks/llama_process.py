"""Child process: xllamacpp's server on a loopback port, with its defaults except for the given settings."""

from __future__ import annotations

import os

import xllamacpp

from benchmarks.processes import child_settings, serve_lines, take_channel
from lmx_lab.engine.memory import default_threads


def main() -> None:
    channel = take_channel()
    settings = child_settings()
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_parallel, params.n_ctx, params.kv_unified = settings["slots"], settings["total_tokens"], False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = default_threads(os.environ)
    params.hostnames, params.port = ["127.0.0.1"], settings["port"]
    # fit_params would change the context size.
    params.endpoint_metrics, params.fit_params = True, False
    server = xllamacpp.Server(params)
    # Returns when the server's task loop runs.
    server.handle_metrics()
    serve_lines(channel, {"url": f"http://127.0.0.1:{settings['port']}", "n_batch": params.n_batch}, lambda line: line)
    # A regular shutdown takes longer and frees nothing more.
    os._exit(0)


if __name__ == "__main__":
    main()
