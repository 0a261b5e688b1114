"""Write results as files: as pages that need neither a server nor scripts, and as pictures."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lmx_lab.errors import InvalidRequestError
from lmx_lab.sanitize import escape_text

Formats: TypeAlias = Mapping[str, Callable[[], bytes]]
"""The functions that return the content of a file, by the suffix of the file."""
# With this policy, a page loads and runs nothing, whatever the HTML of a result contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
PAGE_CSS = """\
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 1em; overflow-wrap: anywhere; }
"""


def page(title: str, body: str, css: str = PAGE_CSS, head: str = "") -> str:
    """Return a page. The title is escaped; the styles, the body and additional lines of the head are not."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{head}
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html_text(title)}</title>
<style>
{css}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Displayed:
    """A result that notebooks display as HTML, and that ``save`` writes to a file."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to a file in the format of its suffix, and return its path. ``.html`` is a page that needs
        neither a server nor scripts. Results that are a picture also have ``.svg``, ``.png`` and ``.pdf``.

        Raises:
            InvalidRequestError: there is no such format, or the file cannot be written.
            MissingPackageError: matplotlib is not installed, which draws PNG and PDF files.
        """
        suffix, formats = path_of(path).suffix.lower(), self._formats()
        if suffix not in formats:
            raise InvalidRequestError(
                f"path is {os.fspath(path)!r:.200}; {type(self).__name__} can be saved as {', '.join(formats)}, which "
                "the suffix chooses",
                param="path",
            )
        return write_file(path, formats[suffix]())

    def _formats(self) -> Formats:
        return {".html": lambda: self._page().encode(errors="replace")}

    def _page(self) -> str:
        return page(type(self).__name__, html_of(self))


def html_text(text: object) -> str:
    """Return a text for a page or an ``svg`` element. Control characters and others that XML forbids are escaped."""
    return html.escape(escape_text(str(text)))


def html_of(result: object) -> str:
    """Return any object as HTML: as notebooks display it, a figure of matplotlib as an image, and others as text."""
    shown: Any = result
    figure = next((each for each in (shown, getattr(shown, "figure", None)) if hasattr(each, "savefig")), None)
    if figure is not None:
        content = io.BytesIO()
        figure.savefig(content, format="svg", bbox_inches="tight")
        encoded = base64.b64encode(content.getvalue()).decode()
        return f'<img alt="figure" style="max-width:100%" src="data:image/svg+xml;base64,{encoded}">'
    for name in ("snapshot_html", "_repr_html_"):
        # A class has its methods without an object.
        if hasattr(shown, name) and not isinstance(shown, type) and (text := getattr(shown, name)()) is not None:
            return str(text)
    return f"<pre style='white-space:pre-wrap'>{html_text(shown)}</pre>"


def write_file(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file, and return its path. A leading ``~`` stands for the user's home folder.

    Raises:
        InvalidRequestError: the file cannot be written, for example because its folder does not exist.
    """
    target = path_of(path)
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


def path_of(path: str | os.PathLike[str], what: str = "the file") -> Path:
    """Return a path of a file. A leading ``~`` stands for the user's home folder.

    Raises:
        InvalidRequestError: it is of another type, or no file can have it.
    """
    try:
        target = Path(path).expanduser()
        target.exists()
        os.path.realpath(target)
    except (TypeError, ValueError, RuntimeError, OSError) as exc:
        raise InvalidRequestError(f"{what} {str(path)!r:.300} is not a path of a file: {exc}", param="path") from exc
    return target
