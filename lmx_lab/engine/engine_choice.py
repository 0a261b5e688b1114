"""Choose the engine and the format for a model that may have several formats: the engine that is fastest here."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from lmx_lab.engine.registry import ENGINES, engine_for
from lmx_lab.engine.speeds import Speeds
from lmx_lab.values.models import EngineName, Format, LoadSpec, ModelEntry

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")
"""Packages with which MLX computes on NVIDIA GPUs."""
CUDA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Devices of NVIDIA's driver on Linux, and on Linux under Windows."""
MLX_LIBRARY = "mlx/lib/libmlx.so"
"""The file of MLX's backend, which the packages for GPUs and for CPUs have at the same path."""
TITLES: Mapping[Format, str] = {"mlx": "MLX", "gguf": "GGUF", "echo": "echo"}
"""Names of the formats in messages."""
REQUESTED = "as requested"


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


def choose_format(
    entries: Sequence[ModelEntry], spec: LoadSpec, preferred: PreferredEngine, loaded: ModelEntry | None
) -> ModelEntry | None:
    """Return the entry to load with ``engine_reason``, of those on the disk; None if the required engine runs none.

    Args:
        entries: The formats that the name means or, if an engine is required, all formats of the model.
        loaded: The model in memory. With ``auto``, it stays, unless an option needs another engine.
    """
    if not entries:
        return None
    if spec.engine != "auto":
        found = [entry for entry in entries if entry.format in ENGINES[spec.engine].formats]
        # A path means the first entry, which is the file itself.
        named = [it for it in found if it.source != "path" and (it.id == spec.model or it.has_alias(spec.model))]
        best = by_preference(named or found[:1], preferred)
        return _with_reason(best[0], REQUESTED) if best else None
    if loaded is not None and (llama_cpp_option(spec) is None or loaded.format == preferred.format):
        same = next((entry for entry in entries if entry.path == loaded.path), None)
        if same is not None:
            return replace(same, engine_reason=loaded.engine_reason)
    entry = by_preference(entries, preferred)[0]
    if entry.format == preferred.format and len({each.format for each in entries}) > 1:
        return _with_reason(entry, preferred.reason)
    # The model of the echo engine has no files.
    reason = "" if entry.format == "echo" else f"its only format on disk is {TITLES[entry.format]}"
    return _with_reason(entry, reason)


def _with_reason(entry: ModelEntry, reason: str) -> ModelEntry:
    """Return the entry with the reason for its engine, and what was measured of it if it is a quantized copy."""
    return replace(entry, engine_reason=reason if entry.copy is None else f"{reason}; {entry.copy}")
