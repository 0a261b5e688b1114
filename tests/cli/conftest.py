"""Provide a daemon in this process with a scripted model server, for commands that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmx_lab.daemon.daemon import Daemon
from tests.daemon.running_daemon import serving
from tests.daemon.scripted import Scripted, says


@pytest.fixture
def upstream() -> Iterator[Scripted]:
    with Scripted() as upstream:
        yield upstream


@pytest.fixture
def daemon(tmp_path: Path, upstream: Scripted) -> Iterator[Daemon]:
    with serving(tmp_path, upstream=upstream.url) as daemon:
        yield daemon


@pytest.fixture
def hello(upstream: Scripted) -> None:
    """Let the model always give this answer."""
    upstream.then(says("Hello", " there."))
