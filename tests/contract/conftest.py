"""Both programs, running: the inference server with the echo engine or tiny models, and a daemon whose turns ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.limits import Limits
from lmx_lab.notebook import Lab
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from tests.contract.openapi import Contract
from tests.engine.encoders.models import write_tiny_bert
from tests.flows.conftest import serving
from tests.tiny import write_tiny_llama

CONTEXT = 64
"""Tokens: whatever a request asks for, its answer is short."""
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    home = tmp_path_factory.mktemp("contract")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=CONTEXT)
    write_tiny_bert(home / "models" / "tiny-embedder")
    write_tiny_bert(home / "models" / "tiny-reranker", labels=1)
    return home


@pytest.fixture(scope="module")
def tiny_lab(home: Path) -> Iterator[Lab]:
    # Names of models are drawn too: none of them may be looked for elsewhere than on this disk.
    with serving(home, "tiny", embedder="tiny-embedder", reranker="tiny-reranker", downloads=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def tiny_server(tiny_lab: Lab) -> Contract:
    return Contract(f"{tiny_lab.url}/openapi.json", config=HERE / "server.toml")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """On the echo engine."""
    with serving(tmp_path_factory.mktemp("echo"), "echo", downloads=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def server(lab: Lab) -> Contract:
    return Contract(f"{lab.url}/openapi.json", config=HERE / "server.toml")


@pytest.fixture(scope="module")
def _no_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands of MCP servers are drawn too: by name none is found."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", str(tmp_path_factory.mktemp("no-programs")))
        yield


@pytest.fixture(scope="module")
def daemon(lab: Lab, tmp_path_factory: pytest.TempPathFactory, _no_programs: None) -> Iterator[Daemon]:
    # Whatever a request may wait for, it does not wait long.
    settings, limits = Settings(home=tmp_path_factory.mktemp("daemon"), daemon_port=0), Limits(wait_s=0.1)
    daemon = Daemon(settings=settings, limits=limits, upstream_url=lab.url)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop(mode="now")


@pytest.fixture(scope="module")
def api(daemon: Daemon) -> Contract:
    return Contract(f"{daemon.url}/v3/openapi.json", key=daemon.token, config=HERE / "daemon.toml")
