"""The panels' JavaScript and CSS as widgets carry them: plain files of this folder, put together without a bundler.

Every widget instance carries its code, into the saved notebook too, so it is made small: ``make panels`` writes
``built/`` from the files beside it, and a test fails where that was forgotten.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_CSS_SPACE = re.compile(r"/\*[\s\S]*?\*/|^[ \t]+|\n(?=\n)", re.MULTILINE)


@cache
def script(*names: str) -> str:
    """One ES module of several files, in this order: what is vendored (in a folder of its own) as it is, then the last
    one's module in ``built/``, which has the others in it.
    """
    vendored = [source(name) for name in names if "/" in name]
    return "\n".join([*vendored, source(f"built/{names[-1]}")])


@cache
def styles(*names: str) -> str:
    """One style sheet from several files, without comments."""
    return _CSS_SPACE.sub("", "\n".join(source(name) for name in names)).strip()


def source(name: str) -> str:
    """A file of this folder as it is."""
    return (FOLDER / name).read_text(encoding="utf-8")


def own(*names: str) -> str:
    """What ``built/`` has small: the panel's own files as one module."""
    return "\n".join(source(name) for name in names if "/" not in name)
