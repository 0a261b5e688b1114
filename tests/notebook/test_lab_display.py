"""A lab describes itself as HTML."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lmx_lab
from lmx_lab.qr_code import data_uri
from lmx_lab.settings import Settings


def test_the_html_of_a_lab_is_escaped(tmp_path: Path) -> None:
    lab = lmx_lab.Lab(Settings(home=tmp_path, host="<script>alert(1)</script>"), loop="thread")
    assert "<script" not in lab._repr_html_()
    assert "&lt;script&gt;" in lab._repr_html_()


def test_the_html_of_a_lab_has_the_qr_code_of_its_chat_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: ["192.0.2.5"])
    settings = Settings(home=tmp_path, host="0.0.0.0")
    code = html.escape(data_uri("http://192.0.2.5:8400"))
    cases: list[tuple[dict[str, Any], int]] = [({}, 1), ({"page": False}, 0), ({"host": "127.0.0.1"}, 0)]
    for changes, count in cases:
        lab = lmx_lab.Lab(replace(settings, **changes), loop="thread")
        assert lab._repr_html_().count(f"src='{code}'") == count
