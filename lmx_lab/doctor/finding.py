"""One line of the doctor's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "note", "bad"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    topic: str
    verdict: Verdict
    """``note``: it works, but not as well as it could, or not for everybody. ``bad``: something is broken."""
    found: str
    means: str = ""
    """For whoever uses the lab; of what is fine, nothing."""
    remedy: str = ""
    """The command that mends it, or what to do."""

    @property
    def text(self) -> str:
        """All of it in one line."""
        parts = (self.found, self.means, f"mend it: {self.remedy}" if self.remedy else "")
        return "; ".join(part for part in parts if part)
