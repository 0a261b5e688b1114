"""A lab with a tiny model, for the tests that read its activations."""

import pytest

from tests.support.labs import serving


@pytest.fixture(scope="package")
def lab(tiny, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), tiny.path, slots=4, threads=1) as lab:
        yield lab
