"""Return memory that the C library keeps for reuse to the operating system. Libraries other than glibc do nothing.

Imports only the standard library: the processes of sandboxes load this file without the package.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_MMAP_THRESHOLD = -3
"""From glibc's ``malloc.h``."""
LARGE_BLOCK_BYTES = 2**20


def return_freed_memory() -> None:
    """Return the free memory of all heaps, including that between blocks in use. Takes about 10 ms.

    Six bodies of 8 MB at once left 70 MB of freed memory in the heaps, eight clients that did not read their answers
    75 MB, ten loads of a tiny model 200 MB, and a grammar that took a second to check 90 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Return freed blocks of 1 MiB and more at once, for the rest of the process's life.

    After glibc has freed a large block, it takes blocks of up to that size from its heaps, where small blocks that stay
    in use soon lie between them, so that the heaps cannot shrink. After 12,000 mixed requests, 98 MB of freed memory
    were held, and more later; with this setting 44 MB, without growth. With a threshold of 128 KiB, MLX reads prompts a
    third slower. Does nothing on systems other than Linux with glibc, and if the environment sets a threshold.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # If one threshold is set, glibc no longer adapts the other.
    chosen = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys()
    chosen |= {name for name in ("mmap_threshold", "trim_threshold") if name in os.environ.get("GLIBC_TUNABLES", "")}
    if mallopt is not None and not chosen:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
