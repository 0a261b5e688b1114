"""A daemon without a model, for tests of its routes."""

import pytest

from lmx_lab.daemon.limits import Limits
from tests.support.daemons import client, serving


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), Limits(wait_s=5.0), max_body_bytes=100_000) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def http(daemon):
    with client(daemon) as http:
        yield http


@pytest.fixture
def session(http):
    session_id = http.post("/v3/sessions", json={"title": "One"}).json()["session_id"]
    yield session_id
    assert http.delete(f"/v3/sessions/{session_id}").status_code == 204
