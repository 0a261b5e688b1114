"""Measure tokens per second: sweeps over cases, a row for each request, medians with intervals, and stored runs.

::

    from lmx_lab.bench import Sweep, run, summary

    rows = run("http://127.0.0.1:8400", Sweep(prompt_tokens=256, output_tokens=64, concurrency=(1, 4, 8)))
    summary(rows)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmx_lab.bench.case import Case, Closed, Poisson, Sweep
    from lmx_lab.bench.plots import by_concurrency, by_prompt_length
    from lmx_lab.bench.runner import run
    from lmx_lab.bench.sample import RequestSample, frame
    from lmx_lab.bench.storage import load
    from lmx_lab.bench.summaries import compare, summary
    from lmx_lab.bench.targets import ChatTarget, TargetFacts
    from lmx_lab.results.provenance import describe_machine

_MODULES = {
    "bench.case": ("Case", "Closed", "Poisson", "Sweep"),
    "bench.storage": ("load",),
    "bench.plots": ("by_concurrency", "by_prompt_length"),
    "results.provenance": ("describe_machine",),
    "bench.runner": ("run",),
    "bench.sample": ("RequestSample", "frame"),
    "bench.summaries": ("compare", "summary"),
    "bench.targets": ("ChatTarget", "TargetFacts"),
}
_EXPORTS = {name: f"lmx_lab.{module}" for module, names in _MODULES.items() for name in names}
__all__ = [
    "Case",
    "ChatTarget",
    "Closed",
    "Poisson",
    "RequestSample",
    "Sweep",
    "TargetFacts",
    "by_concurrency",
    "by_prompt_length",
    "compare",
    "describe_machine",
    "frame",
    "load",
    "run",
    "summary",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, because pandas and matplotlib take seconds to import.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
