"""Store how fast each engine decodes on this machine, and decide which engine is preferred here: MLX on a GPU, and the
faster one on a CPU.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from lmx_lab.engine.engines import ENGINES, engine_for
from lmx_lab.engine.memory import default_threads
from lmx_lab.errors import UnusableModelError
from lmx_lab.extras import installed_version
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineName, Format, LoadSpec, ModelEntry
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

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")
"""Packages with which MLX computes on NVIDIA GPUs."""
CUDA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Devices of NVIDIA's driver on Linux, and on Linux under Windows."""
MLX_LIBRARY = "mlx/lib/libmlx.so"
"""The file of MLX's backend, which the packages for GPUs and for CPUs have at the same path."""


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


@dataclass(frozen=True, kw_only=True)
class PreferredEngine:
    """The engine that is preferred on this machine."""

    name: EngineName
    reason: str

    @property
    def format(self) -> Format:
        return ENGINES[self.name].formats[0]


def preferred_engine(speeds: Speeds | None, spec: LoadSpec | None = None) -> PreferredEngine:
    """Return the engine that is preferred on this machine: MLX on a GPU, and the faster engine on a CPU.

    Args:
        speeds: The stored measurement on this machine. It is not used on a GPU, because the measured model is too small
            to show its speed.
        spec: The load for which the engine is chosen. Some options need llama.cpp.
    """
    option = llama_cpp_option(spec) if spec is not None else None
    if option is not None and ENGINES["llama.cpp"].problem() is None:
        return PreferredEngine(name="llama.cpp", reason=f"only this engine loads models with {option}")
    if (gpu := gpu_of_mlx()) is not None:
        return PreferredEngine(name="mlx", reason=f"it uses the GPU ({gpu})")
    if (problem := ENGINES["llama.cpp"].problem()) is not None:
        return PreferredEngine(name="mlx", reason=f"llama.cpp is usually faster on a CPU, but {problem}")
    if speeds is not None and speeds.preferred is not None:
        return PreferredEngine(name=speeds.preferred, reason=f"measured {speeds.figures} for {speeds.model}")
    return PreferredEngine(name="llama.cpp", reason="it is usually the faster engine on a CPU")


def llama_cpp_option(spec: LoadSpec) -> str | None:
    """Return an option of the load that only llama.cpp supports; None if there is none."""
    return next((name for name in ("deterministic", "kv_cache_dtype") if getattr(spec, name)), None)


def gpu_of_mlx() -> str | None:
    """Return the kind of GPU that MLX uses, without importing MLX; None if it computes on the CPU."""
    if sys.platform == "darwin":
        return "Metal" if platform.machine() == "arm64" else None
    has_device = any(Path(device).exists() for device in CUDA_DEVICES)
    package = _cuda_package() if has_device else None
    return "CUDA" if package is not None and _has_its_library(package) else None


def replaced_cuda_package() -> str | None:
    """Return the package for NVIDIA GPUs whose library ``mlx-cpu`` has replaced, with its version; None if none was.

    On Linux LMX Lab needs ``mlx-cpu``, so both are installed, and MLX has the library of the one installed last.
    """
    package = _cuda_package()
    return None if package is None or _has_its_library(package) else f"{package.name}=={package.version}"


def _cuda_package() -> Distribution | None:
    for package in CUDA_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            return distribution(package)
    return None


def _has_its_library(package: Distribution) -> bool:
    """Return whether the library on disk has the size that the package's list of files states."""
    listed = (package.read_text("RECORD") or "").splitlines()
    size = next((line.rpartition(",")[2] for line in listed if line.startswith(f"{MLX_LIBRARY},")), None)
    library = Path(str(package.locate_file(MLX_LIBRARY)))
    return library.exists() and str(library.stat().st_size) == size


def by_preference(entries: Sequence[ModelEntry], preferred: PreferredEngine) -> list[ModelEntry]:
    """Return the entries of a model, the one that ``auto`` loads first: of an engine that is installed, if possible of
    the preferred one. A quantized copy comes before its original if it is loaded automatically, otherwise after it.
    """

    def rank(entry: ModelEntry) -> tuple[bool, bool, int]:
        copy_rank = 1 if entry.copy is None else 0 if entry.copy.automatic else 2
        return engine_for(entry.format).problem() is not None, entry.format != preferred.format, copy_rank

    return sorted(entries, key=rank)
