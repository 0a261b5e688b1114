"""Provide a daemon in this process with a scripted model server, for commands that need one."""

import functools

import pytest
import typer.main

from tests.support.daemons import serving
from tests.support.model_server import Scripted, says


@pytest.fixture(autouse=True, scope="package")
def _cache_parser():
    """Create the parser of all commands once, because this takes a third of the time of a short command."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def upstream():
    with Scripted() as upstream:
        yield upstream


@pytest.fixture
def daemon(tmp_path, upstream):
    with serving(tmp_path, upstream=upstream.url) as daemon:
        yield daemon


@pytest.fixture
def hello(upstream):
    """Let the model always give this answer."""
    upstream.then(says("Hello", " there."))
