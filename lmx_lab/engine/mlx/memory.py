"""Read how much memory MLX has and how much of it is in use, in bytes. Use is read on the engine thread."""

from __future__ import annotations

import gc

import mlx.core as mx

from lmx_lab.engine import machine_memory
from lmx_lab.heap import return_freed_memory

MAX_CHUNK_TOKENS = 512 if mx.default_device() == mx.cpu else 2048
"""Maximum number of prompt tokens computed in one step, of all prompts together. Longer chunks are not faster."""


def total_bytes() -> int:
    """Return the memory of the device. For a CPU, MLX reports none, and the memory of the machine is returned."""
    return int(mx.device_info().get("memory_size") or machine_memory.total_bytes())


def limit_bytes(chosen: int | None) -> int:
    """Return how many bytes models and caches may use together: the setting, or 80 % of the memory of the device."""
    return machine_memory.limit_bytes(chosen, total_bytes())


def used_bytes() -> int:
    """Return the memory in use."""
    return int(mx.get_active_memory())


def take_peak_bytes() -> int:
    """Return the peak of the memory in use since the last call, and reset it."""
    peak = int(mx.get_peak_memory())
    mx.reset_peak_memory()
    return max(peak, used_bytes())


def release() -> None:
    """Release memory that is not referenced any more, and return it to the operating system.

    If it is not returned, ten loads of a tiny model leave 200 MB in the heaps of the C library.
    """
    gc.collect()
    # Loading a model first creates random weights lazily, and then replaces them with those of the files. The state of
    # MLX's random generator keeps 2 kB for each weight until the state is evaluated.
    mx.eval(mx.random.state)
    mx.clear_cache()
    return_freed_memory()


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether MLX failed to allocate memory; MLX has no exception class for this."""
    text = str(exc).lower()
    return isinstance(exc, MemoryError) or (isinstance(exc, RuntimeError) and ("allocate" in text or "memory" in text))
