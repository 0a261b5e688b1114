"""Minify the code of the panels and of the server's pages. ``make panels`` writes ``built/`` and ``server/built/``.

Needs ``tdewolff-minify``, a development dependency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import minify

from lmx_lab.panels.layout import PANELS
from lmx_lab.panels.panel import FOLDER, join_own_files, styles

PAGES_FOLDER = FOLDER.parent / "server" / "built"
SOURCES = FOLDER.parent / "server" / "pages"
SHARED_SCRIPTS = ("elements.js", "markdown.js", "message.js")
"""Scripts of the panels that all pages use."""
PAGE_SCRIPTS: Mapping[str, Sequence[str]] = {
    "page": ("page_stream.js", "page_store.js", "page_file.js", "page.js"),
    "routes": ("page_stream.js", "routes.js"),
}
"""The other scripts of each page."""


def minify_module(*names: str, pages: Sequence[str] = ()) -> str:
    """Return a module from these files, without comments and whitespace, and with short local names.

    Args:
        pages: Further files, of the server's pages.
    """
    own = [(SOURCES / name).read_text(encoding="utf-8") for name in pages]
    small: str = minify.string("application/javascript", "\n".join([join_own_files(*names), *own]))
    return small.rstrip() + "\n"


def page_files() -> dict[str, str]:
    """Return the files of the server's pages, which share code with the chat panel, by their names."""
    files = {}
    for name, scripts in PAGE_SCRIPTS.items():
        own = [(SOURCES / style).read_text(encoding="utf-8") for style in ("document.css", f"{name}.css")]
        style: str = minify.string("text/css", "\n".join([styles("panel.css", "message.css"), *own]))
        files[f"{name}.js"] = minify_module(*SHARED_SCRIPTS, pages=scripts)
        files[f"{name}.css"] = style.strip() + "\n"
    return files


def main() -> None:
    for panel in PANELS.values():
        target = FOLDER / "built" / panel.SCRIPTS[-1]
        target.write_text(minify_module(*panel.SCRIPTS), encoding="utf-8")
        print(target.name, target.stat().st_size)
    for name, text in page_files().items():
        (PAGES_FOLDER / name).write_text(text, encoding="utf-8")
        print(name, len(text.encode()))


if __name__ == "__main__":
    main()
