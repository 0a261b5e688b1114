"""Fixtures that run the inference server (with the echo engine or tiny models) and a daemon that uses it."""

import pytest

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.limits import Limits
from lmx_lab.settings import Settings
from tests.contract.openapi import CONTEXT, HERE
from tests.support.labs import serving
from tests.support.models import write_tiny_bert, write_tiny_llama


def read_contract(url, **options):
    # Imported here, because this is slow, and the tests in ``formats`` do not need it.
    from tests.contract.openapi import OpenApiContract

    return OpenApiContract(url, **options)


@pytest.fixture(scope="session")
def home(tmp_path_factory, smollm2):
    home = tmp_path_factory.mktemp("contract")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=CONTEXT)
    write_tiny_bert(home / "models" / "tiny-embedder")
    write_tiny_bert(home / "models" / "tiny-reranker", labels=1)
    return home


@pytest.fixture(scope="module")
def tiny_lab(home):
    # The names of models are generated too, and must not be searched on the hub.
    with serving(home, "tiny", embedder="tiny-embedder", reranker="tiny-reranker", downloads=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def tiny_server(tiny_lab):
    return read_contract(f"{tiny_lab.url}/openapi.json", config=HERE / "server.toml")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Run a lab with the echo engine."""
    with serving(tmp_path_factory.mktemp("echo"), "echo", downloads=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def server(lab):
    return read_contract(f"{lab.url}/openapi.json", config=HERE / "server.toml")


@pytest.fixture(scope="module")
def _no_programs(tmp_path_factory):
    """Use an empty PATH: the commands of MCP servers are generated too, and none of them must be found."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", str(tmp_path_factory.mktemp("no-programs")))
        yield


@pytest.fixture(scope="module")
def daemon(lab, tmp_path_factory, _no_programs):
    # Requests that wait for an event return after a short time.
    settings, limits = Settings(home=tmp_path_factory.mktemp("daemon"), daemon_port=0), Limits(wait_s=0.1)
    daemon = Daemon(settings=settings, limits=limits, upstream_url=lab.url)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop(mode="now")


@pytest.fixture(scope="module")
def api(daemon):
    return read_contract(f"{daemon.url}/v3/openapi.json", key=daemon.token, config=HERE / "daemon.toml")
