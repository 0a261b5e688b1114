"""The GGUF files that other tests use are what they say: llama.cpp itself loads them, with nothing of the lab's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from lmx_lab.values.models import ModelEntry
from tests.support import gguf
from tests.support.gguf import (
    TEMPLATE_KEY,
    kept,
    read_gguf,
    split_gguf,
    with_template,
    with_tokens,
    with_values,
)
from tests.support.model_server import raw_server
from tests.support.models import MARKERS, THINKER_TEMPLATE, embed, load

pytestmark = pytest.mark.slow
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
EXACT: Mapping[str, Any] = {"cache_type_k": 0, "cache_type_v": 0, "flash_attn_type": 0}
"""Keys and values in float32, and no attention that rounds: as MLX computes."""


@pytest.fixture(scope="module")
def tiny_server(tiny_gguf: Path) -> Iterator[httpx2.Client]:
    with raw_server(tiny_gguf, **EXACT) as client:
        yield client


@pytest.fixture(scope="module")
def reranker(reranker_gguf: Path) -> Iterator[httpx2.Client]:
    with raw_server(reranker_gguf, rank=True, embedding=True) as client:
        yield client


def answer(client: httpx2.Client, path: str, body: Mapping[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(client: httpx2.Client, prompt: list[int], tokens: int) -> list[int]:
    wanted = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return list(answer(client, "/completion", wanted)["tokens"])


def test_the_tiny_llama_says_what_mlx_says_with_the_same_weights(tiny_server: httpx2.Client, tiny: ModelEntry) -> None:
    model, _ = load_model(tiny.path)
    prompt = answer(tiny_server, "/tokenize", {"content": "Once upon a time"})["tokens"]
    ids = list(prompt)
    for _ in range(24):
        ids.append(int(np.argmax(np.array(model(mx.array([ids]))[0, -1]))))
    assert said(tiny_server, prompt, 24) == ids[len(prompt) :]


def test_the_tiny_llama_reads_and_writes_chats_as_smollm2(
    tiny_server: httpx2.Client, tiny: ModelEntry, smollm2_gguf: Path
) -> None:
    text = "<|im_start|>user\nNaïve 東京 😀 1234\n\n  x = y<|im_end|>"
    ids = answer(tiny_server, "/tokenize", {"content": text, "parse_special": True, "add_special": True})["tokens"]
    assert ids == Tokenizer.from_file(str(tiny.path / "tokenizer.json")).encode(text).ids
    template = tiny_server.get("/props").json()["chat_template"]
    assert template.encode() == read_gguf(smollm2_gguf).values[TEMPLATE_KEY][12:]


def prompt_of(client: httpx2.Client, **more: Any) -> str:
    return str(answer(client, "/apply-template", {"messages": [USER], **more})["prompt"])


def test_a_template_can_have_tools_and_thoughts_that_are_switched_off(tiny_gguf: Path, tmp_path: Path) -> None:
    with raw_server(with_template(tiny_gguf, gguf.TOOLS_TEMPLATE, tmp_path)) as client:
        can = client.get("/props").json()["chat_template_caps"]
        assert can["supports_tools"]
        assert can["supports_tool_calls"]
        assert '{"type": "function", "function": {"name": "add"' in prompt_of(client, tools=[TOOL])
        assert prompt_of(client).endswith("<|im_start|>assistant\n")
        assert prompt_of(client, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")


def test_a_template_can_open_the_thoughts(tiny_gguf: Path, tmp_path: Path) -> None:
    with raw_server(with_template(tiny_gguf, gguf.THINKS_FIRST_TEMPLATE, tmp_path)) as client:
        assert prompt_of(client).endswith("<|im_start|>assistant\n<think>\n")
        message = answer(client, "/v1/chat/completions", {"messages": [USER], "max_tokens": 4})["choices"][0]["message"]
        assert message["reasoning_content"]
        assert not message["content"]


def test_a_template_can_refuse_system_messages(tiny_gguf: Path, tmp_path: Path) -> None:
    with raw_server(with_template(tiny_gguf, gguf.NO_SYSTEM_TEMPLATE, tmp_path)) as client:
        assert not client.get("/props").json()["chat_template_caps"]["supports_system_role"]
        system = {"role": "system", "content": "Be brief."}
        prompt = answer(client, "/apply-template", {"messages": [system, USER]})["prompt"]
        assert prompt == "<|im_start|>user\nBe brief.\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_file_can_have_no_template(tiny_gguf: Path, tmp_path: Path) -> None:
    path = with_template(tiny_gguf, None, tmp_path)
    assert read_gguf(tiny_gguf).values.keys() - read_gguf(path).values.keys() == {TEMPLATE_KEY}
    with raw_server(path) as client:
        # llama.cpp puts a plain one in its place.
        assert prompt_of(client) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_can_become_markers_of_thoughts_and_calls(tiny_gguf: Path, tmp_path: Path) -> None:
    with raw_server(with_tokens(tiny_gguf, MARKERS, tmp_path / "thinker.gguf", THINKER_TEMPLATE)) as client:
        for marker in MARKERS.values():
            (token,) = answer(client, "/tokenize", {"content": marker, "parse_special": False})["tokens"]
            assert answer(client, "/detokenize", {"tokens": [token]})["content"] == marker
        assert prompt_of(client, chat_template_kwargs={"open_thoughts": True}).endswith("<think>\n")


def test_minilm_embeds_as_on_mlx(minilm_gguf: Path, minilm: ModelEntry) -> None:
    texts = ["A cat sits on the mat.", "Kittens rest on rugs.", "Shares fell sharply on Monday.", "Ünïcode, CAFÉ 東京!"]
    with raw_server(minilm_gguf, embedding=True) as client:
        items = answer(client, "/v1/embeddings", {"input": texts})["data"]
    ours = np.array([item["embedding"] for item in items])
    theirs = embed(load(minilm), *texts)
    assert (np.einsum("ij,ij->i", ours, theirs) > 0.9998).all()
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=0.002)


def test_the_reranker_scores_each_pair_as_bert_writes_it(reranker: httpx2.Client) -> None:
    documents = ["Paris is the capital of France.", "Bread is made of flour.", "x"]
    query = "capital of France?"
    reply = answer(reranker, "/v1/rerank", {"query": query, "documents": documents})
    scores = {item["index"]: item["relevance_score"] for item in reply["results"]}
    assert max(scores.values()) - min(scores.values()) > 0.1

    def ids(text: str) -> list[int]:
        return list(answer(reranker, "/tokenize", {"content": text, "add_special": False})["tokens"])

    pairs = [[101, *ids(query), 102, *ids(document), 102] for document in documents]
    raw = answer(reranker, "/embedding", {"content": pairs, "embd_normalize": -1})
    assert [item["embedding"][0][0] for item in raw] == pytest.approx([scores[at] for at in range(3)], abs=1e-4)


@pytest.mark.parametrize(("parts", "empty_first"), [(2, False), (3, True), (20, False)])
def test_a_set_of_parts_is_the_same_model(
    tiny_gguf: Path, tmp_path: Path, tiny_server: httpx2.Client, parts: int, empty_first: bool
) -> None:
    paths = split_gguf(tiny_gguf, parts, tmp_path, empty_first=empty_first)
    assert [path.name for path in paths] == [f"tiny-{at + 1:05d}-of-{parts:05d}.gguf" for at in range(parts)]
    assert all(bool(read_gguf(path).tensors) != (empty_first and path is paths[0]) for path in paths)
    with raw_server(paths[0], **EXACT) as client:
        assert said(client, [6403, 1980], 12) == said(tiny_server, [6403, 1980], 12)


def write_with_the_package(target: Path) -> None:
    writer = GGUFWriter(target, "llama")
    writer.add_uint64("large", 2**40)
    writer.add_array("words", ["a", "", "é"])
    writer.add_array("flags", [True, False])
    for name, size in (("odd", 5), ("even", 16)):
        writer.add_tensor(name, np.arange(size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_is_taken_apart_is_written_the_same(tmp_path: Path) -> None:
    write_with_the_package(tmp_path / "original.gguf")
    copy = read_gguf(tmp_path / "original.gguf").written(tmp_path / "copy.gguf")
    assert copy.read_bytes() == (tmp_path / "original.gguf").read_bytes()


def test_the_package_reads_what_was_changed(tmp_path: Path) -> None:
    write_with_the_package(tmp_path / "original.gguf")
    new: dict[str, Any] = {"text": "ü", "count": 7, "share": 0.5, "flag": True, "numbers": [1, -2], "words": ["b"]}
    changes = {**new, "large": None}
    reader = GGUFReader(with_values(tmp_path / "original.gguf", tmp_path / "changed.gguf", changes))
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert found == {"general.architecture": "llama", "flags": [True, False], **new}
    assert [tensor.data.tolist() for tensor in reader.tensors] == [list(range(5)), list(range(16))]


def test_a_model_is_written_once_until_its_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(target: Path) -> None:
        written.append(target)
        target.write_bytes(b"GGUF")

    with ThreadPoolExecutor(4) as threads:
        (path,) = set(threads.map(lambda _: kept(tmp_path, "some", write), range(8)))
    assert (len(written), path.name, path.read_bytes()) == (1, "some.gguf", b"GGUF")
    monkeypatch.setattr(gguf, "VERSION", "next")
    assert kept(tmp_path, "some", write) != path
    assert (len(written), path.exists()) == (2, True)
    os.utime(path.parent, (0, 0))
    kept(tmp_path, "some", write)
    assert (len(written), path.exists()) == (2, False)
