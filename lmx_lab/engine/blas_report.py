"""What multiplies the matrices of an engine on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BlasName = Literal["openblas", "reference", "system", "unused"]


@dataclass(frozen=True, kw_only=True)
class BlasReport:
    """Who computes MLX's matrix products."""

    name: BlasName
    """``reference``: the wheel's. ``system``: another one that was there before. ``unused``: a GPU computes."""
    detail: str
    """For people: version and processor, or why it is not OpenBLAS."""
    threads: int | None = None
    gflops: float | None = None
    """Measured with a float32 product of MLX."""
    gemv: bool = False
    """Whether products of one row go to ``sgemv``."""
    threads_chosen: bool = True
    """Whether somebody chose the number of threads; if not, it may follow what other programs leave."""
