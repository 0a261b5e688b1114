"""Start kernels and run cells in them, as a notebook does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Notebook


@pytest.fixture
def fresh_notebook(tiny_home: Path) -> Iterator[Notebook]:
    """A kernel for one test, which may stop it."""
    notebook = Notebook(tiny_home)
    yield notebook
    notebook.close()
