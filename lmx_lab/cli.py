"""The command line: arguments, printing, exit codes. The work is done elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import shlex
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmx_lab.errors import HostingError, InvalidRequestError, LabError, McpServerExistsError
from lmx_lab.links import LOOPBACK_NAMES
from lmx_lab.settings import Settings

if TYPE_CHECKING:
    from lmx_lab.daemon.daemon import Daemon
    from lmx_lab.lab import Lab
    from lmx_lab.wire.mcp import McpServerConfig

app = typer.Typer(
    name="lmx-lab",
    help="Local language models on MLX: serve them, fetch them, see what is there.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)
FAILED = 1
DRAIN_S = 30.0
"""How long turns may go on after the daemon was told to end."""


def say(text: str, *, style: str | None = None) -> None:
    """One line as it is: names and paths may contain what rich takes for markup."""
    out.print(text, style=style, markup=False, highlight=False)


def main() -> None:
    """Entry point of the ``lmx-lab`` script: a deliberate error is one line, not a traceback."""
    try:
        app()
    except LabError as exc:
        _fail(exc)
    finally:
        _leave_downloads()


def _leave_downloads() -> None:
    """End now if a download still runs: its library's threads cannot be stopped, and Python would wait for them."""
    if any(thread.name.startswith("lmx-lab-hub") for thread in threading.enumerate()):
        leaving = sys.exc_info()[1]
        code = leaving.code if isinstance(leaving, SystemExit) and isinstance(leaving.code, int) else FAILED
        sys.stdout.flush()
        os._exit(code if leaving is not None else 0)


def _fail(exc: LabError) -> NoReturn:
    err.print(Text.assemble((exc.code, "bold red"), f": {exc.message}"), highlight=False)
    sys.exit(FAILED)


@app.command()
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 serves the LAN.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one. By default 8400 or the next.")] = None,
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
    embedder: Annotated[str | None, typer.Option(help="Embedding model to keep in memory beside the model.")] = None,
    reranker: Annotated[str | None, typer.Option(help="Reranker to keep in memory beside the model.")] = None,
    swap: Annotated[bool, typer.Option("--swap", help="Load the model that a request names.")] = False,
    idle_unload: Annotated[
        float | None, typer.Option("--idle-unload", "--ttl", help="Seconds without a request until the model goes.")
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", "--parallel", help="Requests at once. By default 8.")] = None,
    queue_limit: Annotated[int | None, typer.Option(help="Requests that may wait beside them. By default 64.")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds for one request. By default 600.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="GB for models and caches. By default 80 %.")] = None,
    prefix_cache: Annotated[
        float | None, typer.Option(help="GB of that for prompts seen before; 0 keeps none. By default 10 % of it.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights in memory: auto, keep, float32, float16 or bfloat16.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="For matrix products on a CPU. By default its cores.")] = None,
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
        swap=swap or None,
        idle_unload_s=idle_unload,
        slots=slots,
        queue_limit=queue_limit,
        request_timeout_s=request_timeout,
        memory_limit_bytes=_bytes(memory_limit),
        prefix_cache_bytes=_bytes(prefix_cache),
        embedder=embedder,
        reranker=reranker,
        dtype=dtype,
        threads=threads,
        log_level=log_level,
    )
    _start_logging(settings.log_level)
    asyncio.run(_serve(settings, model, explicit_port=port is not None or "LMX_LAB_PORT" in os.environ))


def _bytes(size_gb: float | None) -> float | None:
    # What is no number is left for the settings to refuse by name.
    return round(size_gb * 1e9) if size_gb is not None and math.isfinite(size_gb) else size_gb


async def _serve(settings: Settings, model: str | None, *, explicit_port: bool) -> None:
    stop = _stop_signal()
    from lmx_lab.lab import Lab

    lab = Lab(settings, loop="kernel", explicit_port=explicit_port)
    await lab.astart()
    _keep_what_is_made()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(lab.astop)
        work = [
            asyncio.create_task(coro, name=f"lmx-lab {name}")
            for name, coro in (("start", _announce(lab, model)), ("stop", stop.wait()), ("server", lab.wait()))
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


def _keep_what_is_made() -> None:
    """Look for garbage only among what is made from here on: a full look at all modules stops everything for 50 ms."""
    gc.collect()
    gc.freeze()


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; a second one ends the process as it would any."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def received() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, received)
    return stop


async def _announce(lab: Lab, model: str | None) -> None:
    if lab.port != lab.settings.port != 0:
        say(f"port {lab.settings.port} is in use; --port chooses one")
    for name in (lab.settings.embedder, lab.settings.reranker):
        if name is not None:
            say(f"loading {name}, to be kept")
    await lab.apin_encoders()
    if model is not None:
        say(f"loading {model}")
        report = await lab.aload(model)
        say(f"{report.model} loaded in {report.load_s:.1f} s, {report.memory_bytes / 1e9:.2f} GB")
    say(f"LMX Lab is ready at {lab.url}  (chat format: {lab.url}/v1, docs: {lab.url}/docs)", style="bold")
    for url in lab.lan_urls:
        say(f"on the LAN at {url}", style="bold")
    if model is None and not lab.engine.snapshot.pinned:
        say("no model is loaded yet: POST /admin/models/load, or start with --model")


@app.command()
def daemon(
    *,
    upstream: Annotated[
        str | None,
        typer.Option(help="Chat-format server that turns ask. By default http://127.0.0.1:8400, the lab's."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one. By default 8401 or the next.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Any but loopback shows the daemon to other machines.")
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Further Host header to accept. Repeatable.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of a web page that may call. Repeatable.")
    ] = None,
    mcp_config: Annotated[
        Path | None, typer.Option(help="A .mcp.json: shows its servers, asks, and adds those that are new.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Add them without asking.")] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the daemon until Ctrl-C or SIGTERM: sessions, turns with tools, MCP servers.

    Its token is in state.json in its folder, new at each start. The upstream's key, if it has one, is taken from
    LMX_LAB_UPSTREAM_API_KEY alone: arguments can be read by others.
    """
    settings = Settings.read(
        upstream=upstream,
        daemon_port=port,
        daemon_host=host,
        allowed_hosts=allow_host or None,
        cors_origins=cors_origin or None,
        log_level=log_level,
    )
    _start_logging(settings.log_level)
    servers = _agreed(mcp_config, yes=yes) if mcp_config is not None else []
    _run_daemon(settings, servers, explicit_port=port is not None or "LMX_LAB_DAEMON_PORT" in os.environ)


def _agreed(path: Path, *, yes: bool) -> list[McpServerConfig]:
    """The servers of the file, shown, if somebody says yes to them; else none."""
    from lmx_lab.daemon.mcp.project_file import read_mcp_file

    servers = read_mcp_file(path)
    for server in servers:
        say(_shown(server, path.absolute().parent))
    if not servers:
        say(f"{path} has no servers")
    elif not yes and not sys.stdin.isatty():
        raise InvalidRequestError("nobody can be asked here whether these may be started; --yes says so")
    elif not yes and not typer.confirm("These programs and addresses get what turns hand them. Add them?"):
        return []
    return servers


def _shown(server: McpServerConfig, folder: Path) -> str:
    """What would be started, whole: control characters, which could hide a part of it, written out."""
    starts = server.url or shlex.join([server.command or "", *server.args])
    where = f"  (in {server.cwd})" if server.cwd and Path(server.cwd) != folder else ""
    # Values may be secrets; those that choose other programs and libraries are shown.
    given = [
        f"{name}={value}" if name == "PATH" or name.startswith(("LD_", "DYLD_", "PYTHON", "NODE_")) else name
        for name, value in [*server.env.items(), *server.headers.items()]
    ]
    text = f"{server.name}: {starts}{where}" + (f"  (with {', '.join(given)})" if given else "")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _run_daemon(settings: Settings, servers: list[McpServerConfig], *, explicit_port: bool) -> None:
    from lmx_lab.daemon.daemon import Daemon

    exposed = not settings.daemon_host.startswith("127.") and settings.daemon_host not in LOOPBACK_NAMES
    if exposed:
        from lmx_lab.lab.addresses import lan_addresses

        settings = replace(settings, allowed_hosts=(*settings.allowed_hosts, *lan_addresses()))
    running = Daemon(settings=settings, explicit_port=explicit_port)
    # First: a signal during the start ends it in good order, too.
    stopping = _end_on_signals(running)
    running.start()
    _keep_what_is_made()
    with contextlib.suppress(HostingError):
        _add_servers(running, servers)
        say(f"The daemon is ready at {running.url}, for {running.upstream_url}", style="bold")
        say(f"its token is in {running.folder / 'state.json'}")
        if exposed:
            say(f"other machines reach it on {settings.daemon_host}: its token travels there unencrypted", style="bold")
    if stopping.is_set():
        running.begin_stop()
    running.wait()


def _add_servers(running: Daemon, servers: list[McpServerConfig]) -> None:
    for server in servers:
        try:
            running.run(running.services.servers.add(server))
            say(f"added {server.name}")
        except McpServerExistsError:
            say(f"{server.name} is there already, and stays as it is")
        except HostingError:
            raise
        except LabError as exc:
            say(f"{server.name} was not added: {exc.message}", style="bold red")


def _end_on_signals(running: Daemon) -> threading.Event:
    """The first signal lets turns end, the second one ends them, the third is as in any process."""
    received: list[int] = []
    stopping = threading.Event()
    # A terminal that is closed sends SIGHUP; under nohup it is ignored, and stays so.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]

    def end(number: int, frame: object) -> None:
        received.append(number)
        stopping.set()
        if len(received) > 1:
            for each in numbers:
                signal.signal(each, signal.SIG_DFL)
        running.begin_stop(mode="drain" if len(received) == 1 else "now", grace_s=DRAIN_S)

    for number in numbers:
        signal.signal(number, end)
    return stopping


def _start_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpx2", "httpcore2", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A starter (smollm2-135m, minilm-l6), org/name, or a .gguf file.")],
) -> None:
    """Fetch a model, so that it can be loaded."""
    from lmx_lab.progress import bar
    from lmx_lab.weights import Catalog

    with bar(model) as shown:
        entry = Catalog(Settings.read()).fetch(model, shown.update)
    say(f"{entry.id}: {entry.size_bytes / 1e6:.0f} MB at {entry.path}")


@app.command()
def models() -> None:
    """List the models on disk."""
    from lmx_lab.weights import Catalog
    from lmx_lab.weights.starters import STARTERS

    settings = Settings.read()
    entries = Catalog(settings).scan()
    table = Table("id", "kind", "format", "quantization", "size", "context", "from", box=None)
    for entry in entries:
        size, context = f"{entry.size_bytes / 1e6:.0f} MB", str(entry.context_length or "")
        cells = (entry.id, entry.kind, entry.format, entry.quantization or "", size, context, entry.source)
        table.add_row(*(Text(cell) for cell in cells))
    if entries:
        # Whole lines for programs; a terminal's are wrapped to fit.
        out.print(table, width=None if out.is_terminal else 500)
    else:
        say(f"no models in {settings.models_folder} or the hub cache; try: lmx-lab pull smollm2-135m")
    missing = sorted(set(STARTERS) - {entry.id for entry in entries})
    if entries and missing:
        say(f"starters to pull: {', '.join(missing)}")


@app.command()
def doctor() -> None:
    """Say what is fine on this machine, what is not, and what to do."""
    from lmx_lab.doctor import examine

    findings = examine(Settings.read())
    marks = {"fine": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("bad ", "bold red")}
    for finding in findings:
        out.print(Text.assemble(marks[finding.verdict], f" {finding.topic}: {finding.text}"), highlight=False)
    if any(finding.verdict == "bad" for finding in findings):
        sys.exit(FAILED)
