"""Provide ``lmx-lab doctor``: check this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lmx_lab.cli import FAILED
from lmx_lab.cli.lazy import load
from lmx_lab.cli.options import Command, epilog
from lmx_lab.cli.terminal import err, out, shown
from lmx_lab.settings import Settings

if TYPE_CHECKING:
    from lmx_lab.doctor import Finding

app = typer.Typer()
MARKS = {"fine": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("bad ", "bold red")}


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab doctor",
        "lmx-lab doctor --measure           also measure which engine is faster",
        "lmx-lab doctor --json | jq .broken",
        needs="a few seconds, of which the network takes 2 at most",
        status="0 if nothing is broken (notes do not count), 1 if something is, 2 if an argument is not valid",
    ),
)
def doctor(
    *,
    measure: Annotated[
        bool, typer.Option("--measure", help="Decode for a second with each engine, and report which one is faster.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> None:
    """Check this machine: report what works, what does not, what that means, and the command that fixes it."""
    # Shown on a terminal only.
    with err.status("checking this machine …"):
        findings: list[Finding] = load("lmx_lab.doctor:run_checks")(Settings.read(), measure=measure)
    broken = sum(finding.verdict == "bad" for finding in findings)
    if as_json:
        document = {"findings": [asdict(finding) for finding in findings], "broken": broken}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        for finding in findings:
            out.print(_line(finding), highlight=False)
    if broken:
        sys.exit(FAILED)


def _line(finding: Finding) -> Text:
    # Names of programs and folders may contain control characters.
    return Text.assemble(MARKS[finding.verdict], f" {finding.topic}: {shown(finding.text)}")
