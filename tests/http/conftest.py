"""Fixtures of the HTTP tests."""

import pytest

from lmx_lab.http import connections
from tests.http.raw import SHORT_S, disconnected


@pytest.fixture
def short(monkeypatch):
    """Use very short deadlines and a minimum speed that only complete bodies reach."""
    monkeypatch.setattr(connections, "HEAD_S", SHORT_S)
    monkeypatch.setattr(connections, "BODY_S", SHORT_S)
    monkeypatch.setattr(connections, "BODY_BYTES", 10**9)
    monkeypatch.setattr(connections, "LATE_S", SHORT_S / 4)
    disconnected.clear()
