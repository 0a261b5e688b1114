"""``lmx-lab doctor``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lmx_lab.cli.app import app, epilog, err, out
from lmx_lab.cli.exit_status import FAILED
from lmx_lab.cli.parsing import Command
from lmx_lab.cli.terminal import shown
from lmx_lab.settings import Settings

if TYPE_CHECKING:
    from lmx_lab.doctor import Finding

MARKS = {"fine": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("bad ", "bold red")}


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab doctor",
        "lmx-lab doctor --measure           which engine is the faster one here",
        "lmx-lab doctor --json | jq .broken",
        needs="nothing; it looks for a few seconds, two of them at most at the network",
        status="0 if nothing is broken (notes are no fault), 1 if something is, 2 if an argument cannot be",
    ),
)
def doctor(
    *,
    measure: Annotated[
        bool, typer.Option("--measure", help="Decode for a second with each engine, and say which is faster.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document in the place of lines.")] = False,
) -> None:
    """Say what is fine on this machine, what is not, what that means, and the command that mends it."""
    from lmx_lab.doctor import examine

    # On a terminal only.
    with err.status("looking at this machine …"):
        findings = examine(Settings.read(), measure=measure)
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
    # Names of programs and folders are others' words.
    return Text.assemble(MARKS[finding.verdict], f" {finding.topic}: {shown(finding.text)}")
