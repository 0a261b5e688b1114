"""Whether llama.cpp can be used, and which engine decodes faster here."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from lmx_lab.doctor.finding import Finding
from lmx_lab.errors import LabError
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog

IMPORT_LIMIT_S = 60.0
LIBRARY = re.compile(r"([\w.+-]+\.so[.\d]*): cannot open shared object file")
"""One that the bindings of llama.cpp are linked with and that this system lacks."""
MEASURE = "lmx-lab doctor --measure"


def examine_engines(settings: Settings, *, measure: bool = False) -> Iterator[Finding]:
    """
    Args:
        measure: As of ``examine``.
    """
    from lmx_lab.engine.registry import ENGINES
    from lmx_lab.engine.speeds import versions

    if (missing := ENGINES["llama.cpp"].problem()) is not None:
        yield Finding(topic="llama.cpp", verdict="note", found=missing)
        return
    failure = _import_failure()
    found = str(versions()["llama.cpp"])
    if failure is not None:
        found = f"{found} is installed, but does not start: {failure}"
        yield Finding(topic="llama.cpp", verdict="bad", found=found, means="GGUF files cannot be loaded")
        return
    yield Finding(topic="llama.cpp", verdict="fine", found=found)
    yield _speeds(settings, measure=measure)


def _import_failure() -> str | None:
    """What happens when the bindings of llama.cpp are imported, in a process that may die of it."""
    from lmx_lab.engine.llama_cpp.process import PACKAGE

    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import {PACKAGE}"],
            capture_output=True, text=True, check=False, timeout=IMPORT_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"importing {PACKAGE} takes more than {IMPORT_LIMIT_S:g} s"
    return import_failure(done.returncode, done.stderr)


def import_failure(code: int, said: str) -> str | None:
    """What a process that imports the bindings of llama.cpp has died of, and what to do; None if it has not.

    Args:
        code: Its exit code; negative if a signal ended it.
        said: Its standard error.
    """
    if code == 0:
        return None
    if missing := LIBRARY.search(said):
        return f"the system has no {missing[1]}; on Debian or Ubuntu: apt-get install libgomp1 libstdc++6"
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        processor = "; its wheel was made for newer processors" if -code == signal.SIGILL else ""
        return f"it is ended by {name}{processor}; MLX models run all the same"
    return (said.strip().splitlines() or [f"it ends with {code}"])[-1]


def _speeds(settings: Settings, *, measure: bool) -> Finding:
    """Which engine decodes faster here: as it was measured before, or is now."""
    from lmx_lab.engine.measure import measure_speeds
    from lmx_lab.engine.speeds import STARTERS, keep_speeds, kept_speeds, since

    speeds = None if measure else kept_speeds(settings)
    if speeds is None:
        here = {entry.id: entry for entry in Catalog(settings).scan()}
        missing = [name for name in STARTERS.values() if name not in here]
        pull = "".join(f"lmx-lab pull {name} && " for name in missing)
        unknown = "which is faster here is not measured"
        if missing:
            lacking = f"{unknown}, for lack of {' and '.join(missing)}"
            return Finding(topic="engines", verdict="note", found=lacking, remedy=f"{pull}{MEASURE}")
        if not measure:
            return Finding(
                topic="engines", verdict="note", found=f"{unknown} yet", remedy=f"{MEASURE} (some ten seconds)"
            )
        try:
            speeds = measure_speeds(settings, {engine: here[name] for engine, name in STARTERS.items()})
        except LabError as exc:
            failed = f"which is faster here could not be measured: {exc}"
            return Finding(topic="engines", verdict="note", found=failed)
        with contextlib.suppress(OSError):  # "home" says that nothing can be written there
            keep_speeds(settings, speeds)
    found = f"on this machine, {speeds} (measured {since(speeds.measured_at)}"
    if speeds.disturbed:
        return Finding(topic="engines", verdict="note", found=f"{found})")
    return Finding(topic="engines", verdict="fine", found=f"{found}; {MEASURE} does so anew)")
