"""``lmx-lab doctor``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from lmx_lab.cli.app import FAILED, app, err, out
from lmx_lab.settings import Settings


@app.command()
def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure a second of each engine anew, though it was done before.")
    ] = False,
) -> None:
    """Say what is fine on this machine, what is not, what to do, and which engine is the faster one here."""
    from lmx_lab.doctor import examine

    # On a terminal only: measuring takes a while.
    with err.status("looking at this machine …"):
        findings = examine(Settings.read(), measure=measure)
    marks = {"fine": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("bad ", "bold red")}
    for finding in findings:
        out.print(Text.assemble(marks[finding.verdict], f" {finding.topic}: {finding.text}"), highlight=False)
    if any(finding.verdict == "bad" for finding in findings):
        sys.exit(FAILED)
