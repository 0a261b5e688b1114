"""What one run is about: the model, its folder, and how long to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Model = Literal["tiny", "smollm2"]


class BenchError(Exception):
    """A figure could not be measured; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. Without a fast BLAS, SmolLM2-135M does about ten tokens a second on a CPU."""

    rounds: int
    """Times that two servers take turns; odd, for the median."""
    alone_tokens: int
    """Length of an answer when one stream decodes."""
    together_tokens: int
    """Length of each answer when eight do."""
    history_tokens: int
    """The long prompt, about."""
    history_rounds: int
    gaps: int
    """Inter-token gaps to collect, at most."""
    gaps_s: float
    """And for how long, at most."""
    prefill_tokens: int
    """A prompt whose prefill lasts long enough to disconnect in it."""


TINY = Sizes(
    rounds=7,
    alone_tokens=600,
    together_tokens=400,
    history_tokens=1400,
    history_rounds=5,
    gaps=2000,
    gaps_s=30,
    prefill_tokens=7500,
)
SMOLLM2 = Sizes(
    rounds=3,
    alone_tokens=64,
    together_tokens=64,
    history_tokens=1400,
    history_rounds=1,
    gaps=200,
    gaps_s=60,
    prefill_tokens=1400,
)
QUICK_TINY = Sizes(
    rounds=3,
    alone_tokens=300,
    together_tokens=150,
    history_tokens=1400,
    history_rounds=1,
    gaps=300,
    gaps_s=10,
    prefill_tokens=7500,
)
QUICK_SMOLLM2 = Sizes(
    rounds=1,
    alone_tokens=24,
    together_tokens=40,
    history_tokens=300,
    history_rounds=1,
    gaps=60,
    gaps_s=20,
    prefill_tokens=600,
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    model: Model
    folder: Path
    """The model's files, floating-point weights as float32: the same for every server."""
    quick: bool

    @property
    def sizes(self) -> Sizes:
        if self.model == "tiny":
            return QUICK_TINY if self.quick else TINY
        return QUICK_SMOLLM2 if self.quick else SMOLLM2

    @property
    def promised(self) -> bool:
        """The limits of the issue are about SmolLM2; the tiny model shows overheads."""
        return self.model == "smollm2"
