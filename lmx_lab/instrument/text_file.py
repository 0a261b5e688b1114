"""Write the files of trees, lenses, comparisons, timelines and activations."""

from __future__ import annotations

import os
from pathlib import Path

from lmx_lab.errors import InvalidRequestError


def write_text_file(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text to a file, and return its path. See ``write_file`` for errors."""
    return write_file(path, text.encode())


def write_file(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file, and return its path. A leading ``~`` stands for the user's home folder.

    Raises:
        InvalidRequestError: the file cannot be written, for example because its folder does not exist.
    """
    target = Path(path).expanduser()
    try:
        target.write_bytes(content)
    except FileNotFoundError as exc:
        raise InvalidRequestError(
            f"{target} cannot be written: there is no folder {str(target.parent)!r}; create it first", param="path"
        ) from exc
    except OSError as exc:
        raise InvalidRequestError(
            f"{target} cannot be written: {exc.strerror or exc}; use another path", param="path"
        ) from exc
    return target
