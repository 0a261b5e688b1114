"""Fixtures for the three ways to reach a lab: in a thread, on the caller's loop, and attached over HTTP."""

import contextlib

import pytest

import lmx_lab
from lmx_lab.settings import Settings
from tests.support.labs import PACE


@pytest.fixture(scope="module", params=["thread", "kernel", "attached"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def reach(way):
    """Start a lab, and yield it with the lab whose server it uses, which is another one if it is attached."""

    @contextlib.asynccontextmanager
    async def started(home, model, **settings):
        loop = "kernel" if way == "kernel" else "thread"
        async with lmx_lab.Lab(Settings(home=home, port=0, **settings), loop=loop) as served:
            if model is not None:
                await served.aload(model)
            if way != "attached":
                yield served, served
                return
            async with lmx_lab.attach(served.url) as lab:
                yield lab, served

    return started


@pytest.fixture(scope="module")
async def echo(reach, tmp_path_factory):
    async with reach(tmp_path_factory.mktemp("home"), "echo", echo_tokens_per_s=PACE) as labs:
        yield labs


@pytest.fixture(scope="module")
def lab(echo):
    return echo[0]


@pytest.fixture(scope="module")
def served(echo):
    """The lab whose server answers; its state shows what the server does."""
    return echo[1]
