"""The panels' JavaScript and CSS: plain files of this folder, put together without a bundler.

Every widget instance carries its code, which is also stored in saved notebooks, so the code is minified: ``make
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
    """Return one ES module: vendored files (in a folder of their own) unchanged, then the minified module in ``built/``
    of the last file, which includes the other files.

    A new panel has no file in ``built/`` before ``make panels``, which imports its class; its files are not minified.
    """
    vendored = [source(name) for name in names if "/" in name]
    built = f"built/{names[-1]}"
    return "\n".join([*vendored, source(built) if (FOLDER / built).exists() else own(*names)])


@cache
def styles(*names: str) -> str:
    """Return one style sheet of several files, without comments."""
    return _CSS_SPACE.sub("", "\n".join(source(name) for name in names)).strip()


def source(name: str) -> str:
    """Return a file of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def own(*names: str) -> str:
    """Return the files that are not vendored as one module, before minification."""
    return "\n".join(source(name) for name in names if "/" not in name)
