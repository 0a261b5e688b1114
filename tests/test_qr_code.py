"""Tests of the QR codes of addresses."""

import sys

import segno

from lmx_lab import qr_code

ADDRESS = "http://192.168.1.20:8400"


def test_the_text_has_the_modules_of_the_code():
    lines = qr_code.half_blocks(ADDRESS).splitlines()
    light = [[block in half for block in line] for line in lines for half in ("█▀", "█▄")]
    expected = [[not dark for dark in row] for row in segno.make_qr(ADDRESS, error="m").matrix_iter(border=2)]
    assert light[: len(expected)] == expected


def test_the_image_is_a_data_uri_without_other_addresses():
    image = qr_code.data_uri(ADDRESS)
    assert image.startswith("data:image/svg+xml")
    assert "script" not in image


def test_without_segno_there_is_no_code(monkeypatch):
    monkeypatch.setitem(sys.modules, "segno", None)
    qr_code.data_uri.cache_clear()
    assert (qr_code.data_uri(ADDRESS), qr_code.half_blocks(ADDRESS)) == ("", "")
    qr_code.data_uri.cache_clear()
