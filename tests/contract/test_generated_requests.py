"""Tests with requests and chains of requests that schemathesis generates: the status, headers, body and error code of
all responses match the OpenAPI documents."""

import re
import shutil

import pytest

from tests.contract.openapi import CONTEXT, EXAMPLES, OpenApiContract
from tests.support.gguf import with_context
from tests.support.labs import serving

pytestmark = pytest.mark.long

SINGLE_OPTIONS = ("--phases", "examples,coverage,fuzzing")
# Without a prompt, these routes load and unload models, after which most requests would be answered with 503.
LOADING_ROUTES = "^/api/(chat|generate)$"
OTHER_ROUTES = ("--exclude-tag", "admin", "--exclude-path-regex", LOADING_ROUTES)


def check_all(contract, *options):
    """Generate requests, and check that all selected operations were tested."""
    said = contract.generate(*options)
    found = re.search(r"Selected: (\d+)/\d+\s+Tested: (\d+)", said)
    assert found is not None, said
    assert found[1] == found[2] != "0", said


def links_followed(contract):
    """Generate chains of requests, and return the number of links of the document that were followed."""
    said = contract.generate("--phases", "stateful", "--mode", "positive", examples=6 * EXAMPLES)
    found = re.search(r"API Links: +(\d+) covered", said)
    assert found is not None, said
    return int(found[1])


def test_the_inference_server_matches_its_document(tiny_server, tiny_lab):
    # Without a model, nearly all responses would be the same error.
    tiny_lab.load("tiny")
    check_all(tiny_server, *SINGLE_OPTIONS, *OTHER_ROUTES)


def test_routes_that_load_models_without_a_prompt_match_their_document(tiny_server, tiny_lab):
    tiny_lab.load("tiny")
    check_all(tiny_server, *SINGLE_OPTIONS, "--include-path-regex", LOADING_ROUTES)


@pytest.fixture
def on_llama_cpp(tmp_path, tiny_gguf, minilm_gguf, reranker_gguf):
    models = tmp_path / "models"
    with_context(tiny_gguf, CONTEXT, models / "tiny")
    for name, file in (("tiny-embedder", minilm_gguf), ("tiny-reranker", reranker_gguf)):
        (models / name).mkdir()
        shutil.copy(file, models / name)
    with serving(tmp_path, "tiny", embedder="tiny-embedder", reranker="tiny-reranker", downloads=False) as lab:
        yield OpenApiContract(f"{lab.url}/openapi.json")


def test_the_inference_server_matches_its_document_with_llama_cpp(on_llama_cpp):
    # Without the phase "coverage": limits such as 2,048 texts do not depend on the engine, and take minutes here.
    check_all(on_llama_cpp, "--phases", "examples,fuzzing", *OTHER_ROUTES)


def test_the_inference_server_matches_its_document_with_the_echo_engine(server, lab):
    lab.load("echo")
    check_all(server, *SINGLE_OPTIONS, *OTHER_ROUTES)


def test_the_admin_routes_match_their_document(tiny_server):
    check_all(tiny_server, *SINGLE_OPTIONS, "--include-tag", "admin")


def test_listed_models_can_be_read_loaded_and_unloaded(tiny_server):
    assert links_followed(tiny_server) >= 3


def test_the_daemon_matches_its_document(api):
    check_all(api, *SINGLE_OPTIONS)


def test_created_objects_of_the_daemon_can_be_read_changed_and_deleted(api):
    # Most chains begin with a session; chains with MCP servers are generated less often.
    assert links_followed(api) >= 5
