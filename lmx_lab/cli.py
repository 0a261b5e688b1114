"""The command line: arguments, printing, exit codes. The work is done elsewhere."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lmx_lab.errors import LabError
from lmx_lab.settings import Settings

app = typer.Typer(
    name="lmx-lab",
    help="Local language models on MLX: serve them, fetch them, see what is there.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)
FAILED = 1


def main() -> None:
    """Entry point of the ``lmx-lab`` script: a deliberate error is one line, not a traceback."""
    try:
        app()
    except LabError as exc:
        _fail(exc)


def _fail(exc: LabError) -> NoReturn:
    err.print(f"[bold red]{exc.code}[/]: ", end="")
    err.print(exc.message, markup=False, highlight=False)
    sys.exit(FAILED)


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 serves the LAN.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [default: 8400]")] = None,
    model: Annotated[str | None, typer.Option(help="Model to load first: an id (fetched if needed) or a path.")] = None,
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
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the inference server until Ctrl-C or SIGTERM."""
    settings = Settings.read(
        host=host,
        port=port,
        api_key=api_key,
        cors_origins=cors_origin or None,
        allowed_hosts=allow_host or None,
        lan_admin=lan_admin or None,
        downloads=False if no_downloads else None,
        model_folders=models or None,
        log_level=log_level,
    )
    _start_logging(settings.log_level)
    asyncio.run(_serve(settings, model))


async def _serve(settings: Settings, model: str | None) -> None:
    from lmx_lab.lab import Lab

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lab = Lab(settings, loop="kernel")
    lab.start()
    async with lab:
        ready = asyncio.create_task(_announce(lab, model))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            await stopped
        ready.cancel()
        out.print("stopping")


async def _announce(lab: Any, model: str | None) -> None:
    if model is not None:
        report = await lab.aload(model)
        out.print(f"{report.model} loaded in {report.load_s:.1f} s, {report.memory_bytes / 1e9:.2f} GB")
    out.print(f"LMX Lab is ready at [bold]{lab.url}[/]  (chat format: {lab.url}/v1, docs: {lab.url}/docs)")
    if lab.lan_url:
        out.print(f"on the LAN at [bold]{lab.lan_url}[/]")
    if model is None:
        out.print("no model is loaded yet: POST /admin/models/load, or start with --model")


def _start_logging(level: str) -> None:
    import logging

    from lmx_lab.errors import InvalidRequestError

    names = ("debug", "info", "warning", "error")
    if level not in names:
        raise InvalidRequestError(f"log level is {level!r}; it can be {', '.join(names)}")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A starter (smollm2-135m, minilm-l6), org/name, or a .gguf file.")],
) -> None:
    """Fetch a model, so that it can be loaded."""
    from lmx_lab.progress import bar
    from lmx_lab.weights import Catalog

    with bar(model) as shown:
        entry = Catalog(Settings.read()).fetch(model, shown.update)
    out.print(f"{entry.id}: {entry.size_bytes / 1e6:.0f} MB at {entry.path}", highlight=False)


@app.command()
def models() -> None:
    """List the models on disk."""
    from lmx_lab.weights import STARTERS, Catalog

    settings = Settings.read()
    entries = Catalog(settings).scan()
    table = Table("id", "kind", "format", "quantization", "size", "context", "from", box=None)
    for entry in entries:
        size, context = f"{entry.size_bytes / 1e6:.0f} MB", str(entry.context_length or "")
        table.add_row(entry.id, entry.kind, entry.format, entry.quantization or "", size, context, entry.source)
    if entries:
        out.print(table)
    else:
        out.print(f"no models in {settings.models_folder} or the hub cache; try: lmx-lab pull smollm2-135m")
    missing = sorted(set(STARTERS) - {entry.id for entry in entries})
    if entries and missing:
        out.print(f"starters to pull: {', '.join(missing)}")


@app.command()
def doctor() -> None:
    """Say what is fine on this machine, what is not, and what to do."""
    from lmx_lab.doctor import examine

    findings = examine(Settings.read())
    marks = {"fine": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[bold red]bad[/]"}
    for finding in findings:
        out.print(f"{marks[finding.verdict]:<6} {finding.topic}: ", end="")
        out.print(finding.text, markup=False, highlight=False)
    if any(finding.verdict == "bad" for finding in findings):
        sys.exit(FAILED)
