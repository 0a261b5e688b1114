"""Texts become vectors and scores in the same way on every engine, and a load may limit the context of a model."""

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest

from lmx_lab.engine import EmbeddingRequest, RerankRequest
from lmx_lab.errors import ContextLengthError, GenerationTimeoutError, InvalidRequestError, UnusableModelError
from lmx_lab.values.models import LoadSpec
from tests.contract.engines.entries import FEW, SETTINGS
from tests.support.asking import invalid
from tests.support.engines import engine_alone, entry_of, loaded, numbers, request, run, until_busy, until_idle
from tests.support.gguf import with_template
from tests.support.models import write_tiny_bert

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SENTENCES = ("the sea is salty", "bread is baked from flour", "a cat sleeps on the warm stone", "Ünïcode, CAFÉ 東京!")
FORMATS = ("mlx", "gguf")
"""The formats of model files."""


@pytest.fixture(scope="session")
def rerankers(tmp_path_factory, reranker_gguf):
    folder = tmp_path_factory.mktemp("reranker")
    mlx = write_tiny_bert(folder / "reranker", labels=1)
    return {"mlx": replace(mlx, id="reranker"), "gguf": entry_of(reranker_gguf, "reranker")}


@pytest.fixture(scope="module")
async def embedder(embedders, model_format):
    async with loaded(embedders[model_format], SETTINGS) as model:
        yield model


async def vectors(model, *texts):
    return (await model.embed(EmbeddingRequest(inputs=texts))).vectors


WARNED = ["is not applied", "could not be tried with a single message", "Only in French"]


async def test_a_model_warns_of_what_the_engine_ignores_and_of_a_template_that_cannot_be_tried(
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
    async with loaded(entry, SETTINGS) as model:
        assert all(part in model.entry.warning for part in WARNED)


async def test_both_formats_give_the_same_vectors(embedders):
    async with loaded(embedders["mlx"], SETTINGS) as mlx, loaded(embedders["gguf"], SETTINGS) as gguf:
        ours, theirs = await vectors(mlx, *SENTENCES), await vectors(gguf, *SENTENCES)
        assert (np.einsum("ij,ij->i", ours, theirs) > 0.9998).all()
        rerank_request = RerankRequest(query="ocean water", documents=SENTENCES)
        both = [await model.rerank(rerank_request) for model in (mlx, gguf)]
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
    async with loaded(entries[format_], SETTINGS) as model:
        for count in (1, 3):
            cut = RerankRequest(query="sea", documents=documents, max_document_tokens=count)
            short = tuple(" ".join(text.split()[:count]) for text in documents)
            expected = await model.rerank(RerankRequest(query="sea", documents=short))
            ranking = await model.rerank(cut)
            np.testing.assert_allclose(ranking.scores, expected.scores, atol=1e-5)
            assert ranking.report.tokens == expected.report.tokens
        # Documents that exceed the context are truncated further.
        long = await model.rerank(replace(cut, max_document_tokens=10_000))
        truncated = await model.rerank(replace(cut, max_document_tokens=None, truncate=True))
        np.testing.assert_allclose(long.scores, truncated.scores, atol=1e-5)
        with pytest.raises(InvalidRequestError, match=r"documents\.1"):
            await model.rerank(replace(cut, documents=("a", "\ud800")))


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
    ("text", "problem"),
    [
        ((), "is empty"),
        ((5, 10**9), "has the token id 1000000000; minilm-l6 knows 0 to"),
        ((-1,), "has the token id -1; minilm-l6 knows 0 to"),
        ("a \ud800", r"has the lone surrogate '\\ud800'"),
    ],
)
async def test_an_invalid_input_is_refused_by_its_index(embedder, text, problem):
    with invalid("input.1", rf"^input\.1 {problem}"):
        await vectors(embedder, "sea", text)


async def test_llama_cpp_refuses_input_types(embedder, model_format):
    typed_request = EmbeddingRequest(inputs=SENTENCES, input_type="query")
    if model_format == "gguf":
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
    assert embedder.snapshot.requests == 1
    cancelled.cancel()
    await until_idle(embedder)
    assert (await vectors(embedder, "sea")).shape == (1, 384)


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_reranker_scores_pairs(rerankers, format_):
    async with loaded(rerankers[format_], SETTINGS) as model:
        rerank_request = RerankRequest(query="sea", documents=SENTENCES[:3])
        ranking, raw = (
            await model.rerank(rerank_request),
            await model.rerank(replace(rerank_request, raw_scores=True)),
        )
        assert (ranking.method, ranking.report.model, ranking.report.texts) == ("cross-encoder", "reranker", 3)
        assert ((ranking.scores > 0) & (ranking.scores < 1)).all()
        np.testing.assert_allclose(1 / (1 + np.exp(-raw.scores)), ranking.scores, atol=1e-4)
        alone = [
            (await model.rerank(replace(rerank_request, documents=(text,)))).scores[0]
            for text in rerank_request.documents
        ]
        np.testing.assert_allclose(alone, ranking.scores, atol=1e-3)
        too_long = replace(rerank_request, documents=("sea", "word " * 700))
        with invalid("documents.1", error=ContextLengthError):
            await model.rerank(too_long)
        assert (await model.rerank(replace(too_long, truncate=True))).scores.shape == (2,)
        with invalid("query", error=ContextLengthError):
            await model.rerank(replace(rerank_request, query="word " * 700))


# Options of a load


async def test_a_load_may_limit_the_context(long_models, embedders, model_format):
    entry = long_models[model_format]

    def spec(**options):
        return LoadSpec(model=entry.id, **options)

    async with engine_alone(model_format, FEW) as engine, loaded(entry, FEW, spec=spec(context_length=300)) as model:
        assert (model.snapshot.slots, model.snapshot.context_length) == (2, 300)
        refusal = r"300 tokens \(long as it is loaded, including the answer; its own limit is 8192\); shorten .* load"
        with pytest.raises(ContextLengthError, match=refusal):
            await model.submit(request(prompt=numbers(300)))
        assert (await run(model, prompt=numbers(290), max_tokens=50, ignore_eos=True))[1].output_tokens == 10

        async def check(entry, **options):
            await engine.check(entry, LoadSpec(model=entry.id, **options), room_bytes=engine.memory.limit)

        most = 2**20 if model_format == "echo" else 8192
        with invalid("context_length", rf"is {most + 1}; long takes 1 to {most}", UnusableModelError):
            await check(entry, context_length=most + 1)
        if model_format == "mlx":
            with pytest.raises(UnusableModelError, match="for a deterministic load use a GGUF file"):
                await check(entry, deterministic=True)
        # The heads of this model are too small for blocks of 32 numbers.
        reasons = {"mlx": "batches of requests do not support", "gguf": "those of long have 16; leave out", "echo": ""}
        if reason := reasons[model_format]:
            with pytest.raises(UnusableModelError, match=reason):
                await check(entry, kv_cache_dtype="q8_0")
        with pytest.raises(UnusableModelError, match="kv_cache_dtype is 'q3_0'; the values are q8_0 and q4_0"):
            await check(entry, kv_cache_dtype="q3_0")
        with pytest.raises(UnusableModelError, match="is not a chat model; load it without deterministic"):
            await check(embedders[model_format], deterministic=True)
