"""Traces on the MLX engine: beside answers, cancelled, refused, and ended by an unload."""

import asyncio
import gc
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from lmx_lab.engine import TextPrompt, TokenPrompt, TraceRequest
from lmx_lab.engine.mlx import thread, tracing
from lmx_lab.engine.mlx.loop import GenerationLoop
from lmx_lab.engine.mlx.thread import MlxThread
from lmx_lab.engine.mlx.tracing import TraceLoop
from lmx_lab.errors import ContextLengthError, InvalidRequestError, NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.values.tracing import Activations, Attribution, HookNames, LogitLens, Patching, Trace
from tests.support.engines import finish, generating, load_entry, manager_with, mlx_thread, numbers, request, run
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
POST = "blocks.*.hook_resid_post"


@pytest.fixture
async def manager(tiny):
    async with manager_with(tiny, Settings(slots=8, trace_bytes=2_000_000)) as made:
        yield made


def activations(length=30, *hooks, positions=None):
    return TraceRequest(prompt=numbers(length), work=Activations(hooks=hooks or (POST,), positions=positions))


async def test_logits_of_a_trace_are_those_of_the_scores(manager):
    prompt = numbers(100)
    trace = await manager.trace(TraceRequest(prompt=prompt, work=Activations(hooks=("logits",), positions=(-2, 98, 3))))
    assert trace.details["positions"] == [98, 98, 3]
    stream = await manager.submit(request(prompt=prompt, max_tokens=0, score_prompt=True, top_logprobs=0))
    await finish(stream)
    assert stream.prompt_scores is not None
    logits = trace.arrays["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, position in enumerate(trace.details["positions"]):
        score = stream.prompt_scores.tokens[position + 1]
        assert logprobs[row, score.token] == pytest.approx(score.logprob, abs=1e-4)
    assert trace.tokens == prompt.tokens
    assert len(trace.texts) == 100


async def test_running_answers_are_not_changed_by_traces(manager):
    prompts = [numbers(40, start=100 * at) for at in range(8)]
    alone = [(await run(manager, prompt=prompt, max_tokens=20))[0] for prompt in prompts]
    expected = (await manager.trace(activations(200))).arrays
    streams = [await manager.submit(request(prompt=prompt, max_tokens=20)) for prompt in prompts]
    traces = [manager.trace(activations(200)) for _ in range(2)]
    *answers, one, other = await asyncio.gather(*map(finish, streams), *traces)
    assert [text for text, _ in answers] == alone
    for trace in (one, other):
        assert isinstance(trace, Trace)
        for name, values in expected.items():
            np.testing.assert_allclose(trace.arrays[name], values, atol=1e-3)


async def test_a_draft_model_does_not_change_traces(no_shared_model, manager, tiny):
    expected = (await manager.trace(activations(60, POST, "*.hook_pattern"))).arrays
    await load_entry(manager, tiny, LoadSpec(model=tiny.id, draft=str(tiny.path)))
    prompt = TokenPrompt(tokens=(*range(1000, 1040), *range(1000, 1040)))
    answering = asyncio.create_task(run(manager, prompt=prompt, max_tokens=60))
    traced = (await manager.trace(activations(60, POST, "*.hook_pattern"))).arrays
    assert (await answering)[1].drafted_tokens > 0
    for name, values in expected.items():
        np.testing.assert_allclose(traced[name], values, atol=1e-4, err_msg=name)


async def test_a_cancelled_trace_ends_and_releases_its_place(manager):
    waiting = asyncio.create_task(manager.trace(activations(500)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    main = manager.main
    await main.admission.until_at_most(0)
    assert await mlx_thread(manager).call(lambda thread: thread.tracing.idle)


async def test_an_unload_ends_traces_with_one_error_each(manager):
    thread, released = mlx_thread(manager), threading.Event()
    thread.post(lambda _: released.wait(60))
    waiting = [asyncio.create_task(manager.trace(activations(500))) for _ in range(3)]
    await auntil(lambda: thread._commands.qsize() >= 3)
    unloading = asyncio.create_task(manager.unload(wait=False))
    await auntil(lambda: thread._commands.qsize() >= 6)
    released.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NotLoadedError] * 3
    await unloading
    with pytest.raises(NotLoadedError):
        await manager.trace(activations())


def test_steps_that_would_exceed_their_time_are_left_for_later(monkeypatch):
    now, durations = 0.0, iter((0.6, 0.3, 0.3, 2.0))

    class Clock(TraceLoop):
        def _begin(self, job, *, may_wait):
            return True

        def _advance(self, job, limit_s, *, busy):
            nonlocal now
            now += next(durations)

    monkeypatch.setattr(tracing, "time", SimpleNamespace(perf_counter=lambda: now))
    loop = Clock(cast(Any, None), cast(Any, None), trace_bytes=0)
    loop._jobs.append(cast(Any, None))
    for end in (0.6, 1.2, 3.2):
        loop.step(1.0, busy=True)
        assert now == pytest.approx(end)


def test_texts_and_traces_share_the_time_of_a_step_of_the_answers(monkeypatch):
    now, limits = 0.0, list[float]()

    def advance(seconds=1.0):
        nonlocal now
        now += seconds

    def work(limit_s, *, busy):
        limits.append(limit_s)
        advance(limit_s)

    class Answers(GenerationLoop):
        idle, decode_s, is_saving = False, 0.0, False

        def __init__(self):
            scheduler = SimpleNamespace(running=[])
            self.answers, self.used_s, self.step_s = (
                SimpleNamespace(scheduler=scheduler, deliver=lambda: None),
                0.0,
                1.0,
            )

        def step(self, *, computes, idle):
            advance(self.step_s)

    monkeypatch.setattr(thread, "time", SimpleNamespace(perf_counter=lambda: now))
    engine, answers = MlxThread.__new__(MlxThread), Answers()
    engine.models = {cast(Any, "tiny"): answers}
    engine.encoding, engine.tracing = (cast(Any, SimpleNamespace(idle=False, step=work)) for _ in range(2))
    engine._threads, engine._mean_s, engine._least_s, engine.peak_bytes = SimpleNamespace(wait=advance), 0.0, 0.0, 0
    engine.step()
    engine.encoding.idle = True
    engine.step()
    # A step that takes longer than usual, because of another program.
    answers.step_s = 11.0
    engine.step()
    assert limits == pytest.approx([1.0, 1.0, 2.0, 4.0])
    # Texts get the time of the tokens, but not that of a part of a prompt in the same step.
    engine.encoding.idle, engine.tracing.idle = False, True
    answers.decode_s = 0.5
    engine.step()
    assert limits[4:] == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("made", "kind", "message"),
    [
        (activations(400, "*.hook_pattern"), InvalidRequestError, r"need 2,560,000 bytes, and 2,000,000 are allowed"),
        (
            activations(30, "blocks.5.hook_resid_post"),
            InvalidRequestError,
            r"no hook .*; it has blocks\.0\.hook_resid_post, blocks\.1",
        ),
        (activations(30, positions=(30,)), InvalidRequestError, "positions contains 30; the text has 30 tokens"),
        (activations(600), ContextLengthError, "600"),
        (TraceRequest(prompt=TextPrompt(text=""), work=LogitLens()), InvalidRequestError, "prompt is empty"),
        (TraceRequest(prompt=TokenPrompt(tokens=(10**6,)), work=LogitLens()), InvalidRequestError, "token id 1000000"),
        (TraceRequest(prompt=numbers(3), work=Attribution(token=" a b c")), InvalidRequestError, "^token has ' a b c'"),
        (
            TraceRequest(
                prompt=numbers(3), clean=numbers(4), work=Patching(answer=5, other=6, hooks=("*.hook_resid_post",))
            ),
            InvalidRequestError,
            "the clean text has 4 tokens and the corrupt one 3",
        ),
        (
            TraceRequest(prompt=numbers(3), clean=numbers(3), work=Patching(answer=5, other=6, hooks=("logits",))),
            InvalidRequestError,
            "logits cannot be patched",
        ),
    ],
)
async def test_a_refused_trace_names_the_limit(manager, made, kind, message):
    with pytest.raises(kind, match=message):
        await manager.trace(made)


async def test_hooks_that_are_installed_for_answers_do_not_change_a_trace(manager):
    names = (await manager.trace(TraceRequest(work=HookNames()))).details["hooks"]
    assert names["blocks.1.attn.hook_pattern"] == [2, 0]
    before = await manager.trace(activations())

    def install_zeros(thread):
        from lmx_lab.engine.mlx.capture.install import install

        points = generating(thread).weights.hook_points
        installed = install({points.point("blocks.0.hook_resid_post"): lambda value: value * 0})
        installed.__enter__()
        return installed

    installed = await mlx_thread(manager).call(install_zeros)
    after = await manager.trace(activations())
    await mlx_thread(manager).call(lambda _: installed.__exit__(None, None, None))
    np.testing.assert_allclose(
        after.arrays["blocks.1.hook_resid_post"], before.arrays["blocks.1.hook_resid_post"], atol=1e-3
    )


@pytest.mark.long
async def test_memory_does_not_grow_with_the_number_of_traces(manager):
    process = psutil.Process()

    async def trace(count):
        for _ in range(count):
            await manager.trace(activations(60, "*.hook_resid_post", "*.hook_pattern", "logits", positions=(-1,)))
        gc.collect()
        return process.memory_info().rss

    before = await trace(300)
    after = await trace(1000)
    assert after <= 1.02 * before + 4_000_000
