"""Measure the decoding speed of each engine in a separate process.

No model stays in memory afterwards, and a notebook that measures remains responsive. Other modules call
``measure_speeds``, which starts this module as that process.
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

import psutil

from lmx_lab.engine import memory
from lmx_lab.engine.manager import ModelManager
from lmx_lab.engine.requests import GenerationRequest, Sampling, TextPrompt
from lmx_lab.engine.speeds import Speeds, conditions
from lmx_lab.errors import EngineError, LabError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineName, LoadSpec, ModelEntry
from lmx_lab.values.outputs import GenerationReport

NEEDED_BYTES = 1_500_000_000
"""Free memory that measuring needs: twice what MLX uses for SmolLM2 in float32, the largest case (measured, 0.8 GB)."""
LIMIT_S = 300.0
RUN_S = 1.0
"""Intended duration of the measured run."""
MIN_RUN_S = 0.7
"""Shortest duration of a run that is accepted as the measurement."""
WARM_UP_TOKENS = 8
CPU_INTERVAL_S = 0.5
USED_SETTINGS = ("threads", "blas", "dtype", "memory_limit_bytes")
"""Settings that affect the speed or the load."""
TEXT = "The lighthouse keeper wrote down everything that happened on the coast that year, beginning with"


def measure_speeds(settings: Settings, models: Mapping[EngineName, ModelEntry]) -> Speeds:
    """Decode with each engine for about a second, one after the other, and return the speeds. Takes about ten seconds
    and uses all cores.

    Args:
        models: The same model for each engine.

    Raises:
        OutOfMemoryError: too little memory is free.
        EngineError: a model could not be loaded, or its engine died; the message has the reason.
    """
    free = memory.free_bytes()
    if free < NEEDED_BYTES:
        needed = f"{NEEDED_BYTES / 1e9:.1f} GB"
        raise OutOfMemoryError(f"{free / 1e9:.1f} GB of memory are free, and measuring needs {needed}; unload a model")
    parameters = {
        "settings": {name: getattr(settings, name) for name in USED_SETTINGS},
        "home": str(settings.home),
        "models": {engine: str(entry.path) for engine, entry in models.items()},
    }
    made_with = conditions(settings)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "lmx_lab.engine.measure"],
            input=json.dumps(parameters), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise EngineError(
            f"the engines were not measured within {LIMIT_S:g} s; try again when other programs use the machine less"
        ) from exc
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        errors = done.stderr.strip().splitlines()
        raise EngineError(errors[-1] if errors else f"the process that measures ended with status {done.returncode}")
    result = json.loads(lines[-1])
    return Speeds(
        model=next(iter(models.values())).id,
        measured_at=time.time(),
        tokens_per_second=result["rates"],
        busy_percent=result["busy_percent"],
        made_with=made_with,
    )


def main() -> None:
    """Measure the models that standard input names, and print the result as a line of JSON."""
    parameters = json.load(sys.stdin)
    settings = Settings(home=Path(parameters["home"]), slots=1, **parameters["settings"])
    before = psutil.cpu_percent(CPU_INTERVAL_S)
    try:
        rates = asyncio.run(_measure(settings, parameters["models"]))
    except LabError as exc:
        sys.exit(exc.message)
    busy_percent = max(before, psutil.cpu_percent(CPU_INTERVAL_S))
    print(json.dumps({"rates": rates, "busy_percent": busy_percent}), flush=True)


async def _measure(settings: Settings, models: Mapping[EngineName, str]) -> dict[EngineName, float]:
    """Return the tokens per second of each engine, in a run of about ``RUN_S``. Earlier runs warm up and estimate its
    length.
    """
    rates: dict[EngineName, float] = {}
    async with ModelManager(settings) as manager:
        for engine, path in models.items():
            await manager.load(LoadSpec(model=path))
            await _decode(manager, WARM_UP_TOKENS)
            tokens = WARM_UP_TOKENS
            for _ in range(4):
                report = await _decode(manager, tokens)
                rates[engine] = report.tokens_per_second
                # A run is shorter if it fills the context first.
                if report.decode_s >= MIN_RUN_S or report.output_tokens < tokens:
                    break
                tokens = max(tokens, math.ceil(report.tokens_per_second * RUN_S))
    return rates


async def _decode(manager: ModelManager, tokens: int) -> GenerationReport:
    request = GenerationRequest(
        prompt=TextPrompt(text=TEXT), sampling=Sampling(temperature=0), max_tokens=tokens, ignore_eos=True
    )
    async with await manager.submit(request) as stream:
        async for _ in stream:
            pass
    assert stream.report is not None
    return stream.report


if __name__ == "__main__":
    main()
