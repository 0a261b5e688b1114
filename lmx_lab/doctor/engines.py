"""Check that llama.cpp can be used, and report which engine decodes faster on this machine."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from lmx_lab.doctor import Finding
from lmx_lab.engine.engines import ENGINES
from lmx_lab.engine.find import TITLES
from lmx_lab.engine.llama_cpp.process import PACKAGE
from lmx_lab.engine.measure import measure_speeds
from lmx_lab.engine.speeds import MEASURED, STARTER, age_in_words, preferred_engine, read_speeds, store_speeds, versions
from lmx_lab.errors import LabError
from lmx_lab.extras import installed_version
from lmx_lab.settings import Settings
from lmx_lab.values.models import by_model
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.facts import read_gguf

IMPORT_TIMEOUT_S = 60.0
MISSING_LIBRARY = re.compile(r"([\w.+-]+\.so[.\d]*): cannot open shared object file")
"""The dynamic linker's message about a library that llama.cpp's bindings need and this system does not have."""
MEASURE = "lmx-lab doctor --measure"
SLOW_TYPES = ("Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32")
"""Types of weights that llama.cpp computes more slowly than Q8_0 on a CPU."""


def check_engines(settings: Settings, *, measure: bool = False) -> Iterator[Finding]:
    """Check the bindings of llama.cpp, then report the speed of both engines.

    Args:
        measure: Measure the speeds now instead of reading the last measurement.
    """
    if (missing := ENGINES["llama.cpp"].problem()) is not None:
        yield Finding(topic="llama.cpp", verdict="note" if installed_version(PACKAGE) is None else "bad", found=missing)
        return
    # Import it in a child process, because the import may crash.
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import {PACKAGE}"],
            capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S,
        )  # fmt: skip
        failure = describe_import_failure(done.returncode, done.stderr)
    except subprocess.TimeoutExpired:
        failure = f"importing {PACKAGE} did not finish within {IMPORT_TIMEOUT_S:g} s"
    version = str(versions()["llama.cpp"])
    if failure is not None:
        yield Finding(
            topic="llama.cpp",
            verdict="bad",
            found=f"{version} is installed, but cannot be imported: {failure}",
            means="GGUF files cannot be loaded",
        )
        return
    yield Finding(topic="llama.cpp", verdict="fine", found=version)
    # Which engine decodes faster, from the last measurement or from a new one.
    speeds = None if measure else read_speeds(settings)
    if speeds is None:
        entries = {
            entry.format: entry for entry in Catalog(settings).scan() if entry.id == STARTER and entry.copy is None
        }
        if absent := [format_ for format_ in MEASURED.values() if format_ not in entries]:
            # The conversion for MLX also keeps the file that is converted.
            pull = f"lmx-lab pull {STARTER} --mlx" if "mlx" in absent else f"lmx-lab pull {STARTER}-gguf"
            formats = " and ".join(TITLES[format_] for format_ in absent)
            yield _unmeasured(f"it needs {STARTER} in the format {formats}", remedy=f"{pull} && {MEASURE}")
            return
        if not measure:
            yield _unmeasured("it has not been measured", remedy=f"{MEASURE} (about ten seconds)")
            return
        try:
            speeds = measure_speeds(settings, {engine: entries[format_] for engine, format_ in MEASURED.items()})
        except LabError as exc:
            yield _unmeasured(str(exc))
            return
        with contextlib.suppress(OSError):  # The check of the disk reports a folder that is not writable.
            store_speeds(settings, speeds)
    found = f"on this machine, {speeds} (measured {age_in_words(speeds.measured_at)}"
    if speeds.disturbed:
        yield Finding(topic="engines", verdict="note", found=f"{found})")
    else:
        yield Finding(topic="engines", verdict="fine", found=f"{found}; to measure again: {MEASURE})")


def check_copies(settings: Settings, *, only: str | None = None) -> Iterator[Finding]:
    """Report the quantized copies, and for which models a copy may be faster on this machine.

    Args:
        only: The id of the only model to report on; by default all models.
    """
    if preferred_engine(read_speeds(settings)).name != "llama.cpp":
        return
    models = by_model(entry for entry in Catalog(settings).scan() if (entry.format, entry.kind) == ("gguf", "chat"))
    for name, entries in models.items():
        if only not in (None, name):
            continue
        copies = [entry.copy for entry in entries if entry.copy is not None]
        for copy in copies:
            yield Finding(topic="quantized", verdict="fine", found=copy.describe(name))
        if not copies and (slow := read_gguf(entries[0].path).main_type) in SLOW_TYPES:
            yield Finding(
                topic="quantized",
                verdict="note",
                found=f"{name} has weights of type {slow}, for which llama.cpp has no fast kernels",
                means="a quantized copy, which is loaded instead of it, may answer faster",
                remedy=f"lmx-lab quantize {name}",
            )


def describe_import_failure(status: int, stderr: str) -> str | None:
    """Describe why importing the bindings failed and what to do about it. ``None`` if it succeeded.

    Args:
        status: The exit status of the child process; negative if a signal ended it.
        stderr: Its standard error.
    """
    if status == 0:
        return None
    if missing := MISSING_LIBRARY.search(stderr):
        library = missing[1]
        return f"the system library {library} is missing; on Debian or Ubuntu: apt-get install libgomp1 libstdc++6"
    if status < 0:
        name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
        processor = "; its wheel was built for newer processors" if -status == signal.SIGILL else ""
        return f"the import was ended by {name}{processor}; MLX models still work"
    return (stderr.strip().splitlines() or [f"the import ended with exit status {status}"])[-1]


def _unmeasured(reason: str, *, remedy: str = "") -> Finding:
    found = f"the faster engine on this machine is not known: {reason}"
    return Finding(topic="engines", verdict="note", found=found, remedy=remedy)
