"""Fixtures of the HTTP tests."""

from __future__ import annotations

import pytest

from lmx_lab.http import protocol
from tests.support.sockets import SHORT_S, disconnected


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use very short deadlines and a minimum speed that only complete bodies reach."""
    monkeypatch.setattr(protocol, "HEAD_S", SHORT_S)
    monkeypatch.setattr(protocol, "BODY_S", SHORT_S)
    monkeypatch.setattr(protocol, "BODY_BYTES", 10**9)
    monkeypatch.setattr(protocol, "LATE_S", SHORT_S / 4)
    disconnected.clear()
