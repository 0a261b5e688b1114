"""Start kernels and run cells in them, as a notebook does."""

import pytest

from tests.support.kernels import Notebook


@pytest.fixture
def fresh_notebook(tiny_home):
    """A kernel for one test, which may stop it."""
    notebook = Notebook(tiny_home)
    yield notebook
    notebook.close()
