"""Which engine decodes faster on this machine: what was measured, and for how long that counts.

The figures lie in the lab's home with the versions and the shape of the machine that they were measured with. When one
of those changes, they are not shown any more.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lmx_lab.engine.container_limits import default_threads
from lmx_lab.engine.llama_cpp.process import PACKAGE, installed
from lmx_lab.errors import UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineName, Format
from lmx_lab.weights.files import open_regular

TITLES: Mapping[EngineName, str] = {"mlx": "MLX", "llama.cpp": "llama.cpp"}
FILES: Mapping[EngineName, str] = {"mlx": "MLX folders", "llama.cpp": "GGUF files"}
MODELS: Mapping[Format, str] = {"mlx": "smollm2-135m", "gguf": "smollm2-135m-gguf"}
"""The starters that are measured: the same weights for either engine."""
FILE = "engine-speeds.json"
FILE_BYTES = 2**16
CLEARLY = 1.2
"""So many times the other's speed is a preference. Two seconds on one machine differ by nearly as much."""
BUSY_PERCENT = 30
"""Of the processors. With more of them in other hands nothing is preferred: llama.cpp's threads wait for each other
and lose far more than their share. On two cores with two busy programs MLX had 8.2 tok/s and llama.cpp 3.5; without
them MLX had 19 and llama.cpp 126."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Decoding one stream of the same model, for about a second on each engine."""

    model: str
    measured_at: float
    """Seconds since 1970."""
    tokens_per_second: Mapping[EngineName, float]
    busy_percent: float
    """Of the processors, what other programs used just before or just after."""
    made_with: Mapping[str, Any]
    """What must be the same for the figures to count; see ``conditions``."""

    @property
    def disturbed(self) -> bool:
        """Whether other programs had too much of the processors for the figures to say anything."""
        return self.busy_percent >= BUSY_PERCENT

    @property
    def preferred(self) -> EngineName | None:
        """None if neither is clearly faster, or nobody can say."""
        slower, faster = sorted(self.tokens_per_second, key=lambda name: self.tokens_per_second[name])
        clear = self.tokens_per_second[faster] >= CLEARLY * self.tokens_per_second[slower]
        return faster if clear and not self.disturbed else None

    def __str__(self) -> str:
        figures = ", ".join(f"{TITLES[name]} {_rounded(rate)} tok/s" for name, rate in self.tokens_per_second.items())
        return f"for {self.model}: {figures}; {self._advice}"

    @property
    def _advice(self) -> str:
        if self.disturbed:
            busy = f"other programs kept {self.busy_percent:.0f} % of the processors busy"
            return f"{busy}, so measure again when they rest: lmx-lab doctor --measure"
        return f"prefer {FILES[self.preferred]}" if self.preferred else "neither is clearly faster"


def _rounded(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def versions() -> dict[EngineName, str | None]:
    """Of what each engine computes with; None where it is not installed."""
    return {"mlx": _version("mlx"), "llama.cpp": _version(PACKAGE) if installed() else None}


def conditions(settings: Settings) -> dict[str, Any]:
    """What the speed of the engines depends on, as far as it can be known without measuring."""
    # Elsewhere than on Linux each engine has its own idea of threads.
    threads = default_threads(os.environ) if sys.platform == "linux" else None
    return {
        "engines": versions(),
        "mlx-lm": _version("mlx-lm"),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": settings.threads or threads,
        "blas": settings.blas,
        "dtype": settings.dtype,
    }


def kept_speeds(settings: Settings) -> Speeds | None:
    """What was measured last, if it still holds. Reads a small file."""
    try:
        with open_regular(settings.home / FILE) as file:
            found = json.loads(file.read(FILE_BYTES))
        speeds = Speeds(
            model=str(found["model"]),
            measured_at=float(found["measured_at"]),
            tokens_per_second={name: float(found["tokens_per_second"][name]) for name in TITLES},
            busy_percent=float(found["busy_percent"]),
            made_with=dict(found["made_with"]),
        )
    except (OSError, ValueError, TypeError, KeyError, UnusableModelError):
        # There is none, or somebody has been at it: then it is measured anew.
        return None
    return speeds if speeds.made_with == conditions(settings) else None


def keep_speeds(settings: Settings, speeds: Speeds) -> Path:
    """Write the figures down; a reader sees the old file or the new one, whole.

    Raises:
        OSError: the home cannot be written.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    target = settings.home / FILE
    with tempfile.NamedTemporaryFile("w", dir=settings.home, prefix=f"{FILE}.", delete=False, encoding="utf-8") as file:
        draft = Path(file.name)
        try:
            json.dump(asdict(speeds), file, indent=2)
            file.flush()
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    return target


def since(at: float) -> str:
    """How long ago that was, in words."""
    seconds = max(0.0, time.time() - at)
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
