"""The daemon that a command speaks to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmx_lab.errors import InvalidRequestError

if TYPE_CHECKING:
    from lmx_lab.client import DaemonClient

Url = Annotated[str | None, typer.Option(help="Address of a daemon elsewhere. By default this user's own.")]
Token = Annotated[
    str | None,
    typer.Option(envvar="LMX_LAB_DAEMON_TOKEN", show_envvar=True, help="Its token. Arguments can be read by others."),
]


def daemon_client(url: str | None, token: str | None) -> DaemonClient:
    """
    Raises:
        LabError: no daemon of this user runs, or an address without a token.
    """
    from lmx_lab.client import DaemonClient

    if url is None:
        return DaemonClient.discover()
    if token is None:
        raise InvalidRequestError("--url needs the daemon's token: set LMX_LAB_DAEMON_TOKEN", param="token")
    return DaemonClient(url, token=token)
