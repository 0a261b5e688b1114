"""Provide the commands for running labs: ``load``, ``unload``, ``keep``, ``ps``, ``stop``, ``status``, ``discover``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table
from rich.text import Text

import lmx_lab
from lmx_lab.cli import FAILED
from lmx_lab.cli.completion import complete_model
from lmx_lab.cli.options import Command, epilog
from lmx_lab.cli.terminal import out, print_line, print_note
from lmx_lab.errors import LabError, format_bytes
from lmx_lab.extras import install_command
from lmx_lab.sanitize import single_line
from lmx_lab.settings import Settings
from lmx_lab.urls import local_url
from lmx_lab.values.models import EngineChoice, LoadOptions, TimeToLive

if TYPE_CHECKING:
    from lmx_lab.wire.admin import ModelRecord

app = typer.Typer()
NEEDS_LAB = "a running lab: lmx-lab serve, or launch() in a notebook"
Url = Annotated[str | None, typer.Option(help="Address of another lab. By default, the lab at the configured port.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="LMX_LAB_API_KEY", show_envvar=True, help="Key of the lab, if it needs one.")
]
Wait = Annotated[
    bool | None,
    typer.Option(
        "--wait/--now",
        help="Let running answers of the loaded model finish without a time limit, or stop them immediately. "
        "By default they have 30 s (LMX_LAB_DRAIN_S of the lab).",
    ),
]
Pin = Annotated[
    bool | None,
    typer.Option(
        "--pin/--no-pin",
        help="Keep the model in memory until it is unloaded by request, or not. By default unchanged.",
    ),
]
Ttl = Annotated[str | None, typer.Option(help="Seconds without a request after which the model is unloaded, or never.")]


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab load smollm2-135m",
        "lmx-lab load smollm2-135m --now       stop running answers of the loaded model",
        needs=NEEDS_LAB,
    ),
)
def load(
    model: Annotated[
        str,
        typer.Argument(
            help="Id or path. The lab downloads the model of an id if needed.", autocompletion=complete_model
        ),
    ],
    *,
    engine: Annotated[
        EngineChoice | None, typer.Option(help="Engine that must run the model. By default the one for its format.")
    ] = None,
    pin: Pin = None,
    ttl: Ttl = None,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Load a model in a running lab, in place of the loaded one. Ctrl-C cancels the load."""
    options: LoadOptions = {"pin": pin, "ttl_s": _seconds(ttl)}
    if engine is not None:
        options["engine"] = engine
    if wait is not None:
        options["wait"] = wait
    with _running_lab(url, api_key) as lab:
        print_line(repr(lab.load(_absolute(model), **options)))


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab unload",
        "lmx-lab unload --now                  stop running answers, even if an unload already waits for them",
        "lmx-lab unload smollm2-135m --wait    only if this model is loaded; let its answers finish",
        needs=NEEDS_LAB,
    ),
)
def unload(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model that is loaded or being loaded. By default the main one.", autocompletion=complete_model
        ),
    ] = None,
    *,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Unload a model of a running lab, or cancel its load. Ctrl-C ends the command, but not the unload."""
    with _running_lab(url, api_key) as lab:
        try:
            freed_gb = lab.unload(None if model is None else _absolute(model), wait=wait)
        except KeyboardInterrupt:
            print_note(
                "the unload continues; lmx-lab unload --now stops the running answers, and lmx-lab unload --wait lets "
                "them finish without a time limit"
            )
            raise
    print_line(f"unloaded, {format_bytes(freed_gb * 1e9)} freed" if freed_gb else "no model was unloaded")


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab keep smollm2-135m --pin",
        "lmx-lab keep smollm2-135m --no-pin --ttl 600",
        needs=NEEDS_LAB,
    ),
)
def keep(
    model: Annotated[str, typer.Argument(help="A loaded model.", autocompletion=complete_model)],
    *,
    pin: Pin = None,
    ttl: Ttl = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Change how long a loaded model of a running lab stays in memory."""
    with _running_lab(url, api_key) as lab:
        print_line(repr(lab.keep(_absolute(model), pin=pin, ttl_s=_seconds(ttl))))


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab status",
        "lmx-lab status --json | jq -r '.labs[].models[].id'",
        status="0 if a lab is running, 1 if none is, 2 if an argument is not valid",
    ),
)
def status(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> None:
    """List the running labs of this user with the models in their memory, and the daemon."""
    import asyncio

    from lmx_lab.client.labs import ask_labs
    from lmx_lab.daemon.home import read_state

    settings = Settings.read()
    labs: dict[str, list[ModelRecord]] = {}
    for url, answer in asyncio.run(ask_labs(settings)).items():
        if isinstance(answer, LabError):
            print_note(f"the lab at {url} does not list its models: {answer.message}")
        else:
            labs[url] = [record for record in answer.models if record.loaded]
    daemon = None
    with contextlib.suppress(LabError):
        daemon = read_state(settings.daemon_folder)
    address = None if daemon is None else local_url(daemon.host, daemon.port)
    if as_json:
        listed = [
            {"url": url, "models": [each.model_dump(mode="json") for each in records]} for url, records in labs.items()
        ]
        print_line(json.dumps({"labs": listed, "daemon": address}))
    else:
        for url, records in labs.items():
            models = [f"{each.id} on {each.engine}, {format_bytes((each.vram_gb or 0) * 1e9)}" for each in records]
            print_line(f"lab at {url}: {'; '.join(models) or 'no model is loaded'}")
        if address is not None:
            print_line(f"daemon at {address}")
        if not labs:
            print_note("no lab is running; start one with lmx-lab serve --model smollm2-135m")
    if not labs:
        sys.exit(FAILED)


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab ps",
        "lmx-lab ps --json | jq -r '.requests[].id'",
        needs=NEEDS_LAB,
    ),
)
def ps(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List the requests that wait or run in a lab, with the addresses of their clients, the oldest first."""
    with _running_lab(url, api_key) as lab:
        requests = lab.clients()
    if as_json:
        print_line(json.dumps({"requests": [request.model_dump() for request in requests]}))
    elif requests:
        for line in repr(requests).splitlines():
            print_line(line)
    else:
        print_note("no request waits or runs; lmx-lab status lists the loaded models")


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab stop req_0123456789abcdef",
        "lmx-lab stop req_01                  the beginning of an id is enough",
        needs=NEEDS_LAB,
    ),
)
def stop(
    request: Annotated[str, typer.Argument(help="Id of a request that lmx-lab ps lists, or its beginning.")],
    *,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Stop a request of any client. The client gets an error.

    Ctrl-C ends lmx-lab serve, and lmx-lab unload frees memory.
    """
    with _running_lab(url, api_key) as lab:
        print_line(f"stopped {lab.stop_request(request)}")


def _seconds(ttl: str | None) -> TimeToLive | None:
    """Return a time to live. A text that is neither a number nor ``never`` is refused by the lab."""
    try:
        return None if ttl is None else float(ttl)
    except ValueError:
        return cast(TimeToLive, ttl)


@contextlib.contextmanager
def _running_lab(url: str | None, api_key: str | None) -> Iterator[lmx_lab.Lab]:
    """Connect to a running lab.

    Raises:
        LabError: no lab answers at the address, or the key is wrong.
    """
    settings = Settings.read()
    with lmx_lab.attach(url or local_url(settings.host, settings.port), api_key=api_key) as lab:
        yield lab


def _absolute(model: str) -> str:
    """Return a path as an absolute one, because the lab has another working directory. An id is not changed."""
    return os.path.abspath(os.path.expanduser(model)) if model.startswith((".", "/", "~")) else model


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab discover",
        "lmx-lab serve --host 0.0.0.0 --announce    let others find a server",
        needs=f"zeroconf: {install_command('zeroconf')}",
    ),
)
def discover(
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="Time to wait for announcements.")] = 3.0,
) -> None:
    """List the labs that are announced on the local network, with their addresses and models."""
    from lmx_lab.notebook.addresses import lan_addresses
    from lmx_lab.notebook.discovery import find_labs

    labs = find_labs(seconds)
    if not labs:
        if lan_addresses():
            hint = "start one with lmx-lab serve --host 0.0.0.0 --announce"
        else:
            hint = "this machine has no network connection with an IPv4 address"
        print_note(f"no lab is announced on the local network; {hint}")
        return
    table = Table("name", "address", "model", "needs a key", box=None)
    for lab in labs:
        cells = (lab.name, lab.address, lab.model or "", "yes" if lab.key_needed else "no")
        table.add_row(*(Text(single_line(cell, most=200)) for cell in cells))
    out.print(table)
