"""Provide ``lmx-lab doctor``: check this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from lmx_lab.cli import FAILED
from lmx_lab.cli.options import Command, epilog
from lmx_lab.cli.terminal import err, out
from lmx_lab.sanitize import escape_text
from lmx_lab.settings import Settings

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
        from lmx_lab.doctor import run_checks

        findings = run_checks(Settings.read(), measure=measure)
    broken = sum(finding.verdict == "bad" for finding in findings)
    if as_json:
        document = {"findings": [asdict(finding) for finding in findings], "broken": broken}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        for finding in findings:
            # Names of programs and folders may contain control characters.
            line = f" {finding.topic}: {escape_text(finding.text)}"
            out.print(Text.assemble(MARKS[finding.verdict], line), highlight=False)
    if broken:
        sys.exit(FAILED)
