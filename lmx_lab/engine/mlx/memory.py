"""Read how much memory MLX has and how much of it is in use, in bytes."""

from __future__ import annotations

import gc
import time

import mlx.core as mx

from lmx_lab.engine import memory as machine
from lmx_lab.heap import return_freed_memory

MAX_CHUNK_TOKENS = 512 if mx.default_device() == mx.cpu else 2048
"""Maximum number of prompt tokens computed in one step, of all prompts together. Longer chunks are not faster."""
CUDA_MEMORY = "total_memory"
"""Key of MLX's information about an NVIDIA GPU: its size of memory. That of Metal is ``memory_size``."""


def total_bytes() -> int:
    """Return the memory of the device. For a CPU, MLX reports none, and the memory of the machine is returned."""
    device = mx.device_info()
    return int(device.get("memory_size") or device.get(CUDA_MEMORY) or machine.total_bytes())


def is_of_device() -> bool:
    """Return whether models are in memory of the device, which the other engines do not use: that of an NVIDIA GPU."""
    return CUDA_MEMORY in mx.device_info()


def limit_bytes(chosen: int | None) -> int:
    """Return how many bytes models and caches may use together: the setting, or 80 % of the memory of the device. On an
    NVIDIA GPU, memory that other programs use now is not included.
    """
    available = total_bytes()
    if is_of_device():
        available = min(available, int(mx.device_info()["free_memory"]) + used_bytes() + int(mx.get_cache_memory()))
    return machine.limit_bytes(chosen, available)


def limit_kept_bytes(limit_bytes: int) -> None:
    """Let MLX keep freed memory of an NVIDIA GPU only below this limit. By default it keeps all of it, and fails if
    another program uses the GPU.
    """
    mx.set_memory_limit(limit_bytes)


def used_bytes() -> int:
    """Return the memory in use."""
    return int(mx.get_active_memory())


def take_peak_bytes() -> int:
    """Return the peak of the memory in use since the last call, and reset it."""
    peak = int(mx.get_peak_memory())
    mx.reset_peak_memory()
    return max(peak, used_bytes())


def return_freed() -> None:
    """Return freed memory that MLX and the C library keep for reuse to the operating system. Takes about 10 ms."""
    mx.clear_cache()
    return_freed_memory()


def measure_bandwidth() -> float:
    """Return the bytes per second that the device reads and writes when it copies memory."""
    try:
        source, rate = mx.ones(2**26), 0.0
        mx.eval(source)
        for _ in range(5):
            began_at = time.perf_counter()
            mx.eval(source + 1)
            # Each number is read and written.
            rate = max(rate, 2 * source.nbytes / (time.perf_counter() - began_at))
        return rate
    finally:
        end_thread()


def release() -> None:
    """Release memory that is not referenced any more, and return it to the operating system.

    If it is not returned, ten loads of a tiny model leave 200 MB in the heaps of the C library.
    """
    gc.collect()
    # Loading a model first creates random weights lazily, and then replaces them with those of the files. The state of
    # MLX's random generator keeps 2 kB for each weight until the state is evaluated.
    mx.eval(mx.random.state)
    return_freed()


def end_thread() -> None:
    """Release what MLX keeps for this thread, which must not use MLX afterwards. Without this, the process aborts at
    exit (status 134).
    """
    mx.eval(mx.random.state)
    mx.synchronize()
    mx.clear_streams()


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether MLX failed to allocate memory; MLX has no exception class for this."""
    text = str(exc).lower()
    return isinstance(exc, MemoryError) or (isinstance(exc, RuntimeError) and ("allocate" in text or "memory" in text))
