"""Fixtures that run servers on loopback sockets.

``lab`` uses the echo engine, other fixtures a tiny model. Tests that do not load or unload models share one server for
the session.
"""

import httpx2
import pytest

from tests.support.labs import PACE, serving
from tests.support.models import write_tiny_bert, write_tiny_llama


@pytest.fixture(scope="session")
def lab(echo_home):
    """Run a server with ``echo`` loaded. Tests that unload it use ``fresh_lab``."""
    with serving(echo_home, "echo", slots=2, queue_limit=2, echo_tokens_per_s=PACE) as lab:
        yield lab


@pytest.fixture(scope="session")
def quick_lab(echo_home):
    """Run a server with ``echo`` at full speed. ``PACE`` would apply to embeddings too."""
    with serving(echo_home, "echo") as lab:
        yield lab


@pytest.fixture
def fresh_lab(echo_home):
    with serving(echo_home, "echo", echo_tokens_per_s=PACE) as lab:
        yield lab


# For one module only: in a session, later tests would measure the memory of its model as that of this process.
@pytest.fixture(scope="module")
def tiny_lab(tiny_home):
    """Run a server with ``tiny`` loaded. Tests that unload it use ``fresh_tiny_lab``."""
    with serving(tiny_home, "tiny", slots=2, queue_limit=2) as lab:
        yield lab


@pytest.fixture
def fresh_tiny_lab(tiny_home):
    with serving(tiny_home, "tiny") as lab:
        yield lab


@pytest.fixture(scope="session")
def three_home(tmp_path_factory, smollm2):
    """Create a home with a tiny chat model, a tiny embedding model and a tiny reranker."""
    home = tmp_path_factory.mktemp("three-home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0)
    write_tiny_bert(home / "models" / "tiny-embedder")
    write_tiny_bert(home / "models" / "tiny-reranker", labels=1)
    return home


@pytest.fixture
def fresh_http(fresh_lab):
    with httpx2.Client(base_url=fresh_lab.url) as client:
        yield client


@pytest.fixture(scope="module")
def tiny_http(tiny_lab):
    with httpx2.Client(base_url=tiny_lab.url) as client:
        yield client


@pytest.fixture
def fresh_tiny_http(fresh_tiny_lab):
    with httpx2.Client(base_url=fresh_tiny_lab.url) as client:
        yield client
