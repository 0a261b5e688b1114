"""Minify the code of the panels and of the server's pages. ``make panels`` writes ``built/`` and ``server/built/``.

Needs ``tdewolff-minify``, a development dependency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import minify

from lmx_lab.panels import assets
from lmx_lab.panels.layout import PANELS

PAGES_FOLDER = assets.FOLDER.parent / "server" / "built"
SHARED_SCRIPTS = ("elements.js", "keyed.js", "markdown.js", "message.js", "page_stream.js")
PAGE_SCRIPTS: Mapping[str, Sequence[str]] = {
    "page": ("page_store.js", "page_file.js", "page.js"),
    "routes": ("routes.js",),
}
"""The scripts of each page, in addition to those that all pages share."""
SHARED_STYLES = ("panel.css", "message.css", "document.css")


def minify_module(*names: str) -> str:
    """Return a panel's module from these files, without comments and whitespace, and with short local names."""
    small: str = minify.string("application/javascript", assets.join_own_files(*names))
    return small.rstrip() + "\n"


def page_files() -> dict[str, str]:
    """Return the files of the server's pages, which share code with the chat panel, by their names."""
    files = {}
    for name, scripts in PAGE_SCRIPTS.items():
        style: str = minify.string("text/css", assets.styles(*SHARED_STYLES, f"{name}.css"))
        files[f"{name}.js"] = minify_module(*SHARED_SCRIPTS, *scripts)
        files[f"{name}.css"] = style.strip() + "\n"
    return files


def main() -> None:
    for panel in PANELS.values():
        target = assets.FOLDER / "built" / panel.SCRIPTS[-1]
        target.write_text(minify_module(*panel.SCRIPTS), encoding="utf-8")
        print(target.name, target.stat().st_size)
    for name, text in page_files().items():
        (PAGES_FOLDER / name).write_text(text, encoding="utf-8")
        print(name, len(text.encode()))


if __name__ == "__main__":
    main()
