"""What MLX uses and what there is, in bytes. The readings belong on the engine thread."""

from __future__ import annotations

import gc

import mlx.core as mx

from lmx_lab.engine import machine_memory

LARGEST_CHUNK_TOKENS = 512 if mx.default_device() == mx.cpu else 2048
"""Prompt tokens computed in one step at most, all prompts together; longer ones gain nothing."""


def total_bytes() -> int:
    """Memory of the device. MLX reports none on a CPU, where it is the machine's."""
    return int(mx.device_info().get("memory_size") or machine_memory.total_bytes())


def limit_bytes(chosen: int | None) -> int:
    """What models and caches may take together: the setting, else 80 % of the device."""
    return chosen if chosen is not None else total_bytes() * 8 // 10


def used_bytes() -> int:
    return int(mx.get_active_memory())


def take_peak_bytes() -> int:
    """The highest use since the last call."""
    peak = int(mx.get_peak_memory())
    mx.reset_peak_memory()
    return max(peak, used_bytes())


def release() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    # Weights are drawn by chance and then replaced by those of the files, all without being computed: for each the
    # state of MLX's generator keeps 2 kB, until it is computed itself.
    mx.eval(mx.random.state)
    mx.clear_cache()


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether MLX failed to allocate; it has no exception class of its own for this."""
    text = str(exc).lower()
    return isinstance(exc, MemoryError) or (isinstance(exc, RuntimeError) and ("allocate" in text or "memory" in text))
