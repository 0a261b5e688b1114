"""``lmx-lab daemon``: the daemon until a signal."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from lmx_lab.cli.app import app, epilog, keep_what_is_made, say, start_logging
from lmx_lab.cli.listening import check_host
from lmx_lab.cli.memory import give_back_large_blocks
from lmx_lab.cli.parsing import Command
from lmx_lab.cli.stopping import stop_on_signals
from lmx_lab.cli.terminal import asked, can_be_asked
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, McpServerExistsError
from lmx_lab.settings import Settings
from lmx_lab.urls import LOOPBACK_NAMES

if TYPE_CHECKING:
    from lmx_lab.daemon.daemon import Daemon
    from lmx_lab.wire.mcp import McpServerConfig

DRAIN_S = 1.0
"""How long turns may continue after a signal: all that the daemon does has to end within ``STOP_S``."""


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab daemon",
        "lmx-lab daemon --upstream http://127.0.0.1:8080   before another server",
        "lmx-lab daemon --mcp-config .mcp.json             with a project's tools",
        needs="a chat-format server for its turns, such as lmx-lab serve; it may come later",
        status="0 after Ctrl-C or SIGTERM (turns have 1 s to end; a second one cuts them), or POST "
        "/v3/daemon/shutdown; "
        "1 if it could not start; 2 if an argument cannot be",
    ),
)
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
    check_host(host)
    settings = Settings.read(
        upstream=upstream,
        daemon_port=port,
        daemon_host=host,
        allowed_hosts=allow_host or None,
        cors_origins=cors_origin or None,
        log_level=log_level,
    )
    _check_upstream(settings.upstream)
    start_logging(settings.log_level)
    servers = _agreed(mcp_config, yes=yes) if mcp_config is not None else []
    _run_daemon(settings, servers, explicit_port=port is not None or "LMX_LAB_DAEMON_PORT" in os.environ)


def _check_upstream(url: str | None) -> None:
    """
    Raises:
        InvalidRequestError: no address of a server. Found out here, and not when the first turn fails.
    """
    if url is None:
        return
    from lmx_lab.client.address import normalize_address

    try:
        # What has neither would be a web site at port 80.
        named = "://" in url or urlsplit(normalize_address(url)).port is not None
    except InvalidRequestError as exc:
        raise InvalidRequestError(exc.message.replace("url:", "upstream:", 1), param="upstream") from None
    if not named:
        raise InvalidRequestError(
            f"upstream: {url!r:.200} has neither http:// nor a port; it looks like http://127.0.0.1:8400",
            param="upstream",
        )


def _agreed(path: Path, *, yes: bool) -> list[McpServerConfig]:
    """The servers of the file, shown, if somebody says yes to them; else none."""
    from lmx_lab.daemon.mcp.project_file import read_mcp_file

    servers = read_mcp_file(path)
    for server in servers:
        say(_shown(server, path.absolute().parent))
    if not servers:
        say(f"{path} has no servers")
    elif not yes and not can_be_asked():
        raise InvalidRequestError("nobody can be asked here whether these may be started; --yes says so")
    elif not yes and not _said_yes():
        return []
    return servers


def _said_yes() -> bool:
    """Ctrl-C ends the command; anything but a yes is a no."""
    with contextlib.suppress(EOFError):
        said = asked("These programs and addresses get what turns hand them. Add them? [y]es, [N]o ")
        return said.strip().lower() in ("y", "yes")
    return False


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
    give_back_large_blocks()
    if exposed:
        from lmx_lab.notebook.addresses import lan_addresses

        running = Daemon(settings=settings, explicit_port=explicit_port, own_names=lan_addresses)
    else:
        running = Daemon(settings=settings, explicit_port=explicit_port)
    # First: a signal during the start ends it in good order, too.
    stopping = _end_on_signals(running)
    running.start()
    keep_what_is_made()
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
    """Set by the first signal, which gives turns ``DRAIN_S``. The second cuts them, the third ends the process."""
    stopping = threading.Event()

    def end(signals: int) -> None:
        stopping.set()
        running.begin_stop(mode="drain" if signals == 1 else "now", grace_s=DRAIN_S)

    # A terminal that is closed sends SIGHUP; under nohup it is ignored, and stays so.
    stop_on_signals(end, numbers=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP), most=2)
    return stopping
