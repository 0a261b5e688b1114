"""A measured second of each engine, in a process of its own: no model stays in memory, and no notebook stands still.

``measure_speeds`` is for everyone; run as a module this is that process.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from lmx_lab.engine import machine_memory
from lmx_lab.engine.manager import Engine
from lmx_lab.engine.registry import ENGINES
from lmx_lab.engine.requests import GenerationRequest, Sampling, TextPrompt
from lmx_lab.engine.speeds import Speeds, conditions
from lmx_lab.errors import EngineError, LabError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.generation import GenerationReport
from lmx_lab.values.models import Format, ModelEntry
from lmx_lab.weights import Catalog

NEEDED_BYTES = 1_500_000_000
"""Free memory: twice what MLX takes for SmolLM2 in float32, which is the larger of the two (measured, 0.8 GB)."""
LIMIT_S = 300.0
SECOND_S = 1.0
ENOUGH_S = 0.7
"""Of a run that was meant to last a second."""
WARM_TOKENS = 8
RUNS = 4
LOOK_S = 0.5
TAKEN = ("threads", "blas", "dtype", "memory_limit_bytes")
"""Of the settings, what the speed or the load depends on."""
TEXT = "The lighthouse keeper wrote down everything that happened on the coast that year, beginning with"


def measure_speeds(settings: Settings, models: Mapping[Format, ModelEntry]) -> Speeds:
    """Decode with each engine for about a second, one after the other. Takes some ten seconds, and all cores.

    Args:
        models: The same model for either engine.

    Raises:
        OutOfMemoryError: too little memory is free to try.
        EngineError: a model could not be loaded, or its engine died of it; the message says of what.
    """
    free = machine_memory.free_bytes()
    if free < NEEDED_BYTES:
        needed = f"{NEEDED_BYTES / 1e9:.1f} GB"
        raise OutOfMemoryError(f"{free / 1e9:.1f} GB of memory are free and measuring takes {needed}; unload a model")
    order = {
        "settings": {name: getattr(settings, name) for name in TAKEN},
        "home": str(settings.home),
        "models": {format: str(entry.path) for format, entry in models.items()},
    }
    made_with = conditions(settings)
    found = _asked(order)
    return Speeds(
        model=models["mlx"].id,
        measured_at=time.time(),
        tokens_per_second={ENGINES[format].name: rate for format, rate in found["rates"].items()},
        busy_percent=found["busy_percent"],
        made_with=made_with,
    )


def _asked(order: Mapping[str, Any]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "lmx_lab.engine.measure"],
            input=json.dumps(order), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise EngineError(
            f"the engines were not measured within {LIMIT_S:g} s; try again on a quieter machine"
        ) from exc
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    said = done.stderr.strip().splitlines()
    raise EngineError(said[-1] if said else f"the process that measures ended with {done.returncode}")


def main() -> None:
    order = json.load(sys.stdin)
    settings = Settings(home=Path(order["home"]), slots=1, **order["settings"])
    before = psutil.cpu_percent(LOOK_S)
    try:
        rates = asyncio.run(_rates(settings, order["models"]))
    except LabError as exc:
        sys.exit(exc.message)
    busy_percent = max(before, psutil.cpu_percent(LOOK_S))
    print(json.dumps({"rates": rates, "busy_percent": busy_percent}), flush=True)


async def _rates(settings: Settings, models: Mapping[Format, str]) -> dict[Format, float]:
    catalog = Catalog(settings)
    rates: dict[Format, float] = {}
    async with Engine(settings) as engine:
        for format in models:
            await engine.load(catalog.resolve(models[format]))
            rates[format] = await _rate(engine)
    return rates


async def _rate(engine: Engine) -> float:
    """Tokens per second of a run that lasts about a second; the runs before it warm up and say how long that is."""
    await _run(engine, WARM_TOKENS)
    tokens, rate = WARM_TOKENS, 0.0
    for _ in range(RUNS):
        report = await _run(engine, tokens)
        rate = report.tokens_per_second
        # Shorter where the context is full before the second is over.
        if report.decode_s >= ENOUGH_S or report.output_tokens < tokens:
            break
        tokens = max(tokens, math.ceil(rate * SECOND_S))
    return rate


async def _run(engine: Engine, tokens: int) -> GenerationReport:
    asked = GenerationRequest(
        prompt=TextPrompt(text=TEXT), sampling=Sampling(temperature=0), max_tokens=tokens, ignore_eos=True
    )
    async with await engine.submit(asked) as stream:
        async for _ in stream:
            pass
    assert stream.report is not None
    return stream.report


if __name__ == "__main__":
    main()
