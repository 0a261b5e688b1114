"""The report on the BLAS behind MLX, which processes without MLX read too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BlasName = Literal["openblas", "reference", "system", "unused"]


@dataclass(frozen=True, kw_only=True)
class BlasReport:
    """The BLAS that computes MLX's matrix products."""

    name: BlasName
    """``reference``: the one in MLX's wheel. ``system``: another BLAS that MLX already used. ``unused``: on a GPU."""
    detail: str
    """For display: version and processor kernels, or the reason why OpenBLAS is not used."""
    threads: int | None = None
    gflops: float | None = None
    """Measured speed of a float32 matrix product in MLX."""
    gemv: bool = False
    """Whether products with a single row are computed by ``sgemv``."""
    threads_fixed: bool = True
    """Whether the number of threads was set explicitly. If not, ``ThreadChoice`` adapts it to the load."""
