"""Loads succeed or fail in the same way, and embedding models stay beside chat models, for all pairs of engines."""

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest

from lmx_lab.engine import EmbeddingRequest, ModelManager, RerankRequest
from lmx_lab.errors import (
    ContextLengthError,
    GenerationTimeoutError,
    InvalidRequestError,
    OutOfMemoryError,
    UnusableModelError,
)
from lmx_lab.values.models import LoadSpec
from tests.engine.contract.entries import FEW, SETTINGS
from tests.support.asking import invalid
from tests.support.engines import (
    engine_of,
    entry_of,
    load_entry,
    manager_with,
    numbers,
    pin,
    request,
    run,
    until_busy,
    until_idle,
)
from tests.support.gguf import unknown_architecture, with_template
from tests.support.models import write_huge_llama, write_tiny_bert

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SENTENCES = ("the sea is salty", "bread is baked from flour", "a cat sleeps on the warm stone", "Ünïcode, CAFÉ 東京!")
FORMATS = ("mlx", "gguf")
"""The formats of model files."""
FINGERPRINTS = {"mlx": "mlx-", "gguf": "llama.cpp-", "echo": "echo-"}


@pytest.fixture(scope="session")
def broken(tmp_path_factory, chat_models):
    """Models that fail only when their weights are read."""
    folder = tmp_path_factory.mktemp("broken")
    nan = {"embeddings.LayerNorm.weight": np.full(32, np.nan, np.float32)}
    return {
        "mlx": replace(write_tiny_bert(folder / "mlx", change=nan), id="broken"),
        "gguf": entry_of(unknown_architecture(chat_models["gguf"].path, folder), "broken"),
    }


@pytest.fixture(scope="session")
def rerankers(tmp_path_factory, reranker_gguf):
    folder = tmp_path_factory.mktemp("reranker")
    mlx = write_tiny_bert(folder / "reranker", labels=1)
    return {"mlx": replace(mlx, id="reranker"), "gguf": entry_of(reranker_gguf, "reranker")}


# Loading


@pytest.mark.parametrize(("before", "after"), [("mlx", "gguf"), ("gguf", "echo"), ("echo", "mlx")])
async def test_a_load_replaces_the_model(chat_models, long_models, before, after):
    async with manager_with(chat_models[before], FEW) as manager:
        report = await load_entry(manager, long_models[after])
        assert (report.model, manager.snapshot.model, manager.snapshot.state) == ("long", "long", "ready")
        assert report.load_s > 0
        # llama.cpp is measured again at regular intervals.
        assert report.memory_bytes == pytest.approx(manager.snapshot.model_memory_bytes, rel=0.1)
        assert report.memory_bytes > 0
        assert manager.fingerprint.startswith(FINGERPRINTS[after])
        assert (await run(manager))[1].model == "long"
        assert await manager.unload() > 0
        assert manager.snapshot.entry is None


async def test_a_load_may_limit_the_context(long_models, embedders, model_format):
    entry = long_models[model_format]

    def spec(**options):
        return LoadSpec(model=entry.id, **options)

    async with ModelManager(FEW) as manager:
        report = await load_entry(manager, entry, spec(context_length=300))
        assert (report.slots, report.context_length) == (2, 300)
        assert (manager.snapshot.slots, manager.snapshot.context_length) == (2, 300)
        refusal = r"300 tokens \(long as it is loaded, including the answer; its own limit is 8192\); shorten .* load"
        with pytest.raises(ContextLengthError, match=refusal):
            await manager.submit(request(prompt=numbers(300)))
        assert (await run(manager, prompt=numbers(290), max_tokens=50, ignore_eos=True))[1].output_tokens == 10
        most = 2**20 if model_format == "echo" else 8192
        with invalid("context_length", rf"is {most + 1}; long takes 1 to {most}", UnusableModelError):
            await load_entry(manager, entry, spec(context_length=most + 1))
        if model_format == "mlx":
            with pytest.raises(UnusableModelError, match="for a deterministic load use a GGUF file"):
                await load_entry(manager, entry, spec(deterministic=True))
        # The heads of this model are too small for blocks of 32 numbers.
        reasons = {"mlx": "batches of requests do not support", "gguf": "those of long have 16; leave out", "echo": ""}
        if reason := reasons[model_format]:
            with pytest.raises(UnusableModelError, match=reason):
                await load_entry(manager, entry, spec(kv_cache_dtype="q8_0"))
        with pytest.raises(UnusableModelError, match="kv_cache_dtype is 'q3_0'; the values are q8_0 and q4_0"):
            await load_entry(manager, entry, spec(kv_cache_dtype="q3_0"))
        with pytest.raises(UnusableModelError, match="is not a chat model; load it without deterministic"):
            await load_entry(manager, embedders[model_format], spec(deterministic=True))
        # The same load again, and one with other options.
        assert (await load_entry(manager, entry, spec(context_length=300))).load_s == 0
        assert (await load_entry(manager, entry)).context_length == 8192


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_failed_load_leaves_nothing_in_memory(
    chat_models, long_models, embedders, broken, *, format_, tmp_path
):
    async with ModelManager(FEW) as manager:
        with pytest.raises(UnusableModelError, match=r"; no model is loaded$") as failed:
            await load_entry(manager, broken[format_])
        assert str(broken[format_].path) in failed.value.message
        assert manager.snapshot.state == "empty"
        await load_entry(manager, chat_models[format_])
        used = manager.snapshot.memory_used_bytes
        for _ in range(2):
            with pytest.raises(UnusableModelError, match=r"; the previous model tiny is loaded again$"):
                await load_entry(manager, broken[format_])
        assert manager.snapshot.memory_used_bytes < used * 1.5
        # A model that is too large is refused before the other one is unloaded.
        huge = replace(long_models["gguf"], id="huge", size_bytes=60 * 10**9)
        if format_ == "mlx":
            huge = write_huge_llama(tmp_path / "huge", chat_models["mlx"].path)
        with pytest.raises(OutOfMemoryError, match=r"huge needs 6\d\.\d\d GB.*, and 1\.0\d GB are allowed"):
            await load_entry(manager, huge)
        # So is one without files, also as a model beside it.
        with pytest.raises(UnusableModelError):
            await pin(manager, replace(embedders[format_], id="gone", path=broken[format_].path.parent / "gone.gguf"))
        assert [model.entry.id for model in manager.models] == ["tiny"]
        assert (await run(manager))[1].model == "tiny"


# Texts


@pytest.fixture(scope="module")
async def embedder(embedders, model_format):
    async with manager_with(embedders[model_format], SETTINGS) as manager:
        yield manager


async def vectors(manager, *texts, model=None):
    return (await manager.embed(EmbeddingRequest(inputs=texts, model=model))).vectors


WARNED = ["is not applied", "could not be tried with a single message", "Only in French"]


async def test_a_load_warns_of_what_the_engine_ignores_and_of_a_template_that_cannot_be_tried(
    chat_models, model_format, tmp_path
):
    template = "{{ raise_exception('Only in French') }}"
    if model_format == "mlx":
        shutil.copytree(chat_models["mlx"].path, tmp_path / "model")
        (tmp_path / "model/chat_template.jinja").write_text(template)
        (tmp_path / "model/adapter_config.json").write_text("{}")
        entry = entry_of(tmp_path / "model", "warned")
    elif model_format == "gguf":
        (tmp_path / "adapter_config.json").write_text("{}")
        entry = entry_of(with_template(chat_models["gguf"].path, template, tmp_path), "warned")
    else:
        pytest.skip("echo has no files and no template")
    async with manager_with(entry, SETTINGS) as manager:
        for warning in (manager.snapshot.main.entry.warning, (await load_entry(manager, entry)).warning):
            assert all(part in warning for part in WARNED)
        assert (await load_entry(manager, chat_models[model_format])).warning == ""


async def test_both_formats_give_the_same_vectors(embedders):
    async with ModelManager(SETTINGS) as mlx, ModelManager(SETTINGS) as gguf:
        for manager, format_ in ((mlx, FORMATS[0]), (gguf, FORMATS[1])):
            await load_entry(manager, embedders[format_])
        ours, theirs = await vectors(mlx, *SENTENCES), await vectors(gguf, *SENTENCES)
        assert (np.einsum("ij,ij->i", ours, theirs) > 0.9998).all()
        rerank_request = RerankRequest(query="ocean water", documents=SENTENCES)
        both = [await manager.rerank(rerank_request) for manager in (mlx, gguf)]
        assert [ranking.method for ranking in both] == ["cosine", "cosine"]
        np.testing.assert_allclose(both[0].scores, ours @ (await vectors(mlx, "ocean water"))[0], atol=1e-5)
        np.testing.assert_allclose(both[0].scores, both[1].scores, atol=0.005)
        assert both[0].report.tokens == both[1].report.tokens


async def test_vectors_have_length_one_and_do_not_depend_on_the_other_inputs(embedder):
    (alone,) = await vectors(embedder, SENTENCES[0])
    crowd = await vectors(embedder, *SENTENCES, *(f"{at} " * (at % 60 + 1) for at in range(40)))
    assert np.allclose(np.linalg.norm(crowd, axis=1), 1, atol=1e-5)
    assert alone @ crowd[0] > 0.99999
    assert crowd.shape == (44, 384)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("kind", ["embedding", "rerank"])
async def test_documents_are_truncated_to_a_number_of_tokens(embedders, rerankers, format_, kind):
    entries = embedders if kind == "embedding" else rerankers
    # Each letter is a token in both vocabularies.
    letters = "a b c d e f g h "
    documents = (letters, "b", letters * 2000)
    async with manager_with(entries[format_], SETTINGS) as manager:
        for count in (1, 3):
            cut = RerankRequest(query="sea", documents=documents, max_document_tokens=count)
            short = tuple(" ".join(text.split()[:count]) for text in documents)
            expected = await manager.rerank(RerankRequest(query="sea", documents=short))
            ranking = await manager.rerank(cut)
            np.testing.assert_allclose(ranking.scores, expected.scores, atol=1e-5)
            assert ranking.report.tokens == expected.report.tokens
        # Documents that exceed the context are truncated further.
        long = await manager.rerank(replace(cut, max_document_tokens=10_000))
        truncated = await manager.rerank(replace(cut, max_document_tokens=None, truncate=True))
        np.testing.assert_allclose(long.scores, truncated.scores, atol=1e-5)
        with pytest.raises(InvalidRequestError, match=r"documents\.1"):
            await manager.rerank(replace(cut, documents=("a", "\ud800")))


async def test_shortened_vectors_have_length_one(embedder):
    cut = await embedder.embed(EmbeddingRequest(inputs=SENTENCES, dimensions=64))
    head = (await vectors(embedder, *SENTENCES))[:, :64]
    assert np.allclose(cut.vectors, head / np.linalg.norm(head, axis=1, keepdims=True), atol=1e-5)
    whole = await embedder.embed(EmbeddingRequest(inputs=SENTENCES, dimensions=384))
    assert np.allclose(whole.vectors, await vectors(embedder, *SENTENCES), atol=1e-5)
    with pytest.raises(InvalidRequestError, match="dimensions is 385; vectors of minilm-l6 have 384"):
        await embedder.embed(EmbeddingRequest(inputs=SENTENCES, dimensions=385))


async def test_a_report_counts_texts_tokens_and_times(embedder, model_format):
    # echo has no special tokens around a text.
    tokens = 3 + (2 if model_format == "echo" else 4)
    before = embedder.snapshot.totals.encoded_tokens
    report = (await embedder.embed(EmbeddingRequest(inputs=("one two", (101, 2028, 102))))).report
    assert (report.texts, report.tokens, report.model) == (2, tokens, "minilm-l6")
    assert min(report.queue_s, report.compute_s) > 0
    await until_idle(embedder)
    assert embedder.snapshot.totals.encoded_tokens - before == tokens


async def test_a_text_that_is_too_long_is_refused_or_truncated(embedder):
    long = "word " * 700
    with invalid("input.1", r"input\.1 is too long: .*\d+ tokens > \d+ .*minilm-l6", ContextLengthError):
        await vectors(embedder, "short", long)
    cut = await embedder.embed(EmbeddingRequest(inputs=(long,), truncate=True))
    assert 200 < cut.report.tokens <= 512


@pytest.mark.parametrize(
    ("text", "param"), [((), "input.0"), ((5, 10**9), "input.0"), ((-1,), "input.0"), ("\ud800", "input.0")]
)
async def test_invalid_inputs_are_refused(embedder, text, param):
    with invalid(param):
        await vectors(embedder, text)


async def test_a_request_without_texts_is_refused(embedder):
    with pytest.raises(InvalidRequestError, match="there are no texts"):
        await vectors(embedder)


async def test_input_types_are_supported_or_refused_as_the_capabilities_state(embedder, model_format):
    typed_request = EmbeddingRequest(inputs=SENTENCES, input_type="query")
    if not engine_of(embedder, model_format).capabilities.input_types:
        with invalid("input_type", "leave out input_type"):
            await embedder.embed(typed_request)
        return
    # The files of MiniLM define no prompts for input types.
    assert np.allclose((await embedder.embed(typed_request)).vectors, await vectors(embedder, *SENTENCES), atol=1e-5)


async def test_texts_end_in_time_or_with_an_error(embedder):
    many = EmbeddingRequest(inputs=tuple(f"{at} " + "of the sea " * 5 for at in range(200)), timeout_s=0.05)
    with pytest.raises(GenerationTimeoutError, match=r"time limit of 0\.05 s"):
        await embedder.embed(many)
    cancelled = asyncio.create_task(embedder.embed(replace(many, timeout_s=None)))
    await until_busy(embedder)
    assert embedder.snapshot.encode_requests == 1
    cancelled.cancel()
    await until_idle(embedder)
    assert (await vectors(embedder, "sea")).shape == (1, 384)


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_reranker_scores_pairs(rerankers, format_):
    async with manager_with(rerankers[format_], SETTINGS) as manager:
        rerank_request = RerankRequest(query="sea", documents=SENTENCES[:3])
        ranking, raw = (
            await manager.rerank(rerank_request),
            await manager.rerank(replace(rerank_request, raw_scores=True)),
        )
        assert (ranking.method, ranking.report.model, ranking.report.texts) == ("cross-encoder", "reranker", 3)
        assert ((ranking.scores > 0) & (ranking.scores < 1)).all()
        np.testing.assert_allclose(1 / (1 + np.exp(-raw.scores)), ranking.scores, atol=1e-4)
        alone = [
            (await manager.rerank(replace(rerank_request, documents=(text,)))).scores[0]
            for text in rerank_request.documents
        ]
        np.testing.assert_allclose(alone, ranking.scores, atol=1e-3)
        too_long = replace(rerank_request, documents=("sea", "word " * 700))
        with invalid("documents.1", error=ContextLengthError):
            await manager.rerank(too_long)
        assert (await manager.rerank(replace(too_long, truncate=True))).scores.shape == (2,)
        with invalid("query", error=ContextLengthError):
            await manager.rerank(replace(rerank_request, query="word " * 700))


# Beside a chat model


@pytest.mark.parametrize("pinned", FORMATS)
async def test_an_embedding_model_stays_beside_a_chat_model(chat_models, long_models, embedders, model_format, pinned):
    other = "mlx" if model_format == "gguf" else "gguf"
    async with ModelManager(SETTINGS) as manager:
        report = await pin(manager, embedders[pinned])
        assert report.memory_bytes > 10_000_000
        await load_entry(manager, chat_models[model_format])
        (pinned_model,) = manager.snapshot.pinned
        assert (pinned_model.entry.id, manager.snapshot.model) == ("minilm-l6", "tiny")
        one = await vectors(manager, SENTENCES[0])
        assert (await run(manager))[1].model == "tiny"
        # It stays while chat models are loaded and unloaded.
        await load_entry(manager, long_models[other])
        await manager.unload()
        assert np.allclose(await vectors(manager, SENTENCES[0]), one, atol=1e-5)
