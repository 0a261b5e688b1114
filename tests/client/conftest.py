"""A lab that needs its key, and whose answers take as long as a test needs."""

import pytest

from lmx_lab.client import AsyncLabClient
from tests.support.labs import KEY, PACE, serving, wait_until_idle


@pytest.fixture(scope="package")
def lab(echo_home):
    with serving(echo_home, "echo", slots=1, queue_limit=1, api_key=KEY, echo_tokens_per_s=PACE) as lab:
        yield lab


@pytest.fixture
async def client(lab):
    async with AsyncLabClient(lab.url, api_key=KEY) as client:
        yield client
    wait_until_idle(lab)
