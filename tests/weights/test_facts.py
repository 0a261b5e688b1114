"""Tests of GGUF models: their kinds, split files, files that are not models, and tokens that fill gaps."""

import json
from dataclasses import replace

import pytest

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ECHO
from lmx_lab.weights.facts import read_gguf
from lmx_lab.weights.tokenizer_files import NAMES, InfillTokens, can_infill, find_infill_tokens, special_tokens
from tests.support.engines import entry_of
from tests.support.gguf import gguf_bytes, random_tensor

VOCABULARY = {"tokenizer.ggml.model": "bert"}
TENSOR = {"token_embd.weight": random_tensor("F32", 32)}
FILE = "reranker-embedding-chat.gguf"


@pytest.fixture
def listed(catalog, tmp_path):
    """Return the entry of a file with the given metadata and tensors, under a name without information."""

    def make(metadata, tensors):
        put(tmp_path / "extra" / FILE, gguf_bytes(metadata, tensors))
        return catalog.scan()

    return make


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("architecture", "metadata", "heads", "kind"),
    [
        ("qwen3", {}, (), "chat"),
        ("qwen3", {"qwen3.pooling_type": 0}, (), "chat"),
        ("qwen3", {"qwen3.pooling_type": 3}, (), "embedding"),
        ("qwen3", {"qwen3.pooling_type": 4}, ("cls.output.weight",), "rerank"),
        ("qwen3", {"bert.pooling_type": 4}, (), "chat"),
        ("bert", {}, (), "embedding"),
        ("bert", {"bert.pooling_type": 0}, (), "embedding"),
        ("bert", {"bert.pooling_type": 2}, (), "embedding"),
        ("bert", {"bert.pooling_type": 4}, (), "rerank"),
        ("bert", {}, ("cls.weight", "cls.output.weight"), "rerank"),
        ("nomic-bert-moe", {}, (), "embedding"),
        ("jina-bert-v3", {}, ("cls.output.weight",), "rerank"),
        ("t5encoder", {}, (), "embedding"),
    ],
)
def test_the_kind_is_determined_by_the_header(listed, architecture, metadata, heads, kind):
    more = {name: random_tensor("F32", 32) for name in heads}
    (entry,) = listed({"general.architecture": architecture} | VOCABULARY | dict(metadata), TENSOR | more)
    assert (entry.kind, entry.architecture, entry.format) == (kind, architecture, "gguf")


def test_the_kinds_of_real_files_are_detected(catalog, tiny_gguf, minilm_gguf, reranker_gguf):
    kinds = [catalog.resolve(str(path)).kind for path in (tiny_gguf, minilm_gguf, reranker_gguf)]
    assert kinds == ["chat", "embedding", "rerank"]


@pytest.mark.parametrize(
    ("metadata", "tensors", "reason"),
    [
        ({"general.type": "mmproj", "general.architecture": "clip"}, TENSOR, "projector"),
        ({"general.architecture": "clip"}, TENSOR, "projector.*load the model"),
        ({"general.type": "adapter", "general.architecture": "llama"}, TENSOR, "adapter.*load that model"),
        ({"general.type": "imatrix"}, TENSOR, "imatrix"),
        ({"general.architecture": "controlvector"}, TENSOR, "control vector"),
        ({"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}, {}, "no weights.*fetch the model"),
        (VOCABULARY, TENSOR, "does not name its architecture"),
        ({"general.architecture": "flux"}, TENSOR, "no vocabulary"),
        ({"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}, TENSOR, "no vocabulary"),
    ],
)
def test_a_file_that_is_not_a_language_model_is_rejected_with_the_reason_and_not_listed(
    listed, catalog, metadata, tensors, reason
):
    assert listed(metadata, tensors) == []
    for look in (catalog.resolve, catalog.fetch):
        with pytest.raises(UnusableModelError, match=rf"{FILE} .*{reason}"):
            look(FILE)


def test_a_split_model_is_one_entry_and_is_found_by_any_part(catalog, tmp_path, write_split):
    parts = write_split(tmp_path / "extra/tiny")
    (entry,) = catalog.scan()
    assert (entry.id, entry.path) == ("tiny-00001-of-00003.gguf", parts[0])
    assert entry.size_bytes == sum(part.stat().st_size for part in parts)
    assert (entry.architecture, entry.context_length, entry.quantization) == ("llama", 512, "F32")
    assert [catalog.resolve(str(part)) for part in parts] == [entry] * 3
    assert len(read_gguf(parts[0]).tensors) == 6


def test_the_first_part_of_a_split_model_can_contain_no_weights(catalog, tmp_path, write_split):
    first, *_ = write_split(tmp_path / "extra/tiny", 2)
    metadata = {"general.architecture": "llama", "split.no": 0, "split.count": 2, "split.tensors.count": 2}
    first.write_bytes(gguf_bytes(metadata | VOCABULARY, {}))
    (entry,) = catalog.scan()
    assert entry.quantization == "F32"


@pytest.mark.parametrize("absent", [(2,), (1,), (1, 3)])
def test_missing_parts_are_named_in_the_error_for_any_part(catalog, tmp_path, write_split, absent):
    parts = write_split(tmp_path / "extra/tiny")
    for number in absent:
        parts[number - 1].unlink()
    named = ", ".join(f"tiny-0000{number}-of-00003.gguf" for number in absent)
    assert catalog.scan() == []
    for name in (*map(str, parts), "tiny-00001-of-00003.gguf"):
        with pytest.raises(UnusableModelError, match=rf"lacks {len(absent)} of its 3 parts: {named}\. Put them"):
            catalog.resolve(name)


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        (2, {"split.count": 4}, r"-00002-of-00003\.gguf is part 2 of 3 by its name, and part 2 of 4"),
        (2, {"split.no": 2}, r"-00002-of-00003\.gguf is part 2 of 3 by its name, and part 3 of 3"),
        (1, {"split.count": "x"}, r"-00001-of-00003\.gguf is part 1 of 3 by its name, and not a part"),
        (1, {"split.tensors.count": 7}, "do not belong to one model: 3 parts contain 6 tensors, 7 different ones"),
    ],
)
def test_parts_of_different_files_are_rejected(tmp_path, write_split, part, changes, reason):
    first, *_ = write_split(tmp_path / "tiny", changes={part: changes})
    with pytest.raises(UnusableModelError, match=rf"{reason}.*Fetch all parts again"):
        read_gguf(first)


def test_damaged_parts_are_named(tmp_path, write_split):
    first, second, _ = write_split(tmp_path / "tiny")
    whole = second.read_bytes()
    tensors = {f"blk.{at}.attn_norm.weight": random_tensor("F32", 256) for at in (0, 1)}
    for content, reason in (
        (gguf_bytes({"split.no": 1, "split.count": 3}, tensors), "do not belong to one model"),
        (whole[:-32], r"tiny-00002-of-00003\.gguf is truncated.*fetch it again"),
    ):
        second.write_bytes(content)
        with pytest.raises(UnusableModelError, match=reason):
            read_gguf(first)
    with pytest.raises(UnusableModelError, match=r"one of 3 parts.*NAME-00001-of-00003\.gguf"):
        read_gguf(first.rename(tmp_path / "mine.gguf"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty; fetch it again"),
        (b"GGU", "not a GGUF file.*Fetch it again"),
        (b"PK\3\4" + bytes(99), "not a GGUF file.*use another file"),
        (b"<html>404</html>", "not a GGUF file"),
        (b"GGUF" + bytes(3), "not a GGUF file"),
        (b"GGUF\0\0\0\3" + bytes(16), "version 50331648"),
    ],
)
def test_files_of_other_kinds_are_rejected_with_the_next_step(catalog, tmp_path, data, reason):
    path = put(tmp_path / "extra/x.gguf", data)
    assert catalog.scan() == []
    with pytest.raises(UnusableModelError, match=rf"x\.gguf .*{reason}"):
        catalog.resolve(str(path))


def test_a_folder_with_the_name_of_a_gguf_file_is_rejected(catalog, tmp_path):
    (tmp_path / "extra/x.gguf").mkdir(parents=True)
    assert catalog.scan() == []
    with pytest.raises(UnusableModelError, match=r"x\.gguf contains no model: there is no config\.json"):
        catalog.resolve(str(tmp_path / "extra/x.gguf"))


def test_a_broken_link_is_rejected(catalog, tmp_path):
    link = tmp_path / "extra/x.gguf"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "gone.gguf")
    assert catalog.scan() == []
    for name in ("x.gguf", str(link)):
        with pytest.raises(UnusableModelError, match=r"x\.gguf is a link to .*gone\.gguf.*fetch the file again"):
            catalog.resolve(name)


def test_a_folder_with_one_gguf_model_is_an_entry_for_that_model(catalog, tmp_path, tiny_llama, write_split):
    """Alone, with its projector and its license, split, and in a subfolder, as other programs store them."""
    for path in ("home/models/alone/model.gguf", "extra/seeing/model-Q4_0.gguf", "extra/org/name/model.gguf"):
        put(tmp_path / path, tiny_llama())
    put(tmp_path / "extra/seeing/mmproj-F16.gguf", b"")
    put(tmp_path / "home/models/alone/LICENSE", b"")
    write_split(tmp_path / "extra/split/model")
    found = {entry.id: entry.path.name for entry in catalog.scan()}
    split = "model-00001-of-00003.gguf"
    assert found == {"alone": "model.gguf", "org/name": "model.gguf", "seeing": "model-Q4_0.gguf", "split": split}
    assert catalog.resolve(str(tmp_path / "extra/split")) == catalog.resolve("split")


def test_several_gguf_models_of_a_folder_are_named_after_their_files(catalog, tmp_path, tiny_llama):
    for path in ("extra/both/a.gguf", "extra/both/b.gguf", "extra/org/name/a.gguf", "extra/org/name/b.GGUF"):
        put(tmp_path / path, tiny_llama())
    ids = [entry.id for entry in catalog.scan()]
    assert ids == ["both/a.gguf", "both/b.gguf", "org/name/a.gguf", "org/name/b.GGUF"]
    with pytest.raises(UnusableModelError, match=r"both contains 2 GGUF models; name one of them: a\.gguf, b\.gguf"):
        catalog.resolve(str(tmp_path / "extra/both"))


def test_an_mlx_folder_that_contains_a_gguf_file_is_an_mlx_model(catalog, tmp_path, make_model, tiny_llama):
    put(make_model(tmp_path / "extra/m") / "m.gguf", tiny_llama())
    assert [(entry.id, entry.format) for entry in catalog.scan()] == [("m", "mlx")]


# The tokens with which a model fills a gap in a text


@pytest.mark.parametrize("names", NAMES)
def test_the_tokens_of_each_family_are_found(names):
    vocabulary = {"a": 0, names[2]: 5, names[0]: 6, names[1]: 7, "<|endoftext|>": 8, "<EOT>": 9}
    assert find_infill_tokens(vocabulary.get) == InfillTokens(6, 7, 5, frozenset({8, 9}))
    del vocabulary[names[1]]
    assert find_infill_tokens(vocabulary.get) is None


def test_a_folder_is_searched_without_parsing_its_tokenizer(tmp_path):
    entry = replace(ECHO, format="mlx", path=tmp_path)
    assert can_infill(ECHO)
    assert not can_infill(entry)
    file = tmp_path / "tokenizer.json"
    for names in NAMES:
        for ascii_only in (False, True):
            tokens = [{"content": name} for name in names]
            file.write_text(json.dumps({"added_tokens": tokens}, ensure_ascii=ascii_only), encoding="utf-8")
            assert can_infill(entry)
        file.write_text(json.dumps({"added_tokens": tokens[:2]}), encoding="utf-8")
        assert not can_infill(entry)


def test_special_tokens_are_read_from_both_formats(tiny, tiny_gguf):
    tokens = special_tokens(tiny)
    assert tokens["eos_token"] == "<|im_end|>"
    gguf = special_tokens(entry_of(tiny_gguf, "tiny"))
    assert {name: gguf[name] for name in ("bos_token", "eos_token")} == {
        name: tokens[name] for name in ("bos_token", "eos_token")
    }
    assert special_tokens(ECHO) == {}


def test_special_tokens_may_be_objects_and_files_may_be_damaged(tiny, tmp_path):
    entry = replace(tiny, path=tmp_path)
    put(tmp_path / "tokenizer_config.json", b'{"eos_token": {"content": "</s>"}, "bos_token": null, "pad_token": 5}')
    assert special_tokens(entry) == {"eos_token": "</s>"}
    put(tmp_path / "tokenizer_config.json", b"{")
    assert special_tokens(entry) == {}
