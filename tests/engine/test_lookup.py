"""Requests name models by id; programs on this machine may also name a loaded one by its path."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.engine.lookup import (
    ANY_KIND,
    CHAT,
    EMBEDDING,
    RERANK,
    find_model,
    loaded_id,
    public_id,
    refusal,
    unknown_model,
    with_models_on_disk,
)
from lmx_lab.errors import InvalidRequestError, ModelNotFoundError, NotLoadedError, OtherModelLoadedError
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import ECHO
from tests.support.models import TINY_ENTRY, in_memory

MINILM = replace(TINY_ENTRY, id="minilm", path=Path("/models/minilm"), kind="embedding")
READY = in_memory(TINY_ENTRY)
EMPTY = EngineSnapshot()
LOADING = EngineSnapshot(state="loading")
PINNED = in_memory(TINY_ENTRY, MINILM)
BY_PATH = replace(TINY_ENTRY, id=str(TINY_ENTRY.path), source="path")
DISK = [TINY_ENTRY, MINILM]


# Names


@pytest.mark.parametrize(
    ("entries", "name", "local", "id_"),
    [
        ([TINY_ENTRY], "/models/tiny", True, "tiny"),
        ([TINY_ENTRY], "/models/tiny/", True, "tiny"),
        ([TINY_ENTRY], "/models//./tiny", True, "tiny"),
        ([TINY_ENTRY], "/models/tiny", False, "/models/tiny"),
        ([TINY_ENTRY], "/models/other", True, "/models/other"),
        ([TINY_ENTRY], "other", True, "other"),
        ([TINY_ENTRY], "", True, ""),
        ([TINY_ENTRY], "\0", True, "\0"),
        ([TINY_ENTRY], None, True, None),
        ([], "/models/tiny", True, "/models/tiny"),
        (PINNED.entries, "/models/minilm", True, "minilm"),
        (PINNED.entries, "/models/tiny", True, "tiny"),
        (PINNED.entries, "/models/minilm", False, "/models/minilm"),
        # Callers elsewhere may use the name that they see.
        ([BY_PATH], "tiny", False, "/models/tiny"),
        ([BY_PATH], "other", False, "other"),
    ],
)
def test_a_path_names_a_loaded_model_for_callers_on_this_machine(entries, name, local, id_):
    assert loaded_id(name, entries, local=local) == id_


@pytest.mark.parametrize("local", [True, False])
def test_a_loaded_quantization_answers_to_its_repository_too(local):
    quantized = replace(TINY_ENTRY, id="org/name:Q4_K_M", source="hub", format="gguf")
    for name, id_ in (("org/name", "org/name:Q4_K_M"), ("org/name:Q8_0", "org/name:Q8_0"), ("org/na", "org/na")):
        assert loaded_id(name, [quantized], local=local) == id_
    folder = replace(MINILM, id="org/name")
    assert loaded_id("org/name", [folder, quantized], local=local) == "org/name"


PATHS = ("/home/me/my models/tiny", "~/tiny", "./tiny", "../tiny")


@pytest.mark.parametrize("name", [*PATHS, "tiny", "org/name", "org/name:Q4_K_M", "tiny.gguf", ""])
def test_callers_elsewhere_see_the_last_part_of_an_id_that_is_a_path(name):
    assert public_id(name, local=False) == ("tiny" if name in PATHS else name)
    assert public_id(name, local=True) == name


def test_the_preferred_kind_answers():
    reranker = replace(TINY_ENTRY, id="judge", kind="rerank")
    assert find_model([MINILM, reranker, TINY_ENTRY], None, RERANK) is reranker
    assert find_model([MINILM, TINY_ENTRY], None, RERANK) is MINILM
    assert find_model([MINILM, reranker], "minilm", RERANK) is MINILM
    assert find_model([MINILM], None, CHAT) is None
    assert find_model([MINILM, TINY_ENTRY], "other", ANY_KIND) is None


# Refusals


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("kind", "kinds"), [("chat", CHAT), ("embedding", EMBEDDING), ("embedding", RERANK)])
def test_the_refusal_by_a_model_that_is_being_unloaded_does_not_mention_its_kind(kind, kinds, named):
    now = in_memory(replace(TINY_ENTRY, kind=kind))
    error = refusal(now, TINY_ENTRY.id if named else None, kinds)
    assert isinstance(error, NotLoadedError)
    assert error.message.startswith("tiny is being unloaded; load one first")


def test_the_refusal_of_an_unknown_name_lists_the_models_that_could_answer():
    assert ": minilm is loaded" in unknown_model("text-embedding-3-small", PINNED, EMBEDDING).message
    assert ": tiny is loaded" in unknown_model("gpt", PINNED, CHAT).message
    assert "tiny and minilm are loaded" in unknown_model("gpt", PINNED, ANY_KIND).message
    assert "no model that could answer is loaded" in unknown_model("gpt", EMPTY, CHAT).message


def test_the_refusal_of_an_unknown_name_suggests_a_similar_model_that_could_answer():
    coder = replace(TINY_ENTRY, id="/models/Coder-Q4_K_M.gguf")
    message = unknown_model("coder-q4", in_memory(coder), CHAT).message
    assert "the id 'coder-q4'; did you mean 'Coder-Q4_K_M.gguf'? Requests name models by id" in message
    assert "did you mean 'minilm'?" in unknown_model("MiniLM-L6", EMPTY, EMBEDDING, DISK).message
    assert "did you mean" not in unknown_model("MiniLM-L6", EMPTY, CHAT, DISK).message


def test_the_refusal_of_an_unknown_name_is_true_of_a_path_that_exists_and_short():
    message = unknown_model("/models/tiny", READY, CHAT).message
    assert "by id, not by path" in message
    assert "tiny is loaded" in message
    assert len(unknown_model("x" * 1000, EMPTY, CHAT).message) < 500
    assert len(refusal(READY, "x" * 1000, CHAT).message) < 400


OTHER, NONE = OtherModelLoadedError("other", param="model"), NotLoadedError("none", retry_after_s=1)


@pytest.mark.parametrize(
    ("refused", "request_for", "now", "error", "part"),
    [
        (OTHER, ("tiny", CHAT), READY, OtherModelLoadedError, "--swap"),
        (NONE, ("tiny", CHAT), EMPTY, NotLoadedError, "--swap"),
        (NONE, ("tiny", CHAT), LOADING, NotLoadedError, "none"),
        (OTHER, ("nowhere", CHAT), READY, ModelNotFoundError, "nowhere"),
        (NONE, ("nowhere", CHAT), EMPTY, NotLoadedError, "none"),
        (NONE, ("nowhere", CHAT), in_memory(None, MINILM), ModelNotFoundError, "nowhere"),
        (OTHER, ("minilm", CHAT), READY, InvalidRequestError, "an embedding model"),
        (OTHER, ("tiny", EMBEDDING), READY, InvalidRequestError, "a chat model"),
        (OTHER, ("minilm", RERANK), READY, OtherModelLoadedError, "--swap"),
        (NONE, (None, EMBEDDING), READY, NotLoadedError, "on disk: minilm"),
        (NONE, (None, RERANK), EMPTY, NotLoadedError, "on disk: minilm"),
        (NONE, (None, CHAT), READY, NotLoadedError, "none"),
        (NONE, ("echo", CHAT), in_memory(ECHO), NotLoadedError, "none"),
    ],
)
def test_a_refusal_names_the_next_step_that_the_models_on_disk_allow(refused, request_for, now, error, part):
    name, kinds = request_for
    result = with_models_on_disk(refused, name, DISK, now, kinds)
    assert type(result) is error
    assert part in result.message
    if isinstance(result, NotLoadedError):
        assert (result.param, result.retry_after_s) == (refused.param, refused.retry_after_s)


def test_a_refusal_lists_five_models_on_disk_and_those_of_the_preferred_kind_first():
    disk = [*(replace(MINILM, id=f"e{at}") for at in range(9)), replace(TINY_ENTRY, id="judge", kind="rerank")]
    message = with_models_on_disk(NONE, None, disk, READY, RERANK).message
    assert message.endswith("on disk: judge, e0, e1, e2, e3, …")
    message = with_models_on_disk(NONE, None, [], READY, RERANK).message
    assert message.endswith("lmx-lab pull minilm-l6 fetches one")
