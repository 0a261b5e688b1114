"""Provide ``lmx-lab discover``: list the labs that are announced on the local network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lmx_lab.cli.lazy import load
from lmx_lab.cli.options import Command, epilog
from lmx_lab.cli.terminal import out, print_note, single_line
from lmx_lab.extras import install_command

if TYPE_CHECKING:
    from lmx_lab.notebook.discovery import FoundLab

app = typer.Typer()
MAX_CELL_CHARACTERS = 200


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
    labs: list[FoundLab] = load("lmx_lab.notebook.discovery:find_labs")(seconds)
    if not labs:
        if load("lmx_lab.notebook.addresses:lan_addresses")():
            hint = "start one with lmx-lab serve --host 0.0.0.0 --announce"
        else:
            hint = "this machine has no network connection with an IPv4 address"
        print_note(f"no lab is announced on the local network; {hint}")
        return
    table = Table("name", "address", "model", "needs a key", box=None)
    for lab in labs:
        cells = (lab.name, lab.address, lab.model or "", "yes" if lab.key_needed else "no")
        table.add_row(*(Text(single_line(cell, most=MAX_CELL_CHARACTERS)) for cell in cells))
    out.print(table)
