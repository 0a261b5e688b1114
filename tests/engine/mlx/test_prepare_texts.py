"""Embedding and reranking on the MLX engine, while answers are generated and models are loaded and unloaded."""

import asyncio
import contextlib

import numpy as np
import pytest

from lmx_lab.engine import EmbeddingRequest, ModelManager, RerankRequest, TokenPrompt
from lmx_lab.engine.mlx.engine import MlxEncoder
from lmx_lab.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    OutOfMemoryError,
    QueueFullError,
)
from lmx_lab.settings import Settings
from tests.support.engines import finish, load_entry, manager_with, mlx_thread, pin, request, run, until_idle
from tests.support.models import write_tiny_bert

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SENTENCES = ("the sea is salty", "bread is baked from flour", "a cat sleeps on the warm stone")


ONE, TWO = Settings(), Settings(slots=2)


@pytest.fixture
def embedder(shared, minilm):
    with shared.use(ONE, minilm) as manager:
        yield manager


@pytest.fixture
def both(shared, tiny, minilm):
    """A chat model, and an embedding model pinned beside it."""
    with shared.use(TWO, tiny, minilm) as manager:
        yield manager


@pytest.fixture
async def own_embedder(no_shared_model, minilm):
    """A manager for one test, which may unload or pin models, or end the thread."""
    async with manager_with(minilm, ONE) as manager:
        yield manager


@pytest.fixture
async def own_both(no_shared_model, tiny, minilm):
    """The same with both models."""
    async with ModelManager(TWO) as manager:
        await pin(manager, minilm)
        await load_entry(manager, tiny)
        yield manager


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker") / "tiny-reranker"
    return write_tiny_bert(folder, labels=1)


async def end_thread_with_error(manager):
    """End the engine thread as an unexpected error would."""

    def command(_):
        raise SystemExit("as an example")

    thread = mlx_thread(manager)._thread
    with contextlib.suppress(EngineDeadError):
        await mlx_thread(manager).call(command)
    await asyncio.to_thread(thread.join)


async def vectors(manager, *texts, model=None):
    return (await manager.embed(EmbeddingRequest(inputs=texts, model=model))).vectors


def long(count):
    """Return a request whose texts keep the engine busy for a while."""
    return EmbeddingRequest(inputs=tuple(f"text number {at} " + "of the sea " * 40 for at in range(count)))


async def begin_texts(manager, gate, count):
    """Return a task that waits at the gate after a first step of ``long(count)``."""
    gate.shut()
    running = asyncio.create_task(manager.embed(long(count)))
    await gate.reached()
    return running


async def test_a_reranker_is_preferred_to_an_embedding_model(own_both, reranker):
    await pin(own_both, reranker)
    ranking = await own_both.rerank(RerankRequest(query="sea", documents=SENTENCES))
    assert (ranking.method, ranking.report.model) == ("cross-encoder", "tiny-reranker")
    named = await own_both.rerank(RerankRequest(query="sea", documents=SENTENCES, model="minilm-l6"))
    assert named.method == "cosine"


# Texts and answers at the same time


@pytest.mark.long
async def test_answers_and_texts_are_computed_in_turns(both):
    stream = await both.submit(request(max_tokens=400, ignore_eos=True))
    await anext(stream)
    embedding = asyncio.create_task(both.embed(long(20)))
    tokens = 0
    async for delta in stream:
        tokens += delta.tokens
        if embedding.done():
            break
    assert embedding.done(), "the answer ended before the texts, which take less time"
    assert tokens > 5, "no token was generated while texts were computed"
    assert (await embedding).vectors.shape == (20, 384)
    await stream.aclose()


async def test_texts_do_not_change_an_answer(both):
    text, _ = await run(both, max_tokens=60)
    stream = await both.submit(request(max_tokens=60))
    embedding = asyncio.create_task(both.embed(long(10)))
    again, _ = await finish(stream)
    await embedding
    assert again == text


# Loads and unloads


async def test_requests_of_pinned_models_continue_during_an_unload(own_both, gate):
    embedding = await begin_texts(own_both, gate, 4)
    unloading = asyncio.create_task(own_both.unload())
    await asyncio.sleep(0)
    gate.let_pass(2)
    await unloading
    assert not embedding.done()
    gate.open()
    assert (await embedding).vectors.shape == (4, 384)


async def test_an_unload_waits_for_running_texts_and_refuses_queued_ones(own_embedder, gate):
    running = await begin_texts(own_embedder, gate, 4)
    waiting = asyncio.create_task(vectors(own_embedder, SENTENCES[0]))
    while mlx_thread(own_embedder)._commands.empty():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    gate.let_pass(1)
    await gate.reached()
    assert (own_embedder.snapshot.active_requests, own_embedder.snapshot.queued_requests) == (1, 1)
    unloading = asyncio.create_task(own_embedder.unload())
    await asyncio.sleep(0)
    late = asyncio.create_task(vectors(own_embedder, SENTENCES[0]))
    gate.open()
    with pytest.raises(NotLoadedError, match="unloaded before this request started"):
        await waiting
    with pytest.raises(NotLoadedError):
        await late
    assert (await running).vectors.shape == (4, 384)
    assert await unloading > 80_000_000


@pytest.mark.usefixtures("no_shared_model")
async def test_an_unload_waits_for_texts_no_longer_than_drain_s(minilm, gate):
    async with manager_with(minilm, Settings(drain_s=0)) as manager:
        running = await begin_texts(manager, gate, 4)
        unloading = asyncio.create_task(manager.unload())
        await asyncio.sleep(0)
        gate.let_pass(2)
        assert await unloading > 80_000_000
        with pytest.raises(NotLoadedError, match="unloaded before this request ended"):
            await running


async def test_texts_count_as_use_of_the_loaded_embedding_model(minilm):
    async with manager_with(minilm, Settings(idle_unload_s=1000)) as manager:
        main = manager.main
        main.admission.used_at -= 900
        before = main.admission.used_at
        await vectors(manager, SENTENCES[0])
        assert main.admission.used_at > before + 900


@pytest.mark.usefixtures("no_shared_model")
async def test_a_model_too_large_to_be_pinned_is_refused_before_it_is_loaded(minilm):
    async with ModelManager(Settings(memory_limit_bytes=50_000_000)) as manager:
        with pytest.raises(OutOfMemoryError, match=r"needs 0\.09 GB"):
            await pin(manager, minilm)


@pytest.mark.usefixtures("no_shared_model")
async def test_a_chat_model_may_use_the_memory_that_pinned_models_leave(tiny, minilm):
    async with manager_with(tiny, Settings(memory_limit_bytes=95_000_000)) as manager:
        await manager.unload()
        await pin(manager, minilm)
        with pytest.raises(OutOfMemoryError, match=r"0\.00 GB are allowed"):
            await load_entry(manager, tiny)


async def test_a_pinned_model_is_loaded_again_after_the_thread_has_died(own_both, tiny):
    seen = []
    own_both.add_observer(seen.append)
    await end_thread_with_error(own_both)
    async with asyncio.timeout(60):
        while not any(step.stage == "loaded" for step in seen):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (await vectors(own_both, SENTENCES[0])).shape == (1, 384)
    assert [(step.model, step.stage) for step in seen] == [
        ("minilm-l6", stage) for stage in ("unloaded", "load", "loaded")
    ]
    assert seen[0].message == "the engine lost this pinned model; it is loaded again"
    # A model that is lost soon afterwards may be the cause, so it is not loaded again.
    await end_thread_with_error(own_both)
    async with asyncio.timeout(60):
        while len(seen) == 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert seen[3].message == "the engine lost this pinned model; load it again"
    with pytest.raises(EngineDeadError):
        await vectors(own_both, SENTENCES[0])
    # A load of the main model also loads the pinned model again.
    await load_entry(own_both, tiny)
    assert (await vectors(own_both, SENTENCES[0])).shape == (1, 384)


async def test_a_pinned_model_that_cannot_be_restored_does_not_prevent_a_load(tiny, tmp_path, caplog):
    pinned = write_tiny_bert(tmp_path / "pinned")
    async with ModelManager(Settings()) as manager:
        await pin(manager, pinned)
        (tmp_path / "pinned" / "model.safetensors").unlink()
        await end_thread_with_error(manager)
        await load_entry(manager, tiny)
        assert manager.snapshot.model == "tiny"
        assert manager.snapshot.pinned == ()
    assert "pinned, which was pinned, could not be loaded again" in caplog.text


async def test_errors_of_embedding_requests_do_not_keep_the_model_in_memory(own_embedder):
    kept = []
    for refused in (
        EmbeddingRequest(inputs=("text",), dimensions=385),
        EmbeddingRequest(inputs=("text",), model="other"),
        EmbeddingRequest(inputs=((10**9,),)),
        EmbeddingRequest(inputs=("word " * 1000,)),
    ):
        with pytest.raises(LabError) as failed:
            await own_embedder.embed(refused)
        kept.append(failed)
    assert await own_embedder.unload() > 80_000_000
    assert len(kept) == 4


@pytest.mark.parametrize("changes", [{"model": "other"}, {"prompt": TokenPrompt(tokens=(1,) * 10_000)}])
@pytest.mark.usefixtures("no_shared_model")
async def test_errors_of_chat_requests_do_not_keep_the_model_in_memory(tiny, changes):
    async with manager_with(tiny) as manager:
        with pytest.raises(LabError) as kept:
            await manager.submit(request(**changes))
        assert await manager.unload() > 6_000_000
        assert kept.value is not None


# Ends


async def test_the_number_of_characters_in_all_requests_is_limited(embedder, monkeypatch):
    monkeypatch.setattr(MlxEncoder, "max_characters", 10_000)
    running = asyncio.create_task(embedder.embed(long(1000)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="characters are being tokenized, and these have 16; the limit is 10000"):
        await vectors(embedder, SENTENCES[0])
    running.cancel()


async def test_quiescing_ends_requests_of_pinned_models_too(own_both, gate):
    embedding = await begin_texts(own_both, gate, 4)
    stopping = asyncio.create_task(own_both.quiesce(0))
    await asyncio.sleep(0)
    gate.let_pass(2)
    await stopping
    with pytest.raises(NotLoadedError, match="the server was stopped before this request ended"):
        await embedding


TOKENS = 2000 * 100
"""Fewer than ``long(2000)`` has."""


async def test_cancelling_a_request_cancels_its_computation(embedder, gate):
    before = embedder.snapshot.totals.encoded_tokens
    embedding = await begin_texts(embedder, gate, 2000)
    gate.open()
    embedding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await embedding
    await until_idle(embedder)
    assert embedder.snapshot.totals.encoded_tokens - before < TOKENS / 2


async def test_stopping_ends_running_requests(minilm, gate):
    manager = ModelManager(Settings())
    await asyncio.to_thread(manager.start)
    await load_entry(manager, minilm)
    embedding = await begin_texts(manager, gate, 200)
    gate.open()
    await asyncio.to_thread(manager.stop)
    with pytest.raises(EngineDeadError):
        await embedding


async def test_an_error_in_a_layer_fails_only_its_request(embedder, monkeypatch):
    good = await vectors(embedder, SENTENCES[0])

    def fail(*_):
        raise ValueError("as an example")

    with monkeypatch.context() as patched:
        patched.setattr("lmx_lab.engine.encoders.bert.BertLayer.forward", fail)
        with pytest.raises(EngineError, match="as an example"):
            await vectors(embedder, SENTENCES[0])
    assert np.array_equal(await vectors(embedder, SENTENCES[0]), good)


# Models of another kind


async def test_the_refusal_without_a_model_names_the_next_step():
    async with ModelManager(Settings()) as manager:
        with pytest.raises(NotLoadedError, match="--embedder"):
            await vectors(manager, "text")
        with pytest.raises(NotLoadedError, match="--reranker"):
            await manager.rerank(RerankRequest(query="q", documents=("d",)))


async def test_a_reranker_does_not_embed(reranker):
    async with manager_with(reranker) as manager:
        with pytest.raises(NotLoadedError, match="tiny-reranker is a reranker"):
            await vectors(manager, "text")
        with pytest.raises(InvalidRequestError, match="is a reranker"):
            await vectors(manager, "text", model="tiny-reranker")
