"""Check this Python, the installed packages and the disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

from lmx_lab.doctor import Finding
from lmx_lab.extras import install_command, installed_version
from lmx_lab.settings import Settings
from lmx_lab.weights.starters import STARTERS
from lmx_lab.weights.store import existing_parent

PACKAGES = ("lmx-lab", "mlx", "mlx-lm", "transformers", "huggingface_hub", "fastapi", "uvicorn")
OPTIONAL_PACKAGES = ("jupyterlab", "openai")
PYTHON_CLASSIFIER = "Programming Language :: Python :: 3."


def check_packages(_: Settings) -> Iterator[Finding]:
    """Check the version of Python, and report the versions of the packages."""
    yield check_python(sys.version_info[:3])
    for name in PACKAGES:
        yield Finding(topic=name, verdict="fine", found=metadata.version(name))
    for name in OPTIONAL_PACKAGES:
        if (found := installed_version(name)) is not None:
            yield Finding(topic=name, verdict="fine", found=found)
        else:
            yield Finding(topic=name, verdict="note", found="not installed", remedy=install_command(name))


def check_python(version: tuple[int, int, int]) -> Finding:
    """Check that this version of Python is one of those in the classifiers of this package."""
    classifiers = metadata.metadata("lmx-lab").get_all("Classifier", [])
    minors = [line.removeprefix(PYTHON_CLASSIFIER) for line in classifiers if line.startswith(PYTHON_CLASSIFIER)]
    tested = sorted(int(minor) for minor in minors if re.fullmatch(r"\d+", minor))
    found = f"{'.'.join(map(str, version))}, {platform.platform()}, {sys.executable}"
    if not tested or (3, tested[0]) <= version[:2] <= (3, tested[-1]):
        return Finding(topic="python", verdict="fine", found=found)
    return Finding(
        topic="python",
        verdict="note" if version[:2] > (3, tested[-1]) else "bad",
        found=found,
        means=f"lmx-lab is tested with Python 3.{tested[0]} to 3.{tested[-1]}",
        remedy=f"install it with one of these versions: python3.{tested[-1]} -m venv .venv",
    )


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Check that the home folder is writable, and that its disk has enough free space."""
    folder = existing_parent(settings.home)
    free = shutil.disk_usage(folder).free
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield Finding(
            topic="home",
            verdict="bad",
            found=f"{settings.home} is not writable",
            means="models cannot be downloaded, and the daemon cannot start",
            remedy="export LMX_LAB_HOME=FOLDER",
        )
        return
    found = f"{free / 1e9:.1f} GB free for {settings.home}"
    starter = STARTERS["smollm2-135m"].needed_bytes + settings.disk_reserve_bytes
    if free >= max(2 * 10**9, starter):
        yield Finding(topic="disk", verdict="fine", found=found)
        return
    means = "few models fit on this disk"
    if free < starter:
        means = (
            f"not even the smallest starter model can be downloaded, which needs {starter / 1e9:.1f} GB of free space"
        )
    yield Finding(
        topic="disk", verdict="bad", found=found, means=means, remedy="free disk space, or export LMX_LAB_HOME=FOLDER"
    )
