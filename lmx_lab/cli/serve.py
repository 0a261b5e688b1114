"""``lmx-lab serve``: the inference server until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmx_lab.cli.app import app, epilog, keep_what_is_made, say, start_logging
from lmx_lab.cli.completion import complete_model
from lmx_lab.cli.folders import settings_with_folders
from lmx_lab.cli.listening import check_host
from lmx_lab.cli.memory import give_back_large_blocks
from lmx_lab.cli.parsing import Command
from lmx_lab.cli.stopping import stop_on_signals
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.models import EngineChoice, LoadSpec

if TYPE_CHECKING:
    from lmx_lab.notebook import Lab
    from lmx_lab.settings import Settings


MOST_GB = 1_000_000
HELP = """Run the inference server until Ctrl-C or SIGTERM.

It speaks the chat-completions format at /v1, so that any client of it can be pointed there. Most options are also \
variables of the environment: LMX_LAB_PORT and so on.
"""
Model = Annotated[
    str | None,
    typer.Option(help="Model to load first: an id (fetched if needed) or a path.", autocompletion=complete_model),
]
EngineOption = Annotated[
    EngineChoice | None,
    typer.Option("--engine", help="Engine that must run --model. By default the one for its format."),
]
IdleUnload = Annotated[
    float | None, typer.Option("--idle-unload", "--ttl", help="Seconds without a request until the model goes.")
]
PrefixCache = Annotated[
    float | None, typer.Option(help="GB of that for prompts seen before; 0 keeps none. By default 10 % of it.")
]
Dtype = Annotated[str | None, typer.Option(help="Of weights in memory: auto, keep, float32, float16 or bfloat16.")]


@app.command(
    cls=Command,
    help=HELP,
    epilog=epilog(
        "lmx-lab serve --model smollm2-135m",
        "lmx-lab serve --host 0.0.0.0 --api-key KEY           for the LAN",
        "lmx-lab serve --cors-origin http://localhost:3000    for a web page",
        "curl http://127.0.0.1:8400/healthz                   whether it runs",
        needs="nothing but the model, which is fetched if it is not here (lmx-lab models lists those that are)",
        status="0 after Ctrl-C or SIGTERM, which are its end; 1 if it could not start; 2 if an argument cannot be",
    ),
)
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 serves the LAN.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one. By default 8400 or the next.")] = None,
    model: Model = None,
    engine: EngineOption = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LMX_LAB_API_KEY", show_envvar=True, help="Key that clients must send.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of a web page that may call. Repeatable.")
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Further Host header to accept. Repeatable.")] = None,
    lan_admin: Annotated[bool, typer.Option("--lan-admin", help="Let other hosts load and unload.")] = False,
    no_downloads: Annotated[bool, typer.Option("--no-downloads", help="Never download a model.")] = False,
    models: Annotated[list[Path] | None, typer.Option(help="Further folder with models. Repeatable.")] = None,
    embedder: Annotated[str | None, typer.Option(help="Embedding model to keep in memory beside the model.")] = None,
    reranker: Annotated[str | None, typer.Option(help="Reranker to keep in memory beside the model.")] = None,
    swap: Annotated[bool, typer.Option("--swap", help="Load the model that a request names.")] = False,
    idle_unload: IdleUnload = None,
    slots: Annotated[int | None, typer.Option("--slots", "--parallel", help="Requests at once. By default 8.")] = None,
    queue_limit: Annotated[int | None, typer.Option(help="Requests that may wait beside them. By default 64.")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds for one request. By default 600.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="GB for models and caches. By default 80 %.")] = None,
    prefix_cache: PrefixCache = None,
    dtype: Dtype = None,
    threads: Annotated[int | None, typer.Option(help="For matrix products on a CPU. By default its cores.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the inference server until Ctrl-C or SIGTERM."""
    check_host(host)
    spec = _load_spec(model, engine)
    settings = settings_with_folders(
        host=host,
        port=port,
        api_key=api_key,
        cors_origins=cors_origin or None,
        allowed_hosts=allow_host or None,
        lan_admin=lan_admin or None,
        downloads=False if no_downloads else None,
        model_folders=models or None,
        swap=swap or None,
        idle_unload_s=idle_unload,
        slots=slots,
        queue_limit=queue_limit,
        request_timeout_s=request_timeout,
        memory_limit_bytes=_bytes("--memory-limit", memory_limit),
        prefix_cache_bytes=_bytes("--prefix-cache", prefix_cache),
        embedder=embedder,
        reranker=reranker,
        dtype=dtype,
        threads=threads,
        log_level=log_level,
    )
    start_logging(settings.log_level)
    give_back_large_blocks()
    asyncio.run(_serve(settings, spec, explicit_port=port is not None or "LMX_LAB_PORT" in os.environ))


def _load_spec(model: str | None, engine: EngineChoice | None) -> LoadSpec | None:
    """Return what to load first; None loads nothing.

    Raises:
        InvalidRequestError: a load option without a model.
    """
    if model is None:
        if engine is not None:
            raise InvalidRequestError("--engine is given without --model; name the model to load", param="--engine")
        return None
    return LoadSpec(model=model, engine=engine or "auto")


def _bytes(option: str, size_gb: float | None) -> int | None:
    """
    Raises:
        InvalidRequestError: no size; the settings would name it in bytes, which nobody has given.
    """
    if size_gb is not None and not 0 <= size_gb <= MOST_GB:
        raise InvalidRequestError(f"{option} is {size_gb:g}; give GB, from 0 to {MOST_GB:,}", param=option)
    return None if size_gb is None else round(size_gb * 1e9)


async def _serve(settings: Settings, spec: LoadSpec | None, *, explicit_port: bool) -> None:
    stop = _stop_signal()
    from lmx_lab.notebook import Lab

    lab = Lab(settings, loop="kernel", explicit_port=explicit_port)
    await lab.astart()
    keep_what_is_made()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(lab.astop)
        work = [
            asyncio.create_task(coro, name=f"lmx-lab {name}")
            for name, coro in (("start", _announce(lab, spec)), ("stop", stop.wait()), ("server", lab.wait()))
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            if work[0].done():
                work[0].result()
                await asyncio.wait(work[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        say("stopping")


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; a second one ends the process as it would any."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def begin(_: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(stop.set)

    stop_on_signals(begin)
    return stop


async def _announce(lab: Lab, spec: LoadSpec | None) -> None:
    if lab.port != lab.settings.port != 0:
        say(f"port {lab.settings.port} is in use; --port chooses one")
    for name in (lab.settings.embedder, lab.settings.reranker):
        if name is not None:
            say(f"loading {name}, to be kept")
    await lab.apin_encoders()
    if spec is not None:
        say(f"loading {spec.model}")
        report = await lab.aload(spec.model, engine=spec.engine)
        say(f"{report.model} loaded in {report.load_s:.1f} s, {report.memory_bytes / 1e9:.2f} GB")
    say(f"LMX Lab is ready at {lab.url}  (chat format: {lab.url}/v1, docs: {lab.url}/docs)", style="bold")
    for url in lab.lan_urls:
        say(f"on the LAN at {url}", style="bold")
    if spec is None and not lab.engine.snapshot.pinned:
        say("no model is loaded yet: POST /admin/models/load, or start with --model")
