"""Run the checks of ``lmx-lab doctor``. Each finding states what was observed, what it means and how to fix it."""

from __future__ import annotations

import functools
import pkgutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import psutil

from lmx_lab.errors import LabError
from lmx_lab.settings import Settings

Verdict = Literal["fine", "note", "bad"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line that ``lmx-lab doctor`` prints."""

    topic: str
    """Name of the check, for example ``port``."""
    verdict: Verdict
    """``note``: it works, but slower than possible or not in every environment. ``bad``: something is broken."""
    found: str
    """The observation of the check."""
    means: str = ""
    """The consequence for the user. Empty if there is none."""
    remedy: str = ""
    """The command or the step that fixes it. Empty if there is nothing to fix."""

    @property
    def text(self) -> str:
        """All parts in one line, without the topic."""
        parts = (self.found, self.means, f"fix: {self.remedy}" if self.remedy else "")
        return "; ".join(part for part in parts if part)


Check = Callable[..., Iterable[Finding]]
"""A function that takes the settings and yields findings."""
ERRORS = (LabError, OSError, ImportError, RuntimeError, psutil.Error, subprocess.SubprocessError)
"""Exceptions of a check that become a finding."""
# Named instead of imported: where a package is broken, the failed import is one finding among the others.
CHECKS = {
    "packages": "lmx_lab.doctor.machine:check_packages",
    "kernel": "lmx_lab.doctor.jupyter:check_kernel",
    "proxy": "lmx_lab.doctor.jupyter:check_proxy",
    "device": "lmx_lab.doctor.compute:check_device",
    "memory": "lmx_lab.doctor.compute:check_memory",
    "blas": "lmx_lab.doctor.compute:check_blas",
    "disk": "lmx_lab.doctor.machine:check_disk",
    "models": "lmx_lab.doctor.models:check_models",
    "hub": "lmx_lab.doctor.models:check_hub",
    "port": "lmx_lab.doctor.ports:check_port",
    "labs": "lmx_lab.doctor.ports:check_labs",
    "daemon": "lmx_lab.doctor.daemon_files:check_daemon_files",
    "engines": "lmx_lab.doctor.engines:check_engines",
    "quantized": "lmx_lab.doctor.engines:check_copies",
}
"""The function of each check."""
WAITING = ("kernel", "proxy", "hub", "port", "labs")
"""Checks that mostly wait for other programs, at most three seconds each. They run at the same time."""


def run_checks(settings: Settings, *, measure: bool = False, names: Mapping[str, str] = CHECKS) -> list[Finding]:
    """Run all checks, which takes a few seconds, and return their findings in the order of ``names``.

    A check that fails with an error yields a finding with that error.

    Args:
        measure: Also decode with both engines to find the faster one, which takes about ten seconds.
        names: The function of each check.
    """
    # All checks are imported here, in one thread, because packages whose modules import each other can fail when two
    # threads import them.
    checks: dict[str, Check] = {}
    for topic, name in names.items():
        try:
            checks[topic] = pkgutil.resolve_name(name)
        except ERRORS as exc:
            failed = Finding(topic=topic, verdict="bad", found=str(exc))
            checks[topic] = lambda *_, failed=failed, **__: [failed]
    checks["engines"] = functools.partial(checks["engines"], measure=measure)
    with ThreadPoolExecutor(len(WAITING), thread_name_prefix="lmx-lab-doctor") as pool:
        waiting = {topic: pool.submit(_run_check, topic, checks[topic], settings) for topic in WAITING}
        found = {topic: _run_check(topic, check, settings) for topic, check in checks.items() if topic not in WAITING}
        found |= {topic: future.result() for topic, future in waiting.items()}
    return [finding for topic in names for finding in found[topic]]


def _run_check(topic: str, check: Check, settings: Settings) -> list[Finding]:
    findings: list[Finding] = []
    try:
        findings += check(settings)
    except ERRORS as exc:
        findings.append(Finding(topic=topic, verdict="bad", found=str(exc)))
    return findings
