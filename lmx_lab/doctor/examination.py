"""All that is looked at, in order."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil

from lmx_lab.doctor.daemon_files import examine_daemon_files
from lmx_lab.doctor.engines import examine_engines
from lmx_lab.doctor.finding import Finding
from lmx_lab.doctor.jupyter import examine_kernel, examine_proxy
from lmx_lab.doctor.machine import examine_blas, examine_device, examine_disk, examine_memory, examine_packages
from lmx_lab.doctor.ports import examine_labs, examine_port
from lmx_lab.doctor.sources import examine_hub, examine_models
from lmx_lab.errors import LabError
from lmx_lab.settings import Settings

Look = Callable[[Settings], Iterator[Finding]]
LOOKS: dict[str, Look] = {
    "packages": examine_packages,
    "kernel": examine_kernel,
    "proxy": examine_proxy,
    "device": examine_device,
    "memory": examine_memory,
    "blas": examine_blas,
    "disk": examine_disk,
    "models": examine_models,
    "hub": examine_hub,
    "port": examine_port,
    "labs": examine_labs,
    "daemon": examine_daemon_files,
}
WAITING = ("kernel", "proxy", "hub", "port", "labs")
"""Those that mostly wait for others, each for three seconds at most: they do so at the same time."""


def examine(settings: Settings, *, measure: bool = False) -> list[Finding]:
    """Look at everything, in a few seconds; a part that fails is itself a finding.

    Args:
        measure: Decode with both engines, too, to say which is the faster one. It takes some ten seconds.
    """
    looks: dict[str, Look] = {**LOOKS, "engines": functools.partial(examine_engines, measure=measure)}
    with ThreadPoolExecutor(len(WAITING), thread_name_prefix="lmx-lab-doctor") as pool:
        waiting = {topic: pool.submit(_findings, topic, looks[topic], settings) for topic in WAITING}
        found = {topic: _findings(topic, look, settings) for topic, look in looks.items() if topic not in waiting}
        found |= {topic: future.result() for topic, future in waiting.items()}
    return [finding for topic in looks for finding in found[topic]]


def _findings(topic: str, look: Look, settings: Settings) -> list[Finding]:
    findings: list[Finding] = []
    try:
        findings += look(settings)
    except (LabError, OSError, ImportError, RuntimeError, psutil.Error, subprocess.SubprocessError) as exc:
        findings.append(Finding(topic=topic, verdict="bad", found=str(exc)))
    return findings
