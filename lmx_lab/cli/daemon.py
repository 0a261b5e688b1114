"""Provide ``lmx-lab daemon``: run the daemon until a signal."""

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

from lmx_lab.cli.options import Command, check_host, epilog
from lmx_lab.cli.process import (
    freeze_objects,
    garbage_collection_paused,
    start_logging,
    stop_on_signals,
)
from lmx_lab.cli.terminal import is_interactive, print_line, read_line
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, McpServerExistsError
from lmx_lab.heap import return_large_blocks
from lmx_lab.settings import Settings
from lmx_lab.urls import LOOPBACK_NAMES

if TYPE_CHECKING:
    from lmx_lab.wire.mcp import McpServerConfig

app = typer.Typer()
DRAIN_S = 1.0
"""Time for which turns may continue after a signal. The complete shutdown has to end within ``process.STOP_S``."""


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab daemon",
        "lmx-lab daemon --upstream http://127.0.0.1:8080   with another model server",
        "lmx-lab daemon --mcp-config .mcp.json             with a project's tools",
        needs="a chat-format server for its turns, such as lmx-lab serve, which may be started later",
        status="0 after Ctrl-C or SIGTERM (turns have 1 s to end; a second signal cancels them), or after POST "
        "/v3/daemon/shutdown; 1 if the daemon could not start; 2 if an argument is not valid",
    ),
)
def daemon(
    *,
    upstream: Annotated[
        str | None, typer.Option(help="Chat-format server for the turns. By default http://127.0.0.1:8400.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 for any free one. By default 8401, or the next free one.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on. Any other than loopback exposes the daemon to other machines."),
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Additional Host header to accept. Repeatable.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of a web page that may call the daemon. Repeatable.")
    ] = None,
    mcp_config: Annotated[
        Path | None, typer.Option(help="A .mcp.json file. Its new MCP servers are added after a confirmation.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Add the MCP servers without a confirmation.")] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the daemon until Ctrl-C or SIGTERM: sessions, turns with tools, MCP servers.

    Its token is in state.json in its folder, and changes with each start. If the model server needs a key, set
    LMX_LAB_UPSTREAM_API_KEY; there is no option for it, because other users can read arguments.
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
    if settings.upstream is not None:
        # Checked before the start, and not only when the first turn fails.
        from lmx_lab.client.connection import normalize_address

        try:
            address = normalize_address(settings.upstream)
        except InvalidRequestError as exc:
            raise InvalidRequestError(exc.message.replace("url:", "upstream:", 1), param="upstream") from None
        # An address with neither scheme nor port would be a web site at port 80.
        if "://" not in settings.upstream and urlsplit(address).port is None:
            raise InvalidRequestError(
                f"upstream: {settings.upstream!r:.200} has neither http:// nor a port; give an address such as "
                "http://127.0.0.1:8400",
                param="upstream",
            )
    start_logging(settings.log_level)
    servers = _confirmed_servers(mcp_config, yes=yes) if mcp_config is not None else []
    with garbage_collection_paused():
        _run_daemon(settings, servers, explicit_port=port is not None or "LMX_LAB_DAEMON_PORT" in os.environ)


def _confirmed_servers(path: Path, *, yes: bool) -> list[McpServerConfig]:
    """Print the MCP servers of the file, and return them if the user confirms them; otherwise none."""
    from lmx_lab.daemon.mcp.config import read_mcp_file

    servers = read_mcp_file(path)
    for server in servers:
        target = server.url or shlex.join([server.command or "", *server.args])
        where = f"  (in {server.cwd})" if server.cwd and Path(server.cwd) != path.absolute().parent else ""
        # Values may be secrets, except those of variables that choose other programs and libraries.
        variables = [
            f"{name}={value}" if name == "PATH" or name.startswith(("LD_", "DYLD_", "PYTHON", "NODE_")) else name
            for name, value in [*server.env.items(), *server.headers.items()]
        ]
        text = f"{server.name}: {target}{where}" + (f"  (with {', '.join(variables)})" if variables else "")
        # Control characters could hide a part of it.
        print_line("".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text))
    if not servers:
        print_line(f"{path} has no MCP servers")
    elif not yes and not is_interactive():
        raise InvalidRequestError("there is no terminal to confirm the MCP servers; give --yes to add them")
    elif not yes:
        answer = ""
        with contextlib.suppress(EOFError):
            answer = read_line("These programs and addresses will receive data of turns. Add them? [y]es, [N]o ")
        return servers if answer.strip().lower() in ("y", "yes") else []
    return servers


def _run_daemon(settings: Settings, servers: list[McpServerConfig], *, explicit_port: bool) -> None:
    from lmx_lab.daemon.daemon import Daemon

    is_exposed = not settings.daemon_host.startswith("127.") and settings.daemon_host not in LOOPBACK_NAMES
    return_large_blocks()
    if is_exposed:
        from lmx_lab.notebook.addresses import lan_addresses

        running = Daemon(settings=settings, explicit_port=explicit_port, own_names=lan_addresses)
    else:
        running = Daemon(settings=settings, explicit_port=explicit_port)
    stopping = threading.Event()

    def stop(signals: int) -> None:
        stopping.set()
        running.begin_stop(mode="drain" if signals == 1 else "now", grace_s=DRAIN_S)

    # The handlers are set before the start, so that a signal during the start also ends the daemon properly. After the
    # first signal, turns may continue for DRAIN_S; the second one cancels them, and the third one ends the process. A
    # terminal sends SIGHUP when it is closed. Under nohup it is ignored, and stays ignored.
    stop_on_signals(stop, numbers=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP), most=2)
    running.start()
    freeze_objects()
    with contextlib.suppress(HostingError):
        for server in servers:
            try:
                running.run(running.services.servers.add(server))
                print_line(f"added {server.name}")
            except McpServerExistsError:
                print_line(f"{server.name} exists already, and was not changed")
            except HostingError:
                raise
            except LabError as exc:
                print_line(f"{server.name} was not added: {exc.message}", style="bold red")
        print_line(f"The daemon is ready at {running.url}, for {running.upstream_url}", style="bold")
        print_line(f"its token is in {running.folder / 'state.json'}")
        if is_exposed:
            print_line(
                f"other machines can reach it on {settings.daemon_host}: its token is sent unencrypted", style="bold"
            )
    if stopping.is_set():
        running.begin_stop()
    # A signal that arrives just before a wait starts does not interrupt it.
    while not running.wait(1.0):
        pass
