"""The progress of fetching a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["download", "verify", "convert", "store"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A fetch has come so far. ``done_bytes`` starts again at 0 with each stage."""

    stage: Stage
    done_bytes: int
    total_bytes: int | None
    """``None`` where the total is not known beforehand."""


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """The callback of a caller who does not watch."""
