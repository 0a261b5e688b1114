"""Vectors steer single requests of a batch, and change nothing in the others."""

import array
import asyncio
import os
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator

from lmx_lab.engine import Caller, Sampling, TokenPrompt
from lmx_lab.engine.mlx.capture.points import find_parts, find_points
from lmx_lab.engine.mlx.speculative import SpeculativeBatch
from lmx_lab.engine.mlx.steering import BatchSteering, RequestSteering
from lmx_lab.engine.mlx.weights import ChatWeights
from lmx_lab.engine.scheduler import Turns
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.values.steering import SteeringVector, encode_components
from tests.support.asking import invalid
from tests.support.engines import (
    engine_paused,
    finish,
    finish_with_logprobs,
    manager_with,
    numbers,
    request,
    run,
    submit_while_paused,
    until_written,
)
from tests.support.models import build_model

pytestmark = pytest.mark.anyio
PROMPT = numbers(40)
WIDTH, LAYERS = 32, 2


def vector(layer=0, *, seed=0, scale=3.0, width=WIDTH, **changes):
    values = np.random.default_rng(seed).normal(size=width).astype(np.float32)
    text = encode_components(array.array("f", values.tobytes()))
    return SteeringVector(layer=layer, vector=text, scale=scale, **changes)


LONG = 1e5
"""A scale with which a vector exceeds the range of float16."""


def options(*steer, **changes):
    return {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, "top_logprobs": 2, "steer": steer, **changes}


async def together(manager, *requests):
    """Return the answers to requests that are computed in one batch from their first tokens."""
    async with engine_paused(manager):
        submits = [await submit_while_paused(manager, manager.submit(request(**each))) for each in requests]
    return list(await asyncio.gather(*[finish_with_logprobs(await submit) for submit in submits]))


async def alone(manager, **changes):
    return await finish_with_logprobs(await manager.submit(request(**changes)))


def assert_same(answer, expected):
    """Compare two answers that may have been computed in batches and chunks of other sizes."""
    assert answer[0] == expected[0]
    assert [it.token for it in answer[1]] == [it.token for it in expected[1]]
    assert [it.logprob for it in answer[1]] == pytest.approx([it.logprob for it in expected[1]], abs=1e-4)


@pytest.fixture
async def fresh(no_shared_model, tiny):
    """A manager without a prefix cache, so that every request computes its whole prompt."""
    async with manager_with(tiny, Settings(slots=4, prefix_cache_bytes=0)) as manager:
        yield manager


def logprobs_of(rows, kind, dtype):
    """Return the log-probabilities of each token of several answers to one prompt, which begin in the same step."""
    model = build_model(kind)
    model.set_dtype(dtype)
    loaded = cast("ChatWeights", SimpleNamespace(model=model, hook_points=points_of(model)))
    generator = BatchGenerator(model, completion_batch_size=4, prefill_batch_size=4, prefill_step_size=4)
    generator.close()
    steering = BatchSteering(loaded)
    steering.use_in(generator, answers=None)
    uids = generator.insert([[1, 2, 3, 4, 5, 6, 7]] * len(rows), max_tokens=[6] * len(rows))
    for uid, row in zip(uids, rows, strict=True):
        steering.add(uid, row)
    found = {uid: [] for uid in uids}
    while any(len(each) < 6 for each in found.values()):
        for response in generator.next()[1]:
            found[response.uid].append(np.array(response.logprobs.astype(mx.float32)).tobytes())
    assert [type(module) for module in model.modules()] == [type(module) for module in build_model(kind).modules()]
    return [found[uid] for uid in uids]


def points_of(model):
    return find_points(find_parts(model, "tiny"), "tiny")


@pytest.mark.parametrize(("kind", "dtype"), [("llama", mx.float32), ("qwen3", mx.bfloat16), ("phi3", mx.float32)])
def test_no_bit_of_the_other_rows_changes(kind, dtype):
    points = points_of(build_model(kind))
    steered = RequestSteering.of([vector(1), vector(0, seed=1)], points)
    plain = logprobs_of([None, None, None], kind, dtype)
    mixed = logprobs_of([None, steered, None], kind, dtype)
    assert (mixed[0], mixed[2]) == (plain[0], plain[2])
    assert all(one != other for one, other in zip(mixed[1], plain[1], strict=True))


def test_values_that_are_not_finite_change_no_bit_of_the_other_rows():
    long = RequestSteering.of([vector(1, scale=LONG)], points_of(build_model("llama")))
    assert long is not None
    plain = logprobs_of([None, None, None], "llama", mx.float16)
    mixed = logprobs_of([None, long, None], "llama", mx.float16)
    assert (mixed[0], mixed[2]) == (plain[0], plain[2])
    with pytest.raises(InvalidRequestError, match=r"too long \(length .*e\+05 at layer 1\)"):
        long.check(mx.array(np.frombuffer(mixed[1][0], np.float32)))


def test_vectors_whose_sum_is_zero_have_no_effect():
    points = points_of(build_model("llama"))
    assert RequestSteering.of([vector(0, scale=0.0), vector(1, scale=2.0), vector(1, scale=-2.0)], points) is None
    one, both = [RequestSteering.of(steer, points) for steer in ([vector(1)], [vector(0, scale=0.0), vector(1)])]
    assert one.key == both.key


async def test_one_of_two_identical_requests_is_steered_and_the_other_unchanged(fresh):
    plain, steered, other = options(), options(vector()), options(vector(1, seed=1), vector(0, seed=2, scale=-1))
    answers = await together(fresh, plain, steered, other)
    assert len({text for text, _ in answers}) == 3
    for each, found in zip((plain, steered, other), answers, strict=True):
        assert_same(found, await alone(fresh, **each))


async def test_steered_rows_stay_the_same_while_others_join_and_leave(fresh):
    requests = [
        options(max_tokens=4),
        options(vector(seed=3), max_tokens=30),
        options(prompt=numbers(150, start=900), max_tokens=12),
        options(vector(1, seed=4), prompt=numbers(90, start=500), max_tokens=20),
        options(max_tokens=30),
    ]
    expected = [(await alone(fresh, **each))[0] for each in requests]
    first = asyncio.create_task(alone(fresh, **requests[1]))
    second = asyncio.create_task(alone(fresh, **requests[3]))
    rest = [asyncio.create_task(alone(fresh, **requests[at])) for at in (0, 2, 4)]
    texts = [(await task)[0] for task in (rest[0], first, rest[1], second, rest[2])]
    assert texts == expected


async def test_the_scores_of_a_steered_prompt_are_its_log_probabilities(fresh):
    steered = options(vector())
    _, logprobs = await alone(fresh, **steered)
    tokens = tuple(it.token for it in logprobs if it.token is not None)
    whole = TokenPrompt(tokens=(*PROMPT.tokens, *tokens))
    stream = await fresh.submit(request(**{**steered, "prompt": whole, "max_tokens": 0, "score_prompt": True}))
    scores = [item async for item in stream]
    assert not scores
    scored = stream.prompt_scores.tokens[len(PROMPT.tokens) :]
    assert [it.logprob for it in scored] == pytest.approx([it.logprob for it in logprobs], abs=1e-4)


async def test_caches_of_steered_requests_are_used_only_with_the_same_vectors(tmp_path, tiny):
    async with manager_with(tiny, Settings(prefix_cache_dir=tmp_path)) as manager:
        steered, _ = await run(manager, prompt=PROMPT, steer=(vector(),))
        assert steered != (await run(manager, prompt=PROMPT, steer=(vector(scale=2.0),)))[0]
        async with until_written(manager):
            plain, report = await run(manager, prompt=PROMPT)
        assert report.cached_tokens == 0
        again, report = await run(manager, prompt=PROMPT, steer=(vector(),))
        assert (again, report.cached_tokens) == (steered, len(PROMPT.tokens) - 1)
        assert (await run(manager, prompt=PROMPT))[0] == plain
        # Requests whose vectors have no effect use the cache of the prompt without vectors.
        again, report = await run(manager, prompt=PROMPT, steer=(vector(scale=0.0),))
        assert (again, report.cached_tokens) == (plain, len(PROMPT.tokens) - 1)
    # Only the state of the request without vectors is on disk.
    assert sum(name.endswith(".safetensors") for name in os.listdir(tmp_path)) == 1
    async with manager_with(tiny, Settings(prefix_cache_dir=tmp_path)) as manager:
        again, report = await run(manager, prompt=PROMPT, steer=(vector(),))
        assert (again, report.cached_tokens) == (steered, 0)


async def test_drafts_do_not_change_a_steered_answer(no_shared_model, tiny, monkeypatch):
    monkeypatch.setattr(SpeculativeBatch, "cost", 1.0)
    repeated = TokenPrompt(tokens=(*range(1000, 1040), *range(1000, 1040), *range(1000, 1004)))
    # A large vector before the last norm makes the answer repeat one token.
    asked = options(vector(1, scale=50.0), prompt=repeated, max_tokens=40)
    answers = []
    # The draft model is not steered, so it drafts other tokens.
    for options_ in ({"prompt_lookup": False}, {"prompt_lookup": True}, {"draft": str(tiny.path)}):
        async with manager_with(tiny, spec=LoadSpec(model=tiny.id, **options_)) as manager:
            answers.append(await run(manager, **asked))
    (plain, report), (looked_up, with_lookup), (drafted, with_draft) = answers
    assert plain == looked_up == drafted
    assert with_lookup.accepted_tokens > 0 == report.accepted_tokens
    assert with_draft.drafted_tokens > 0


async def test_a_steered_answer_continues_after_a_pause(no_shared_model, tiny):
    bodies = [options(vector(seed=seed), max_tokens=150, top_logprobs=None) for seed in range(2)]
    async with manager_with(tiny, Settings(slots=2), turns=Turns(wait_s=0.0, turn_s=0.0)) as manager:
        expected = [(await run(manager, **body))[0] for body in bodies]
        streams = [await manager.submit(request(**body, caller=Caller(client="192.0.2.1"))) for body in bodies]
        answers = [asyncio.create_task(finish(stream)) for stream in streams]
        # One client has both slots, so one of its answers is paused for another client.
        await run(manager, prompt=numbers(5, start=1000), max_tokens=3, caller=Caller(client="192.0.2.2"))
        assert [(await answer)[0] for answer in answers] == expected
    assert any(step.kind == "paused" for stream in streams for step in stream.steps.steps())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (vector(2), r"layer 2; tiny has 2 layers, 0 to 1"),
        (vector(width=33), r"33 components; the residual stream of tiny has 32"),
        (vector(weights="0" * 64), r"files have the SHA-256 0{64}; those of tiny have [0-9a-f]{64}"),
        (SteeringVector(layer=0, vector="AADAfwAAwH8="), r"component 0 of the vector is nan"),
        (SteeringVector(layer=0, vector="AAA"), r"'AAA' is not base64"),
        (SteeringVector(layer=0, vector="AAAA"), r"3 bytes; send four bytes"),
        (vector(scale=1e39), r"their product must be a finite float32 number"),
        (vector(scale=1e17), r"layer 0 have a sum of length [0-9.]+e\+18, and the limit is 1e\+18"),
    ],
)
async def test_a_vector_that_does_not_fit_is_refused(manager, wrong, message):
    with invalid("steer", message):
        await manager.submit(request(steer=(wrong,) * 4))
    assert (await run(manager))[1].output_tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(temperature=0)},
        {"sampling": Sampling(temperature=1.0, top_p=0.5, top_k=5, min_p=0.1)},
        {"sampling": Sampling(temperature=1.0, seed=1, repetition_penalty=1.3)},
        {"max_tokens": 0, "score_prompt": True},
    ],
)
async def test_an_answer_whose_values_are_not_finite_ends_with_an_error(no_shared_model, tiny, changes):
    async with manager_with(tiny, Settings(slots=4, dtype="float16")) as manager:
        neighbour = asyncio.create_task(alone(manager, **options(max_tokens=20)))
        with invalid("steer", "not finite; use a smaller scale"):
            await alone(manager, **options(vector(scale=LONG), **changes))
        assert (await neighbour)[0] == (await alone(manager, **options(max_tokens=20)))[0]
