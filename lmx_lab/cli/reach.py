"""The daemon that a command connects to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from lmx_lab.cli.app import note
from lmx_lab.errors import InvalidRequestError

if TYPE_CHECKING:
    from lmx_lab.client import DaemonClient

TOKEN = "LMX_LAB_DAEMON_TOKEN"
NEEDS = "a daemon: lmx-lab daemon, or launch(daemon=True) in a notebook"
Url = Annotated[str | None, typer.Option(help="Address of a daemon elsewhere. By default this user's own.")]
Token = Annotated[
    str | None,
    typer.Option(envvar=TOKEN, show_envvar=True, help="Its token, with --url. Arguments can be read by others."),
]


def daemon_client(url: str | None, token: str | None) -> DaemonClient:
    """A client of the daemon at ``url``, by default of this user's own daemon.

    Raises:
        LabError: no daemon of this user runs, an address without a token, or a token without an address.
    """
    if url is None and token is not None:
        if token != os.environ.get(TOKEN):
            raise InvalidRequestError(
                "--token is for a daemon at --url; give that too, or leave --token out: this user's own daemon is "
                "found together with its token",
                param="token",
            )
        note(f"{TOKEN} is not used: without --url it is this user's own daemon, found together with its token")
    if url is not None and token is None:
        raise InvalidRequestError(f"--url needs the daemon's token: set {TOKEN}", param="token")
    # The client takes most of a second to import, which --help and completion should not wait for.
    from lmx_lab.client import DaemonClient

    if url is None:
        return DaemonClient.discover()
    return DaemonClient(url, token=token or "")
