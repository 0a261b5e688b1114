import pytest

from tests.support.labs import serving


@pytest.fixture(scope="package")
def lab(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), "echo", slots=4) as lab:
        yield lab
