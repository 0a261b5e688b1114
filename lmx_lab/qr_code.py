"""Draw the QR code of an address, for phones. Requires segno, which is optional (extra ``lan``)."""

from __future__ import annotations

import functools
from typing import Any

from lmx_lab.errors import MissingPackageError
from lmx_lab.extras import import_optional

BLOCKS = {(True, True): "█", (True, False): "▀", (False, True): "▄", (False, False): " "}
QUIET_ZONE = 2
"""Width of the border, in modules. The standard requires 4; scanners accept 2."""


@functools.cache
def data_uri(address: str) -> str:
    """Return the code as an SVG image in a data URI, with a white background; empty if segno is not installed."""
    code = _code(address)
    return code.svg_data_uri(border=QUIET_ZONE, light="white", scale=4) if code is not None else ""


def half_blocks(address: str) -> str:
    """Return the code as text with two modules in each character; empty if segno is not installed.

    The blocks are the light modules, so the code is correct on a dark terminal. On a light one it is inverted, which
    scanners can also read.
    """
    code = _code(address)
    if code is None:
        return ""
    rows = [[not dark for dark in row] for row in code.matrix_iter(border=QUIET_ZONE)]
    if len(rows) % 2:
        rows.append([False] * len(rows[0]))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return "\n".join("".join(BLOCKS[pair] for pair in zip(*rows, strict=True)) for rows in pairs)


def _code(address: str) -> Any:
    try:
        segno = import_optional("segno", "a QR code")
    except MissingPackageError:
        return None
    return segno.make_qr(address, error="m")
