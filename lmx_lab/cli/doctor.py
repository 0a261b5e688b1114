"""``lmx-lab doctor``."""

from __future__ import annotations

import sys

from rich.text import Text

from lmx_lab.cli.app import FAILED, app, out
from lmx_lab.settings import Settings


@app.command()
def doctor() -> None:
    """Say what is fine on this machine, what is not, and what to do."""
    from lmx_lab.doctor import examine

    findings = examine(Settings.read())
    marks = {"fine": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("bad ", "bold red")}
    for finding in findings:
        out.print(Text.assemble(marks[finding.verdict], f" {finding.topic}: {finding.text}"), highlight=False)
    if any(finding.verdict == "bad" for finding in findings):
        sys.exit(FAILED)
