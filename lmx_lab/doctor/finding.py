"""Define the result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "note", "bad"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line that ``lmx-lab doctor`` prints."""

    topic: str
    """Name of the check, for example ``port``."""
    verdict: Verdict
    """``note``: it works, but slower than possible or not in every environment. ``bad``: something is broken."""
    found: str
    """The observation of the check."""
    means: str = ""
    """The consequence for the user. Empty if there is none."""
    remedy: str = ""
    """The command or the step that fixes it. Empty if there is nothing to fix."""

    @property
    def text(self) -> str:
        """All parts in one line, without the topic."""
        parts = (self.found, self.means, f"fix: {self.remedy}" if self.remedy else "")
        return "; ".join(part for part in parts if part)
