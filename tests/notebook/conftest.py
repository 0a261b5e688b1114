"""Labs that ``launch()`` has started."""

import pytest

import lmx_lab


@pytest.fixture
def launched(tmp_path):
    """A lab without models; it has the echo engine."""
    with lmx_lab.launch(port=0, home=tmp_path, echo_tokens_per_s=1000) as lab:
        yield lab
    assert lmx_lab.current() is None
