"""Provide ``lmx-lab serve``: its options. ``cli.server`` runs the server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from lmx_lab.cli.completion import complete_model
from lmx_lab.cli.options import LOAD_OPTIONS, Command, check_host, epilog, settings_with_folders, with_load_options
from lmx_lab.cli.process import garbage_collection_paused, print_requests, start_logging, stop_on_signals
from lmx_lab.cli.terminal import print_line
from lmx_lab.errors import InvalidRequestError
from lmx_lab.heap import return_large_blocks
from lmx_lab.values.models import LoadSpec

app = typer.Typer()
MAX_GB = 1_000_000


class Serve(Command):
    """``lmx-lab serve``, with its many options in sections."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "Model": ("model", *LOAD_OPTIONS, "no_downloads", "models"),
        "Address and access": (
            *("host", "port", "api_key", "cors_origin", "allow_host", "lan_admin"),
            *("announce", "announce_name", "no_page"),
        ),
        "Several models": ("embedder", "reranker", "resident", "swap", "model_alias", "any_model", "idle_unload"),
        "Requests": ("slots", "queue_limit", "request_timeout"),
        "Memory and CPU": (
            *("memory_limit", "prefix_cache", "prefix_cache_dir", "prefix_cache_disk", "dtype", "threads"),
        ),
        "Records and logs": ("record", "record_to", "otel", "log_level", "quiet"),
    }


@app.command(
    cls=Serve,
    help="""Run the inference server until Ctrl-C or SIGTERM.

It serves the chat-completions format at /v1, for any client of that format. Most options can also be set by \
environment variables such as LMX_LAB_PORT.
""",
    epilog=epilog(
        "lmx-lab serve --model smollm2-135m",
        "lmx-lab serve --host 0.0.0.0 --api-key KEY           for other machines",
        "lmx-lab serve --cors-origin http://localhost:3000    for a web page",
        "curl http://127.0.0.1:8400/healthz                   check that it runs",
        needs="only the model, which is downloaded if it is not on the disk (lmx-lab models lists those that are)",
        status="0 after Ctrl-C or SIGTERM, 1 if the server could not start, 2 if an argument is not valid",
    ),
)
@with_load_options
def serve(
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all networks of this machine.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 for any free one. By default 8400, or the next free one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to load at the start: an id, which is downloaded if needed, or a path.",
            autocompletion=complete_model,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LMX_LAB_API_KEY", show_envvar=True, help="Key that clients must send.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of a web page that may call the server. Repeatable.")
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Additional Host header to accept. Repeatable.")] = None,
    lan_admin: Annotated[bool, typer.Option("--lan-admin", help="Let other machines load and unload models.")] = False,
    announce: Annotated[
        bool, typer.Option("--announce", help="Let lmx-lab discover find the server on the local network.")
    ] = False,
    announce_name: Annotated[
        str | None, typer.Option(help="Name for --announce. By default the name of this machine.")
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Do not serve the chat page for browsers at /.")] = False,
    no_downloads: Annotated[bool, typer.Option("--no-downloads", help="Never download a model.")] = False,
    models: Annotated[list[Path] | None, typer.Option(help="Additional folder with models. Repeatable.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="Embedding model to keep in memory alongside the loaded model.")
    ] = None,
    reranker: Annotated[str | None, typer.Option(help="Reranker to keep in memory alongside the loaded model.")] = None,
    resident: Annotated[
        str | None,
        typer.Option(help="Number of models that stay in memory, or auto for as many as have room. By default 1."),
    ] = None,
    swap: Annotated[
        bool, typer.Option("--swap", help="Load the model that a request names, if it is not loaded.")
    ] = False,
    model_alias: Annotated[
        list[str] | None,
        typer.Option("--model-alias", help="Other name of a model in requests, as NAME=ID. Repeatable."),
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Let the loaded model answer requests for models that are not on disk.")
    ] = False,
    idle_unload: Annotated[
        float | None,
        typer.Option("--idle-unload", "--ttl", help="Seconds without a request after which the model is unloaded."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", "--parallel", help="Number of requests decoded in parallel. By default 8.")
    ] = None,
    queue_limit: Annotated[
        int | None, typer.Option(help="Number of requests that may wait while all slots are in use. By default 64.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Time limit of one request in seconds. By default 600.")
    ] = None,
    memory_limit: Annotated[
        float | None, typer.Option(help="Memory for models and caches, in GB. By default 80 % of the memory.")
    ] = None,
    prefix_cache: Annotated[
        float | None,
        typer.Option(
            help="Part of the memory limit for the prefix cache, in GB; 0 for no cache. By default 10 % of the limit."
        ),
    ] = None,
    prefix_cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which the prefix cache is also stored, so that it survives a restart. By default none."
        ),
    ] = None,
    prefix_cache_disk: Annotated[
        float | None, typer.Option(help="Maximum size of the files in --prefix-cache-dir, in GB. By default 10.7.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the weights in memory: auto, keep, float32, float16 or bfloat16.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads for matrix products. By default one for each core.")
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(help="Requests to record: all, or off. By default only those of a notebook that runs the server."),
    ] = None,
    record_to: Annotated[
        Path | None, typer.Option(help="SQLite file for --record all. By default the last 200 in memory.")
    ] = None,
    otel: Annotated[
        str | None,
        typer.Option(
            help="Whether to export requests as OpenTelemetry spans: off, spans, or content, which includes texts. By "
            "default off. OTEL_EXPORTER_OTLP_ENDPOINT sets the collector."
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print a line for each request.")] = False,
    options: dict[str, Any],
) -> None:
    """Run the inference server until Ctrl-C or SIGTERM."""
    check_host(host)
    if model is None and options:
        option = f"--{next(iter(options))}".replace("_", "-")
        raise InvalidRequestError(f"{option} is given without --model; name the model to load", param=option)
    # typer has checked the types. ``wire.admin.load_spec`` imports pydantic, which the first load does not need.
    spec = None if model is None else LoadSpec(model=model, **options)
    # None, for an option that is not given, leaves the setting to the environment.
    settings = settings_with_folders(
        host=host,
        port=port,
        api_key=api_key,
        cors_origins=cors_origin or None,
        allowed_hosts=allow_host or None,
        lan_admin=lan_admin or None,
        announce=announce or None,
        announce_name=announce_name,
        page=False if no_page else None,
        downloads=False if no_downloads else None,
        model_folders=models or None,
        embedder=embedder,
        reranker=reranker,
        swap=swap or None,
        model_aliases=model_alias or None,
        any_model=any_model or None,
        idle_unload_s=idle_unload,
        resident=resident,
        slots=slots,
        queue_limit=queue_limit,
        request_timeout_s=request_timeout,
        memory_limit_bytes=_bytes("--memory-limit", memory_limit),
        prefix_cache_bytes=_bytes("--prefix-cache", prefix_cache),
        prefix_cache_dir=prefix_cache_dir,
        prefix_cache_disk_bytes=_bytes("--prefix-cache-disk", prefix_cache_disk),
        dtype=dtype,
        threads=threads,
        record=record,
        record_to=record_to,
        otel=otel,
        log_level=log_level,
    )
    start_logging(settings.log_level)
    # Before the imports of the engine and the server, which take about a second.
    stopped: Future[None] = Future()
    stop_on_signals(lambda _: stopped.set_result(None))
    for pinned in filter(None, (settings.embedder, settings.reranker)):
        print_line(f"loading {pinned}, which stays in memory")
    if spec is not None:
        print_line(f"loading {spec.model}")
    return_large_blocks()
    with garbage_collection_paused(), contextlib.nullcontext() if quiet else print_requests():
        import asyncio

        from lmx_lab.cli.server import run_server

        explicit_port = port is not None or "LMX_LAB_PORT" in os.environ
        asyncio.run(run_server(settings, spec, explicit_port=explicit_port, stopped=stopped))


def _bytes(option: str, size_gb: float | None) -> int | None:
    """Convert a size in GB to bytes. It is checked here, because an error of the settings would show it in bytes.

    Raises:
        InvalidRequestError: the size is not valid.
    """
    if size_gb is not None and not 0 <= size_gb <= MAX_GB:
        raise InvalidRequestError(f"{option} is {size_gb:g}; give GB, from 0 to {MAX_GB:,}", param=option)
    return None if size_gb is None else round(size_gb * 1e9)
