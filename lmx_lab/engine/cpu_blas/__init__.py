"""OpenBLAS for MLX on Linux CPUs.

MLX's wheel for Linux contains the slow reference BLAS. ``configure_blas`` makes the running process use OpenBLAS
instead, or the reference BLAS again, and returns a report. ``ThreadChoice`` sets the number of threads before each step
of the engine. The modules of this package are private.
"""

from lmx_lab.engine.cpu_blas.openblas import ThreadChoice, configure_blas

__all__ = ["ThreadChoice", "configure_blas"]
