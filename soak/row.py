"""Define a row of the table that ``make soak`` prints."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True)
class Row:
    """The result of one part of a run. Every count after ``faults`` is zero if the part has passed."""

    part: str
    """Name of the part and of what it did, such as ``fuzz: chat``."""
    requests: int = 0
    """Number of requests, WebSockets, connections, loads and unloads."""
    faults: int = 0
    """Number of injected faults: kills, disconnects, invalid bodies."""
    lost: int = 0
    """Number of accepted requests that did not end, and of incorrect answers."""
    doubled: int = 0
    """Number of things that were done or reported twice."""
    hung: int = 0
    """Number of requests and programs that were not answered, or did not end, in time."""
    leaked_mb: float = 0.0
    """Growth of resident memory beyond what the part allows, in 10^6 bytes; ``notes`` has the allowance."""
    leaked_descriptors: int = 0
    leaked_threads: int = 0
    leaked_processes: int = 0
    """Number of processes left after their program had ended, or in addition to those before."""
    slowest_s: float = 0.0
    """Duration of the slowest correct answer, in seconds."""
    wrong: list[str] = field(default_factory=list)
    """A sentence for each problem, including those without a column, such as an undeclared status."""
    notes: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """Data for the JSON file only: what is needed to repeat a failure, and figures without a column."""

    @property
    def passed(self) -> bool:
        """Whether there was no problem."""
        counts = (self.lost, self.doubled, self.hung, self.leaked_mb, self.leaked_descriptors)
        return not any((*counts, self.leaked_threads, self.leaked_processes, self.wrong))


COLUMNS = tuple(each.name for each in fields(Row) if each.name not in ("wrong", "notes", "detail"))
