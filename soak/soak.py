"""What a part of a long run is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The settings of a run, the same for every part."""

    folder: Path
    """The tiny model: a two-layer llama of random weights with a real tokenizer."""
    quick: bool = False
    """A look, in a minute or two, instead of the whole."""
    seed: int = 0
    """Whatever is drawn by chance is drawn from this, so that what failed can be had again."""


class SoakError(Exception):
    """A part could not be run, as opposed to a program that failed in it."""
