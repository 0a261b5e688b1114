"""Tests of listing, finding and checking models on disk."""

from pathlib import Path

import pytest

from lmx_lab.errors import ModelNotFoundError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, ModelEntry, ModelLocation
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.facts import read_folder
from lmx_lab.weights.locations import join_formats
from tests.support.gguf import EXACT, LOSSY, split_gguf, store_copy

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_hub_cache(make_model, hub, repo):
    folder = hub / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return make_model(folder / "snapshots" / COMMIT)


def test_scan_lists_store_hub_cache_and_extra_folders_by_id(catalog, tmp_path, make_model):
    make_model(tmp_path / "home/models/small")
    make_model(tmp_path / "home/models/org/name")
    put_in_hub_cache(make_model, tmp_path / "hub", "hub-org/big--model")
    make_model(tmp_path / "extra/mine")
    found = [(entry.id, entry.source) for entry in catalog.scan()]
    assert found == [("hub-org/big--model", "hub"), ("mine", "folder"), ("org/name", "store"), ("small", "store")]


def test_a_model_of_the_store_precedes_one_of_the_hub_with_the_same_id(catalog, tmp_path, make_model):
    for folder in ("home/models/org/a", "extra/org/a", "extra/org/b"):
        make_model(tmp_path / folder)
    for repo in ("org/a", "org/b"):
        put_in_hub_cache(make_model, tmp_path / "hub", repo)
    assert [(entry.id, entry.source) for entry in catalog.scan()] == [("org/a", "store"), ("org/b", "hub")]
    assert catalog.resolve("org/b").source == "hub"


def test_a_complete_copy_precedes_a_damaged_one(catalog, tmp_path, make_model):
    (make_model(tmp_path / "home/models/org/a") / "model.safetensors").write_bytes(b"")
    put_in_hub_cache(make_model, tmp_path / "hub", "org/a")
    assert [entry.source for entry in catalog.scan()] == ["hub"]
    assert catalog.resolve("org/a").source == "hub"


def test_an_extra_folder_can_be_a_model_itself(tmp_path, make_model):
    catalog = Catalog(Settings(home=tmp_path / "home", model_folders=(make_model(tmp_path / "one"),)))
    assert [entry.id for entry in catalog.scan()] == ["one"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("large-modle", "did you mean 'large-model'? Available are: large-model. Fetch one with `lmx-lab pull ID`: a "),
        ("smolm2-135m", "did you mean 'smollm2-135m'? Available are: large-model. Fetch"),
        ("ecko", "did you mean 'echo'? Available are: large-model. Fetch"),
        ("something else", "available are: large-model. Fetch one with `lmx-lab pull ID`: a starter (smollm2-135m, "),
    ],
)
def test_an_unknown_name_is_refused_with_the_most_similar_one(catalog, settings, make_model, name, remedy):
    make_model(settings.models_folder / "large-model")
    for look in (catalog.find_formats, catalog.fetch, catalog.resolve):
        with pytest.raises(ModelNotFoundError) as caught:
            look(name)
        assert caught.value.message.startswith(f"there is no model {name!r} on disk; {remedy}")


@pytest.fixture
def files(settings, tmp_path, tiny_gguf, monkeypatch):
    """GGUF files in the store, in its folders, and in the working folder."""
    monkeypatch.chdir(tmp_path)
    paths = {name: settings.models_folder / name for name in ("Top-Q4_K_M.gguf", "one/Only.gguf", "two/A.gguf")}
    paths |= {"two/B.gguf": settings.models_folder / "two/B.gguf", "here.gguf": tmp_path / "here.gguf"}
    paths["A.gguf"] = tmp_path / "A.gguf"
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tiny_gguf)
    return paths


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Top-Q4_K_M.gguf", "Top-Q4_K_M.gguf"),
        ("Top-Q4_K_M", "Top-Q4_K_M.gguf"),
        ("top-q4_k_m", "Top-Q4_K_M.gguf"),
        ("one", "one/Only.gguf"),
        ("Only", "one/Only.gguf"),
        ("Only.gguf", "one/Only.gguf"),
        ("two/B", "two/B.gguf"),
        ("B.gguf", "two/B.gguf"),
        ("here", "here.gguf"),
        ("./here", "here.gguf"),
        # A path in the working folder is meant rather than an alias, but not without its ending.
        ("A.gguf", "A.gguf"),
        ("A", "two/A.gguf"),
    ],
)
def test_a_gguf_file_is_found_by_its_name_without_the_ending(catalog, files, name, file):
    assert catalog.resolve(name).path == files[file]
    assert catalog.fetch(name).path == files[file]


def test_a_split_model_is_found_by_its_name_without_the_number_of_a_part(catalog, settings, tiny_gguf):
    parts = split_gguf(tiny_gguf, 2, settings.models_folder)
    assert catalog.resolve(parts[0].name.partition("-00001")[0]).path == parts[0]


@pytest.mark.parametrize(
    ("name", "similar"), [("top-q4_k", "Top-Q4_K_M"), ("./her", "./here.gguf"), ("{cwd}/hre", "{cwd}/here.gguf")]
)
@pytest.mark.usefixtures("files")
def test_a_similar_file_is_suggested(catalog, tmp_path, name, similar):
    with pytest.raises(ModelNotFoundError, match="did you mean") as caught:
        catalog.fetch(name.format(cwd=tmp_path))
    assert f"did you mean {similar.format(cwd=tmp_path)!r}?" in caught.value.message


@pytest.mark.parametrize("length", [10, 70, 78, 85, 200])
def test_a_similar_file_is_suggested_in_a_folder_of_any_length(catalog, tmp_path, tiny_gguf, length):
    folder = tmp_path / ("f" * length)
    folder.mkdir()
    for name in ("A.gguf", "here.gguf"):
        (folder / name).symlink_to(tiny_gguf)
    with pytest.raises(ModelNotFoundError, match=r"here\.gguf'\?"):
        catalog.fetch(f"{folder}/hre")


def test_other_machines_learn_no_files_beside_a_path(catalog, files):
    path = str(files["here.gguf"])
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.resolve(path[: -len(".gguf")], local=False)
    assert "here.gguf" not in caught.value.message


def test_a_ref_of_the_hub_cache_cannot_lead_outside_its_snapshots(catalog, tmp_path, make_model):
    snapshot = put_in_hub_cache(make_model, tmp_path / "hub", "org/a")
    make_model(tmp_path / "elsewhere")
    (snapshot.parents[1] / "refs" / "main").write_text("../../../elsewhere")
    assert catalog.scan() == []


@pytest.mark.parametrize(
    ("config", "files", "kind"),
    [
        ({}, {}, "chat"),
        ({"architectures": None}, {}, "chat"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, {"modules.json": {}}, "embedding"),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"1_Pooling/config.json": {}}, "embedding"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, {}, "embedding"),
        ({"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta"}, {}, "embedding"),
        ({"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta"}, {}, "rerank"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, {"modules.json": {}}, "rerank"),
        ({}, {"config_sentence_transformers.json": {"model_type": "CrossEncoder"}, "modules.json": {}}, "rerank"),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"modules.json": [{"type": "a.logit_score.LogitScore"}]}, "rerank"),
        ({"architectures": ["Qwen3Model"], "model_type": "qwen3"}, {}, "embedding"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, {}, "chat"),
    ],
)
def test_the_kind_of_a_model_is_determined_by_its_files(tmp_path, make_model, config, files, kind):
    assert read_folder(make_model(tmp_path / "reranker-embedding-chat", config, files)).kind == kind


@pytest.mark.parametrize(
    ("card", "kind"),
    [
        ("---\nlicense: mit\npipeline_tag: text-ranking\n---\n# Model", "rerank"),
        ("---\r\npipeline_tag: 'feature-extraction'\r\n---\r\n", "embedding"),
        ("---\npipeline_tag: sentence-similarity\n---", "embedding"),
        ("---\npipeline_tag: text-generation\n---\n", "chat"),
        ("---\nlicense: mit\n---\npipeline_tag: text-ranking\n", "chat"),
        ("pipeline_tag: text-ranking\n", "chat"),
        ("---\npipeline_tag: text-ranking\n" + "x" * 70_000 + "\n---\n", "chat"),
        ("\xff\xfe---", "chat"),
    ],
)
def test_the_model_card_determines_the_kind_of_a_decoder(tmp_path, make_model, card, kind):
    folder = make_model(tmp_path / "m", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    (folder / "README.md").write_bytes(card.encode("latin-1"))
    assert read_folder(folder).kind == kind


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        ({}, "float16"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit, group 64"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "mxfp4, 4-bit, group 32"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "awq, 4-bit, group 128"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ],
)
def test_quantizations_have_one_format(catalog, tmp_path, make_model, config, quantization):
    make_model(tmp_path / "extra/m", config)
    assert catalog.resolve("m").quantization == quantization


@pytest.mark.parametrize(
    ("config", "files", "length"),
    [
        ({}, {}, 2048),
        ({"max_position_embeddings": None}, {}, None),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 99}}, {}, 99),
        ({}, {"sentence_bert_config.json": {"max_seq_length": 256}}, 256),
    ],
)
def test_context_length_is_read_from_the_files(tmp_path, make_model, config, files, length):
    assert read_folder(make_model(tmp_path / "m", config, files)).context_length == length


WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
# A file; its new content as a function of the old one, its new name, or None if it is removed; the reason of the error.
DAMAGES = {
    "no config": (CONFIG, None, "no config.json"),
    "config no JSON": (CONFIG, lambda _: b"{", "JSON"),
    "config deeply nested": (CONFIG, lambda _: b"[" * 100_000, "JSON"),
    "config a list": (CONFIG, lambda _: b"[]", "JSON"),
    "no model_type": (CONFIG, lambda _: b"{}", "model_type"),
    "own code": (CONFIG, lambda _: b'{"model_type": "llama", "model_file": "m.py"}', "custom code"),
    "only own code": (CONFIG, lambda _: b'{"auto_map": {"AutoModel": "m.M"}}', "custom code"),
    "no tokenizer": ("tokenizer.json", None, "tokenizer"),
    "no weights": (WEIGHTS, None, "safetensors"),
    "empty weights": (WEIGHTS, lambda _: b"", "truncated"),
    "cut in the data": (WEIGHTS, lambda whole: whole[:-1], "truncated"),
    "cut in the header": (WEIGHTS, lambda whole: whole[:20], "truncated"),
    "longer than its header says": (WEIGHTS, lambda whole: whole + b"x", "too long"),
    "huge header": (WEIGHTS, lambda whole: b"\xff" * 8 + whole, "not a safetensors"),
    "header no object": (WEIGHTS, lambda _: b"\x02" + bytes(7) + b"[]", "not a JSON object"),
    "header malformed": (WEIGHTS, lambda _: b"\x07" + bytes(7) + b'{"w":1}', "invalid"),
    "missing shard": (INDEX, lambda _: b'{"weight_map": {"w": "model-00002-of-00002.safetensors"}}', "lacks 2 of 3"),
    "missing shard, no index": (WEIGHTS, "model-00001-of-00002.safetensors", "lacks 1 of 2"),
    "index elsewhere": (INDEX, lambda _: b'{"weight_map": {"w": "../../x.safetensors"}}', "invalid"),
    "index malformed": (INDEX, lambda _: b'{"weight_map": {"w": 1}}', "invalid"),
}


@pytest.mark.parametrize(("name", "change", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_rejected_with_the_reason_and_not_listed(
    catalog, tmp_path, make_model, *, name, change, reason
):
    file = make_model(tmp_path / "model") / name
    entry = catalog.resolve(str(file.parent))
    if callable(change):
        file.write_bytes(change(file.read_bytes() if file.exists() else b""))
    elif change is None:
        file.unlink()
    else:
        file.rename(file.with_name(change))
    for look in (lambda: catalog.check(entry), lambda: catalog.resolve(str(file.parent))):
        with pytest.raises(UnusableModelError, match=reason):
            look()
    assert Catalog(Settings(home=tmp_path / "home", model_folders=(tmp_path,))).scan() == []


def test_paths_are_accepted_from_local_callers_only(catalog, tmp_path, make_model):
    folder = make_model(tmp_path / "model")
    entry = catalog.resolve(str(folder))
    assert (entry.id, entry.path, entry.source) == (str(folder), folder, "path")
    with pytest.raises(ModelNotFoundError):
        catalog.resolve(str(folder), local=False)


def test_the_id_of_a_starter_never_refers_to_a_folder_in_the_working_directory(catalog, tmp_path, monkeypatch):
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError):
        catalog.resolve("smollm2-135m")


def test_echo_is_a_reserved_id_and_a_folder_with_this_name_is_found_by_its_path(catalog, tmp_path, make_model):
    folders = [make_model(tmp_path / "home/models/echo"), make_model(tmp_path / "extra/echo")]
    assert catalog.scan() == []
    assert catalog.resolve("echo") == catalog.fetch("echo") == catalog.convert("echo") == ECHO
    assert catalog.resolve("echo", local=False) == ECHO
    catalog.check(ECHO)
    for folder in folders:
        assert catalog.resolve(str(folder)).id == str(folder)


def test_fetching_a_stored_model_returns_it_immediately(catalog, tmp_path, make_model):
    make_model(tmp_path / "extra/m")
    entry = catalog.fetch("m")
    assert isinstance(entry, ModelEntry)
    assert entry == catalog.resolve("m")


def test_a_quantized_copy_is_listed_as_it_is_found(catalog, settings, tmp_path, tiny_llama):
    original = tmp_path / "extra" / "m.gguf"
    original.parent.mkdir()
    original.write_bytes(tiny_llama())
    copy = store_copy(settings.home, original, LOSSY)
    listed = {entry.path: entry for entry in catalog.scan()}
    assert listed == {entry.path: entry for entry in catalog.find_formats("m.gguf", all_formats=True)}
    assert [listed[path].source for path in (original, copy)] == ["folder", "folder"]
    assert listed[copy].aliases == catalog.resolve("m.gguf:Q4_0").aliases


def test_a_copy_of_a_file_of_the_hub_has_the_spellings_of_its_id_only_if_it_is_loaded_by_default():
    file = ModelLocation(id="org/name:Q4_1", path=Path("/hub/m.gguf"), source="hub", aliases=("org/name",))
    for copy, found in ((EXACT, [True, True]), (LOSSY, [True, False])):
        stored = ModelLocation(id="m-q8_0", path=Path("/q/m.gguf"), source="store", converted_from=file.path, copy=copy)
        original, joined = join_formats([file, stored])
        assert joined.is_format_of(original)
        assert (joined.id, joined.source) == (file.id, "hub")
        assert joined.has_alias(f"org/name:Q4_1:{copy.type}")
        assert [location.has_alias("org/name") for location in (original, joined)] == found
