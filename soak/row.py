"""One line of the table that ``make soak`` prints."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True)
class Row:
    """What one part of a run did, and what went wrong in it. Every count after ``faults`` is zero where all is well."""

    part: str
    """What was done, in a few words: ``fuzz: chat``."""
    requests: int = 0
    """Requests, WebSockets and connections that were begun; of loads, the loads and unloads."""
    faults: int = 0
    """Faults that were injected: kills, cuts, clients that leave, bodies that are wrong."""
    lost: int = 0
    """Accepted work without an end, and answers that are not what they should be."""
    doubled: int = 0
    """Work that was done or told twice."""
    hung: int = 0
    """What was not answered, or not ended, within its time."""
    leaked_mb: float = 0.0
    """Resident memory (10^6 bytes) by which a program grew beyond what the part allows; ``notes`` says what."""
    leaked_descriptors: int = 0
    leaked_threads: int = 0
    leaked_processes: int = 0
    """Left when their program had ended, or more than before."""
    slowest_s: float = 0.0
    """The slowest good answer of all."""
    wrong: list[str] = field(default_factory=list)
    """A sentence for each thing that went wrong; also what has no column, such as a status that is not declared."""
    notes: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """For the JSON file only: what is needed to have a failure again, and figures without a column."""

    @property
    def holds(self) -> bool:
        """Whether nothing went wrong."""
        counts = (self.lost, self.doubled, self.hung, self.leaked_mb, self.leaked_descriptors)
        return not any((*counts, self.leaked_threads, self.leaked_processes, self.wrong))


COLUMNS = tuple(each.name for each in fields(Row) if each.name not in ("wrong", "notes", "detail"))
