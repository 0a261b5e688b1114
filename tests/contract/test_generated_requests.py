"""Requests that schemathesis draws from the documents, and chains of them: whatever they are, the answers are as
described, their status, headers, body and code of failure."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmx_lab.notebook import Lab
from tests.contract.conftest import CONTEXT, HERE
from tests.contract.openapi import EXAMPLES, Contract
from tests.flows.conftest import serving
from tests.gguf_files import with_context

pytestmark = pytest.mark.long

SINGLE = ("--phases", "examples,coverage,fuzzing")
CHAINS = ("--phases", "stateful", "--mode", "positive")
CHAIN_EXAMPLES = 6 * EXAMPLES


def assert_whole(said: str) -> None:
    """All operations were asked that were meant."""
    found = re.search(r"Selected: (\d+)/\d+\s+Tested: (\d+)", said)
    assert found is not None, said
    assert found[1] == found[2] != "0", said


def covered(said: str) -> int:
    """How many of the document's links were followed."""
    found = re.search(r"API Links: +(\d+) covered", said)
    assert found is not None, said
    return int(found[1])


def test_the_inference_server_keeps_its_document(tiny_server: Contract, tiny_lab: Lab) -> None:
    # Without a model nearly all would be one refusal.
    tiny_lab.load("tiny")
    assert_whole(tiny_server.draw(*SINGLE, "--exclude-tag", "admin"))


@pytest.fixture
def on_llama_cpp(tmp_path: Path, tiny_gguf: Path, minilm_gguf: Path, reranker_gguf: Path) -> Iterator[Contract]:
    models = tmp_path / "models"
    with_context(tiny_gguf, CONTEXT, models / "tiny")
    for name, file in (("tiny-embedder", minilm_gguf), ("tiny-reranker", reranker_gguf)):
        (models / name).mkdir()
        shutil.copy(file, models / name)
    with serving(tmp_path, "tiny", embedder="tiny-embedder", reranker="tiny-reranker", downloads=False) as lab:
        yield Contract(f"{lab.url}/openapi.json", config=HERE / "server.toml")


def test_it_keeps_its_document_on_llama_cpp_too(on_llama_cpp: Contract) -> None:
    # The document's bounds, such as 2,048 texts, are the server's, whichever engine computes; here they take minutes.
    assert_whole(on_llama_cpp.draw("--phases", "examples,fuzzing", "--exclude-tag", "admin"))


def test_it_keeps_its_document_on_echo_too(server: Contract, lab: Lab) -> None:
    lab.load("echo")
    assert_whole(server.draw(*SINGLE, "--exclude-tag", "admin"))


def test_its_administration_keeps_its_document(tiny_server: Contract) -> None:
    assert_whole(tiny_server.draw(*SINGLE, "--include-tag", "admin"))


def test_what_the_inference_server_lists_can_be_read_loaded_and_unloaded(tiny_server: Contract) -> None:
    assert covered(tiny_server.draw(*CHAINS, examples=CHAIN_EXAMPLES)) >= 3


def test_the_daemon_keeps_its_document(api: Contract) -> None:
    assert_whole(api.draw(*SINGLE))


def test_what_the_daemon_has_made_can_be_read_changed_and_deleted(api: Contract) -> None:
    # Most chains begin with a session; servers of MCP need more luck.
    assert covered(api.draw(*CHAINS, examples=CHAIN_EXAMPLES)) >= 5
