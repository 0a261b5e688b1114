"""Store how fast each engine decodes on this machine, and decide which engine is faster.

The measurements are stored in the lab's home, together with the versions and the machine on which they were made. They
become invalid when one of these changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmx_lab.engine.engines import ENGINES
from lmx_lab.engine.memory import default_threads
from lmx_lab.errors import UnusableModelError
from lmx_lab.extras import installed_version
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineName, Format
from lmx_lab.weights.files import open_regular

STARTER = "smollm2-135m"
"""The model with which the engines are measured; it exists in the format of each."""
MEASURED: Mapping[EngineName, Format] = {row.name: row.formats[0] for row in ENGINES.values() if row.is_measured}
"""The engines that are measured, and the format of the model for each."""
FILE = "engine-speeds.json"
BANDWIDTH_FILE = "memory-bandwidth.json"
FILE_BYTES = 2**16
COPIED_BYTES, COPY_S, MIN_COPIES = 2**27, 0.25, 5
"""Size of the copied buffer, which is larger than the caches of a CPU, and how long and how often it is copied."""
CLEARLY_FASTER = 1.2
"""Ratio of speeds from which the faster engine is preferred. Two runs on one machine differ by nearly as much."""
BUSY_PERCENT = 30
"""If other programs use this much of the processors, no engine is preferred. llama.cpp's threads wait for each other
and then lose far more than their share: on two cores with two busy programs MLX had 8.2 tok/s and llama.cpp 3.5;
without them MLX had 19 and llama.cpp 126."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Decoding speeds for one stream of the same model, measured for about a second on each engine."""

    model: str
    measured_at: float
    """Seconds since 1970."""
    tokens_per_second: Mapping[EngineName, float]
    busy_percent: float
    """Use of the processors by other programs just before or after the measurement, in percent."""
    made_with: Mapping[str, Any]
    """The result of ``conditions`` at the time of the measurement. The measurements are valid while it is unchanged."""

    @property
    def disturbed(self) -> bool:
        """Whether other programs used too much of the processors for the measurements to be meaningful."""
        return self.busy_percent >= BUSY_PERCENT

    @property
    def preferred(self) -> EngineName | None:
        """The faster engine; None if neither is clearly faster, or the measurement was disturbed."""
        slower, faster = sorted(self.tokens_per_second, key=lambda name: self.tokens_per_second[name])
        is_clear = self.tokens_per_second[faster] >= CLEARLY_FASTER * self.tokens_per_second[slower]
        return faster if is_clear and not self.disturbed else None

    def __str__(self) -> str:
        if self.disturbed:
            busy = f"other programs kept {self.busy_percent:.0f} % of the processors busy"
            advice = f"{busy}; run lmx-lab doctor --measure when they use less"
        else:
            advice = f"prefer {ENGINES[self.preferred].files}" if self.preferred else "neither is clearly faster"
        return f"for {self.model}: {self.figures}; {advice}"

    @property
    def figures(self) -> str:
        """The speeds, for display."""
        return ", ".join(
            f"{ENGINES[name].title} {rate:.{0 if rate >= 10 else 1}f} tok/s"
            for name, rate in self.tokens_per_second.items()
        )


def versions() -> dict[EngineName, str | None]:
    """Return the versions of the engines that are measured; None for one that is not installed."""
    return {name: ENGINES[name].version for name in MEASURED}


def conditions(settings: Settings) -> dict[str, Any]:
    """Return the versions, settings and properties of the machine that affect the speed of the engines."""
    # On systems other than Linux, each engine chooses its own number of threads.
    threads = default_threads(os.environ) if sys.platform == "linux" else None
    return {
        "engines": versions(),
        "mlx-lm": installed_version("mlx-lm"),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": settings.threads or threads,
        "blas": settings.blas,
        "dtype": settings.dtype,
    }


def read_speeds(settings: Settings) -> Speeds | None:
    """Return the last measurement; None if there is none, or if it is no longer valid. Reads a small file."""
    try:
        with open_regular(settings.home / FILE) as file:
            stored = json.loads(file.read(FILE_BYTES))
        speeds = Speeds(
            model=str(stored["model"]),
            measured_at=float(stored["measured_at"]),
            tokens_per_second={name: float(stored["tokens_per_second"][name]) for name in MEASURED},
            busy_percent=float(stored["busy_percent"]),
            made_with=dict(stored["made_with"]),
        )
    except (OSError, ValueError, TypeError, KeyError, UnusableModelError):
        # The file is missing or was edited, so a new measurement is needed.
        return None
    return speeds if speeds.made_with == conditions(settings) else None


def store_speeds(settings: Settings, speeds: Speeds) -> Path:
    """Store a measurement, and return the path of the file. A reader sees either the old file or the complete new one.

    Raises:
        OSError: the home is not writable.
    """
    return _store(settings, FILE, asdict(speeds))


def _store(settings: Settings, name: str, content: Mapping[str, Any]) -> Path:
    settings.home.mkdir(parents=True, exist_ok=True)
    target = settings.home / name
    with tempfile.NamedTemporaryFile("w", dir=settings.home, prefix=f"{name}.", delete=False, encoding="utf-8") as file:
        draft = Path(file.name)
        try:
            json.dump(content, file, indent=2)
            file.flush()
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    return target


def memory_bandwidth(settings: Settings, device: str = "CPU", measure: Callable[[], float] | None = None) -> float:
    """Return the bytes per second that this machine reads and writes when it copies memory. Measured once, in about
    a quarter of a second, and stored in the lab's home.

    Args:
        device: Whose memory it is: ``CPU``, or the kind of a GPU.
        measure: Measures it; by default that of the CPU.
    """
    threads = settings.threads or default_threads(os.environ)
    made_with = {"architecture": platform.machine(), "cores": os.cpu_count(), "threads": threads}
    rates: dict[str, float] = {}
    try:
        with open_regular(settings.home / BANDWIDTH_FILE) as file:
            stored = json.loads(file.read(FILE_BYTES))
        if stored["made_with"] == made_with:
            rates = {str(name): float(rate) for name, rate in stored["bytes_per_s"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UnusableModelError):
        # The file is missing or was edited, so a new measurement is needed.
        pass
    if device not in rates:
        rates[device] = measure() if measure is not None else _copy_rate(threads)
        with contextlib.suppress(OSError):
            _store(settings, BANDWIDTH_FILE, {"made_with": made_with, "bytes_per_s": rates})
    return rates[device]


def _copy_rate(threads: int) -> float:
    """Return the fastest rate of several copies of a buffer, each thread with its own part, in bytes per second."""
    # Imported here, because it is slow to import.
    import numpy as np

    size = COPIED_BYTES // threads
    # Both have been written to, because the first write of a page takes longer.
    parts = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(threads)]
    durations: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        while len(durations) < MIN_COPIES or sum(durations) < COPY_S:
            began_at = time.perf_counter()
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))
            durations.append(time.perf_counter() - began_at)
    # Each byte is read and written.
    return 2 * size * threads / min(durations)


def age_in_words(at: float) -> str:
    """Return how long ago a time was (seconds since 1970), in words."""
    seconds = max(0.0, time.time() - at)
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
