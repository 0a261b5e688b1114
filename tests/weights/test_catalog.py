"""Tests of listing, finding and checking models on disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmx_lab.errors import ModelNotFoundError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, ModelEntry, ModelLocation
from lmx_lab.weights import Catalog
from lmx_lab.weights.facts import read_folder
from lmx_lab.weights.locations import join_formats
from tests.support.gguf import EXACT, LOSSY, store_copy

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


def test_without_models_on_disk_the_list_is_empty(catalog):
    assert catalog.scan() == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("large-modle", "on disk; did you mean 'large-model'? Available are: large-model. Fetch"),
        ("smolm2-135m", "on disk; did you mean 'smollm2-135m'? Available are: large-model. Fetch"),
        ("ecko", "on disk; did you mean 'echo'? Available are: large-model. Fetch"),
        ("something else", "on disk; available are: large-model. Fetch"),
    ],
)
def test_an_unknown_name_is_refused_with_the_most_similar_one(catalog, settings, make_model, name, remedy):
    make_model(settings.models_folder / "large-model")
    for look in (catalog.find_formats, catalog.fetch):
        with pytest.raises(ModelNotFoundError) as caught:
            look(name)
        assert caught.value.message.startswith(f"there is no model {name!r} {remedy}")


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


def damage(folder, how):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    index = {"weight_map": {"w": "model-00002-of-00002.safetensors"}}
    changes = {
        "no config": (folder / "config.json").unlink,
        "config no JSON": lambda: (folder / "config.json").write_text("{"),
        "config deeply nested": lambda: (folder / "config.json").write_text("[" * 100_000),
        "config a list": lambda: (folder / "config.json").write_text("[]"),
        "no model_type": lambda: (folder / "config.json").write_text("{}"),
        "own code": lambda: (folder / "config.json").write_text('{"model_type": "llama", "model_file": "m.py"}'),
        "only own code": lambda: (folder / "config.json").write_text('{"auto_map": {"AutoModel": "m.M"}}'),
        "no tokenizer": (folder / "tokenizer.json").unlink,
        "no weights": weights.unlink,
        "empty weights": lambda: weights.write_bytes(b""),
        "cut in the data": lambda: weights.write_bytes(whole[:-1]),
        "cut in the header": lambda: weights.write_bytes(whole[:20]),
        "longer than its header says": lambda: weights.write_bytes(whole + b"x"),
        "huge header": lambda: weights.write_bytes(b"\xff" * 8 + whole),
        "header no object": lambda: weights.write_bytes(b"\x02" + bytes(7) + b"[]"),
        "header malformed": lambda: weights.write_bytes(b"\x07" + bytes(7) + b'{"w":1}'),
        "missing shard": lambda: (folder / "model.safetensors.index.json").write_text(json.dumps(index)),
        "missing shard, no index": lambda: weights.rename(folder / "model-00001-of-00002.safetensors"),
        "index elsewhere": lambda: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"w": "../../x.safetensors"}}'
        ),
        "index malformed": lambda: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": 1}}'),
    }
    changes[how]()


DAMAGES = {
    "no config": "no config.json", "config no JSON": "JSON", "config deeply nested": "JSON", "config a list": "JSON",
    "no model_type": "model_type", "own code": "custom code", "only own code": "custom code",
    "no tokenizer": "tokenizer", "no weights": "safetensors", "empty weights": "truncated",
    "cut in the data": "truncated", "cut in the header": "truncated", "longer than its header says": "too long",
    "huge header": "not a safetensors", "header no object": "not a JSON object", "header malformed": "invalid",
    "missing shard": "lacks 2 of 3", "missing shard, no index": "lacks 1 of 2", "index elsewhere": "invalid",
    "index malformed": "invalid",
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_folder_is_rejected_with_the_reason_and_not_listed(catalog, tmp_path, make_model, how):
    folder = make_model(tmp_path / "model")
    entry = catalog.resolve(str(folder))
    damage(folder, how)
    for look in (lambda: catalog.check(entry), lambda: catalog.resolve(str(folder))):
        with pytest.raises(UnusableModelError, match=DAMAGES[how]):
            look()
    assert Catalog(Settings(home=tmp_path / "home", model_folders=(tmp_path,))).scan() == []


def test_paths_are_accepted_from_local_callers_only(catalog, tmp_path, make_model):
    folder = make_model(tmp_path / "model")
    entry = catalog.resolve(str(folder))
    assert (entry.id, entry.path, entry.source) == (str(folder), folder, "path")
    with pytest.raises(ModelNotFoundError):
        catalog.resolve(str(folder), local=False)


@pytest.mark.parametrize("name", ["", ".", "..", "../extra/m", "/etc", "~", "a\0b", "\ud800", "x" * 5000, "org/../m"])
def test_unusual_names_from_remote_callers_find_nothing(catalog, tmp_path, make_model, name):
    make_model(tmp_path / "extra/m")
    with pytest.raises(ModelNotFoundError):
        catalog.resolve(name, local=False)


def test_the_error_for_a_missing_model_names_the_available_models_and_the_next_step(catalog, tmp_path, make_model):
    make_model(tmp_path / "extra/present")
    with pytest.raises(ModelNotFoundError, match=r"'absent'.*present.*lmx-lab pull.*smollm2-135m"):
        catalog.resolve("absent")


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


def test_fetching_an_unknown_name_without_a_slash_does_not_contact_the_hub(catalog):
    with pytest.raises(ModelNotFoundError):
        catalog.fetch("unheard-of")


def test_importing_the_package_imports_nothing_heavy():
    heavy = {"mlx", "transformers", "tokenizers", "huggingface_hub"}
    code = f"import sys, lmx_lab.weights.catalog; print({heavy} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


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
