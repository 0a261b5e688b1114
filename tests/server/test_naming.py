"""Models are named by id; programs on this machine may also say where the loaded one lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.errors import (
    InvalidRequestError,
    LabError,
    ModelNotFoundError,
    NotLoadedError,
    OtherModelLoadedError,
)
from lmx_lab.server.naming import (
    ANY,
    CHAT,
    EMBEDDING,
    RERANK,
    Kinds,
    check_unloads,
    loaded_id,
    not_loaded,
    shown_id,
    unknown_model,
    without_paths,
)
from lmx_lab.values.engine import EngineSnapshot, PinnedModel
from tests.server.conftest import ENTRY

READY = EngineSnapshot(state="ready", entry=ENTRY)
EMPTY = EngineSnapshot()
LOADING = EngineSnapshot(state="loading")
EMBEDDER = replace(ENTRY, id="minilm", path=ENTRY.path.parent / "minilm", kind="embedding")
PINNED = replace(READY, pinned=(PinnedModel(entry=EMBEDDER, memory_bytes=1),))
DISK = [ENTRY, EMBEDDER]


@pytest.mark.parametrize(
    ("name", "local", "meant"),
    [
        ("/models/tiny", True, "tiny"),
        ("/models/tiny/", True, "tiny"),
        ("/models//./tiny", True, "tiny"),
        ("/models/tiny", False, "/models/tiny"),
        ("/models/other", True, "/models/other"),
        ("other", True, "other"),
        ("", True, ""),
        ("\0", True, "\0"),
        (None, True, None),
    ],
)
def test_only_the_loaded_models_path_is_a_name_and_only_here(name: str | None, local: bool, meant: str | None) -> None:
    assert loaded_id(name, READY, local=local) == meant


@pytest.mark.parametrize("local", [True, False])
def test_a_loaded_quantization_answers_to_its_repository_too(local: bool) -> None:
    quantized = replace(ENTRY, id="org/name:Q4_K_M", source="hub", format="gguf")
    now = EngineSnapshot(state="ready", entry=quantized)
    for name, meant in (("org/name", "org/name:Q4_K_M"), ("org/name:Q8_0", "org/name:Q8_0"), ("org/na", "org/na")):
        assert loaded_id(name, now, local=local) == meant
    folder = PinnedModel(entry=replace(EMBEDDER, id="org/name"), memory_bytes=1)
    assert loaded_id("org/name", replace(now, pinned=(folder,)), local=local) == "org/name"


def test_without_a_model_no_path_is_a_name() -> None:
    assert loaded_id("/models/tiny", EngineSnapshot(), local=True) == "/models/tiny"


def test_the_refusal_is_true_of_a_path_that_exists() -> None:
    said = unknown_model("/models/tiny", READY, CHAT).message
    assert "by id" in said
    assert "tiny is loaded" in said
    assert "none that would do is loaded" in unknown_model("x" * 1000, EngineSnapshot(), CHAT).message
    assert len(unknown_model("x" * 1000, EngineSnapshot(), CHAT).message) < 400


def test_a_pinned_models_path_is_a_name_too() -> None:
    assert loaded_id("/models/minilm", PINNED, local=True) == "minilm"
    assert loaded_id("/models/tiny", PINNED, local=True) == "tiny"
    assert loaded_id("/models/minilm", PINNED, local=False) == "/models/minilm"


def test_unknown_names_are_told_what_would_do() -> None:
    assert "minilm is loaded" in unknown_model("text-embedding-3-small", PINNED, EMBEDDING).message
    assert "tiny is loaded" in unknown_model("gpt", PINNED, CHAT).message


def test_the_listing_tells_of_every_kind() -> None:
    assert "tiny and minilm are loaded" in unknown_model("gpt", PINNED, ANY).message


def test_an_unload_that_names_another_model_is_refused() -> None:
    check_unloads("tiny", PINNED, local=False)
    check_unloads("/models/tiny", PINNED, local=True)
    with pytest.raises(InvalidRequestError, match="minilm is pinned"):
        check_unloads("minilm", PINNED, local=False)
    with pytest.raises(InvalidRequestError, match="gpt is not loaded, tiny is"):
        check_unloads("gpt", PINNED, local=False)
    with pytest.raises(InvalidRequestError, match="no model is"):
        check_unloads("gpt", EngineSnapshot(), local=False)


OTHER, NONE = OtherModelLoadedError("other", param="model"), NotLoadedError("none", retry_after_s=1)


@pytest.mark.parametrize(
    ("exc", "asked", "now", "kind", "part"),
    [
        (OTHER, ("tiny", CHAT), READY, OtherModelLoadedError, "--swap"),
        (NONE, ("tiny", CHAT), EMPTY, NotLoadedError, "--swap"),
        (NONE, ("tiny", CHAT), LOADING, NotLoadedError, "none"),
        (OTHER, ("nowhere", CHAT), READY, ModelNotFoundError, "nowhere"),
        (NONE, ("nowhere", CHAT), EMPTY, NotLoadedError, "none"),
        (NONE, ("nowhere", CHAT), replace(PINNED, entry=None), ModelNotFoundError, "nowhere"),
        (OTHER, ("minilm", CHAT), READY, InvalidRequestError, "an embedding model"),
        (OTHER, ("tiny", EMBEDDING), READY, InvalidRequestError, "a chat model"),
        (OTHER, ("minilm", RERANK), READY, OtherModelLoadedError, "--swap"),
        (NONE, (None, EMBEDDING), READY, NotLoadedError, "on this disk: minilm"),
        (NONE, (None, RERANK), EMPTY, NotLoadedError, "on this disk: minilm"),
        (NONE, (None, CHAT), READY, NotLoadedError, "none"),
    ],
)
def test_what_is_not_loaded_is_said_with_what_would_help(
    exc: NotLoadedError, asked: tuple[str | None, Kinds], now: EngineSnapshot, kind: type[LabError], part: str
) -> None:
    name, kinds = asked
    said = not_loaded(exc, name, DISK, now, kinds=kinds)
    assert type(said) is kind
    assert part in said.message
    if isinstance(said, NotLoadedError):
        assert (said.param, said.retry_after_s) == (exc.param, exc.retry_after_s)


def test_a_remedy_names_a_few_and_rerankers_first() -> None:
    disk = [*(replace(EMBEDDER, id=f"e{at}") for at in range(9)), replace(ENTRY, id="judge", kind="rerank")]
    said = not_loaded(NONE, None, disk, READY, kinds=RERANK).message
    assert said.endswith("on this disk: judge, e0, e1, e2, e3, …")
    assert not_loaded(NONE, None, [], READY, kinds=RERANK).message.endswith("lmx-lab pull minilm-l6 fetches one")


@pytest.mark.parametrize("name", ["/home/me/my models/tiny", "~/tiny", "./tiny", "../tiny"])
def test_a_model_loaded_by_its_path_is_shown_to_others_by_its_last_part(name: str) -> None:
    assert shown_id(name, local=False) == "tiny"
    assert shown_id(name, local=True) == name


@pytest.mark.parametrize("name", ["tiny", "org/name", "org/name:Q4_K_M", "tiny.gguf", ""])
def test_any_other_id_is_shown_as_it_is(name: str) -> None:
    assert shown_id(name, local=False) == name


def test_others_may_name_such_a_model_as_they_see_it() -> None:
    there = replace(ENTRY, id=str(ENTRY.path), source="path")
    now = EngineSnapshot(state="ready", entry=there)
    assert loaded_id(ENTRY.path.name, now, local=False) == there.id
    assert loaded_id("other", now, local=False) == "other"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tiny at /home/me/models/tiny cannot be loaded", "tiny at tiny cannot be loaded"),
        ("'/srv/x/tiny/model.safetensors': damaged", "'model.safetensors': damaged"),
        ("(/srv/x/tiny/), see", "((a folder)), see"),
        ("/data/my models/tiny/config.json is missing", "tiny/config.json is missing"),
        ("load it: POST /admin/models/load, GET /v1/models", "load it: POST /admin/models/load, GET /v1/models"),
        ("see /docs, https://host.example/a/b or org/name/x", "see /docs, https://host.example/a/b or org/name/x"),
    ],
)
def test_messages_lose_paths_and_keep_routes_and_addresses(text: str, shown: str) -> None:
    assert without_paths(text, [Path("/data"), Path("/data/my models")]) == shown
