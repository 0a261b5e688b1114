"""Fixtures that run the inference server, with or without a key, and the daemon."""

import pytest

from tests.support.daemons import serving as serving_daemon
from tests.support.labs import FRIEND, KEY, serving


@pytest.fixture(scope="package")
def open_lab(echo_home):
    """Run a lab without a key, as by default."""
    with serving(echo_home, "echo", slots=2) as lab:
        yield lab


@pytest.fixture(scope="package")
def keyed_lab(echo_home):
    with serving(echo_home, None, api_key=KEY, cors_origins=(FRIEND,)) as lab:
        yield lab


@pytest.fixture(scope="package")
def daemon(tmp_path_factory):
    with serving_daemon(tmp_path_factory.mktemp("home"), cors_origins=(FRIEND,)) as daemon:
        yield daemon
