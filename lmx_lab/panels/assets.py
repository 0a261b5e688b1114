"""Combine the panels' JavaScript and CSS, which are plain files in this folder, without a bundler.

Every widget instance contains its code, which is also stored in saved notebooks. Therefore the code is minified: ``make
panels`` writes ``built/`` from the files beside it, and a test fails if a file there is out of date.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_CSS_SPACE = re.compile(r"/\*[\s\S]*?\*/|^[ \t]+|\n(?=\n)", re.MULTILINE)


@cache
def script(*names: str) -> str:
    """Return one ES module: vendored files (in a folder of their own) unchanged, then the file in ``built/`` with the
    name of the last file, which contains all other files, minified.

    A new panel has no file in ``built/`` before ``make panels``, which imports its class; its files are not minified.
    """
    vendored = [source(name) for name in names if "/" in name]
    built = f"built/{names[-1]}"
    return "\n".join([*vendored, source(built) if (FOLDER / built).exists() else join_own_files(*names)])


@cache
def styles(*names: str) -> str:
    """Return one style sheet with the content of several files, without comments."""
    return _CSS_SPACE.sub("", "\n".join(source(name) for name in names)).strip()


def source(name: str) -> str:
    """Return the content of a file in this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def join_own_files(*names: str) -> str:
    """Return the content of the files that are not vendored, as one module that is not minified."""
    return "\n".join(source(name) for name in names if "/" not in name)
