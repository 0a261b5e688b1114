"""Minify the code of the panels and of the chat page. ``make panels`` writes ``built/`` and ``server/chat_page/``.

Needs ``tdewolff-minify``, a development dependency.
"""

from __future__ import annotations

import minify

from lmx_lab.panels import assets
from lmx_lab.panels.layout import PANELS

CHAT_PAGE = assets.FOLDER.parent / "server" / "chat_page"
PAGE_SCRIPTS = (
    *("elements.js", "keyed.js", "markdown.js", "message.js"),
    *("page_stream.js", "page_store.js", "page_file.js", "page.js"),
)
PAGE_STYLES = ("panel.css", "message.css", "page.css")


def minify_module(*names: str) -> str:
    """Return a panel's module from these files, without comments and whitespace, and with short local names."""
    small: str = minify.string("application/javascript", assets.join_own_files(*names))
    return small.rstrip() + "\n"


def chat_page_files() -> dict[str, str]:
    """Return the files of the server's chat page, which shares code with the chat panel, by their names."""
    style: str = minify.string("text/css", assets.styles(*PAGE_STYLES))
    return {"page.js": minify_module(*PAGE_SCRIPTS), "page.css": style.strip() + "\n"}


def main() -> None:
    for panel in PANELS.values():
        target = assets.FOLDER / "built" / panel.SCRIPTS[-1]
        target.write_text(minify_module(*panel.SCRIPTS), encoding="utf-8")
        print(target.name, target.stat().st_size)
    for name, text in chat_page_files().items():
        (CHAT_PAGE / name).write_text(text, encoding="utf-8")
        print(name, len(text.encode()))


if __name__ == "__main__":
    main()
