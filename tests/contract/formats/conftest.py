"""Fixtures that serve the echo engine to clients of all formats."""

import httpx2
import pytest

from tests.support.labs import PACE, serving


@pytest.fixture(scope="session")
def lab(echo_home):
    with serving(echo_home, "echo", slots=2, queue_limit=2, echo_tokens_per_s=PACE, record="all") as lab:
        yield lab


@pytest.fixture(scope="session")
def http(lab):
    with httpx2.Client(base_url=lab.url, timeout=60) as client:
        yield client
