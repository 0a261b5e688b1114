"""Minify the panels' code: ``make panels`` writes ``built/``. Needs ``tdewolff-minify``, a development dependency."""

from __future__ import annotations

import minify

from lmx_lab.panels import assets
from lmx_lab.panels.layout import PANELS


def minify_module(*names: str) -> str:
    """Return a panel's module from these files, without comments and whitespace, and with short local names."""
    small: str = minify.string("application/javascript", assets.join_own_files(*names))
    return small.rstrip() + "\n"


def main() -> None:
    for panel in PANELS.values():
        target = assets.FOLDER / "built" / panel.SCRIPTS[-1]
        target.write_text(minify_module(*panel.SCRIPTS), encoding="utf-8")
        print(target.name, target.stat().st_size)


if __name__ == "__main__":
    main()
