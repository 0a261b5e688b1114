"""Define the settings of a benchmark: the model, its folder, and how much to measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Model = Literal["tiny", "smollm2", "large"]


class BenchError(Exception):
    """A figure could not be measured; the message contains the reason."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much to measure. Without a fast BLAS, SmolLM2-135M decodes about ten tokens per second on a CPU."""

    rounds: int
    """Number of rounds in which two servers take turns; odd, for the median."""
    alone_tokens: int
    """Length of the answer of a single stream."""
    together_tokens: int
    """Length of each answer of eight streams."""
    history_tokens: int
    """Approximate length of the long prompt."""
    history_rounds: int
    """Number of rounds with the long prompt."""
    gaps: int
    """Maximum number of inter-token gaps to collect."""
    gaps_s: float
    """Maximum time for collecting them."""
    prefill_tokens: int
    """Length of a prompt whose prefill is long enough to disconnect during it."""


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
# A GPU decodes hundreds of tokens per second of one stream.
LARGE = replace(SMOLLM2, alone_tokens=256, together_tokens=256, history_rounds=3, gaps=1000)
QUICK_TINY = replace(TINY, rounds=3, alone_tokens=300, together_tokens=150, history_rounds=1, gaps=300, gaps_s=10)
QUICK_SMOLLM2 = replace(
    SMOLLM2,
    rounds=1,
    alone_tokens=24,
    together_tokens=40,
    history_tokens=300,
    gaps=60,
    gaps_s=20,
    prefill_tokens=600,
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a figure is measured with."""

    model: Model
    folder: Path
    """The model's files, the same for all servers."""
    quick: bool
    """Whether to measure fewer and shorter rounds."""

    @property
    def sizes(self) -> Sizes:
        if self.model == "tiny":
            return QUICK_TINY if self.quick else TINY
        if self.model == "large":
            return LARGE
        return QUICK_SMOLLM2 if self.quick else SMOLLM2

    @property
    def streams(self) -> tuple[int, ...]:
        """Numbers of streams whose speed is measured."""
        return (1, 8, 32) if self.model == "large" else (1, 8)

    @property
    def promised(self) -> bool:
        """Whether the limits apply to this model: they are defined for SmolLM2; the tiny model shows overheads."""
        return self.model == "smollm2"
