"""Define the settings of a run, which every part receives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The settings of a run, the same for every part."""

    folder: Path
    """Folder of the tiny model: a two-layer llama with random weights and a real tokenizer."""
    quick: bool = False
    """Whether to run a small version, which takes a minute or two."""
    seed: int = 0
    """Seed of all random choices, to repeat a failure."""
    kills: int | None = None
    """Number of kills of the daemon. If given, the part ``kills`` kills nothing else."""
    count: int | None = None
    """Number of models in the part ``mutations``, or of requests in the part ``fuzz``; None for the default."""


class SoakError(Exception):
    """A part could not be run; the programs under test did not fail."""
