"""A lab with the echo engine for clients of all formats."""

import pytest

from tests.support.labs import PACE, serving


@pytest.fixture(scope="session")
def lab(echo_home):
    with serving(echo_home, "echo", slots=2, queue_limit=2, echo_tokens_per_s=PACE, record="all") as lab:
        yield lab
