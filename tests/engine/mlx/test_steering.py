"""Vectors steer single requests of a batch, and change nothing in the others."""

from __future__ import annotations

import array
import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmx_lab.engine import ModelManager, TokenPrompt
from lmx_lab.engine.mlx.speculative import SpeculativeBatch
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from lmx_lab.values.generation import TokenLogprob
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.values.steering import SteeringVector, encode_components
from tests.engine.conftest import (
    engine_paused,
    finish_with_logprobs,
    numbers,
    request,
    run,
    submit_while_paused,
    until_written,
)

pytestmark = pytest.mark.anyio
PROMPT = numbers(40)
WIDTH, LAYERS = 32, 2


def vector(layer: int = 0, *, seed: int = 0, scale: float = 3.0, width: int = WIDTH, **changes: Any) -> SteeringVector:
    values = np.random.default_rng(seed).normal(size=width).astype(np.float32)
    text = encode_components(array.array("f", values.tobytes()))
    return SteeringVector(layer=layer, vector=text, scale=scale, **changes)


def options(*steer: SteeringVector, **changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, "top_logprobs": 2, "steer": steer, **changes}


async def together(manager: ModelManager, *requests: dict[str, Any]) -> list[tuple[str, list[TokenLogprob]]]:
    """Return the answers to requests that are computed in one batch from their first tokens."""
    async with engine_paused(manager):
        submits = [await submit_while_paused(manager, manager.submit(request(**each))) for each in requests]
    return list(await asyncio.gather(*[finish_with_logprobs(await submit) for submit in submits]))


async def alone(manager: ModelManager, **changes: Any) -> tuple[str, list[TokenLogprob]]:
    return await finish_with_logprobs(await manager.submit(request(**changes)))


@pytest.fixture
async def fresh(no_shared_model: None, tiny: ModelEntry) -> Any:
    """A manager without a prefix cache, so that every request computes its whole prompt."""
    async with ModelManager(Settings(slots=4, prefix_cache_bytes=0)) as manager:
        await manager.load_entry(tiny)
        yield manager


async def test_one_of_two_identical_requests_is_steered_and_the_other_unchanged(fresh: ModelManager) -> None:
    plain, steered, other = options(), options(vector()), options(vector(1, seed=1), vector(0, seed=2, scale=-1))
    unsteered = await together(fresh, plain, plain, plain)
    assert unsteered[0] == unsteered[1]
    answers = await together(fresh, plain, steered, other)
    # Every token, and every bit of its log-probabilities.
    assert answers[0] == unsteered[0]
    for at, each in ((1, steered), (2, other)):
        assert answers[at][0] != unsteered[0][0]
        text, logprobs = await alone(fresh, **each)
        assert (text, [token.token for token in logprobs]) == (answers[at][0], [it.token for it in answers[at][1]])
        assert [it.logprob for it in answers[at][1]] == pytest.approx([it.logprob for it in logprobs], abs=1e-4)


async def test_zero_vectors_change_nothing(fresh: ModelManager) -> None:
    plain = options()
    expected = await together(fresh, plain, plain)
    zero = [vector(layer, scale=0.0) for layer in range(LAYERS)]
    assert await together(fresh, options(*zero), plain) == expected
    # Two vectors of one layer are added.
    opposite = [vector(scale=2.0), vector(scale=-2.0)]
    assert await together(fresh, options(*opposite), plain) == expected


async def test_steered_rows_stay_the_same_while_others_join_and_leave(fresh: ModelManager) -> None:
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


async def test_the_scores_of_a_steered_prompt_are_its_log_probabilities(fresh: ModelManager) -> None:
    steered = options(vector())
    _, logprobs = await alone(fresh, **steered)
    tokens = tuple(it.token for it in logprobs if it.token is not None)
    whole = TokenPrompt(tokens=(*PROMPT.tokens, *tokens))
    stream = await fresh.submit(request(**{**steered, "prompt": whole, "max_tokens": 0, "score_prompt": True}))
    scores = [item async for item in stream]
    assert not scores
    assert stream.prompt_scores is not None
    scored = stream.prompt_scores.tokens[len(PROMPT.tokens) :]
    assert [it.logprob for it in scored] == pytest.approx([it.logprob for it in logprobs], abs=1e-4)


async def test_caches_of_steered_requests_are_used_only_with_the_same_vectors(tmp_path: Path, tiny: ModelEntry) -> None:
    async with ModelManager(Settings(prefix_cache_dir=tmp_path)) as manager:
        await manager.load_entry(tiny)
        steered, _ = await run(manager, prompt=PROMPT, steer=(vector(),))
        assert steered != (await run(manager, prompt=PROMPT, steer=(vector(scale=2.0),)))[0]
        async with until_written(manager):
            plain, report = await run(manager, prompt=PROMPT)
        assert report.cached_tokens == 0
        again, report = await run(manager, prompt=PROMPT, steer=(vector(),))
        assert (again, report.cached_tokens) == (steered, len(PROMPT.tokens) - 1)
        assert (await run(manager, prompt=PROMPT))[0] == plain
    # Only the state of the request without vectors is on disk.
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    async with ModelManager(Settings(prefix_cache_dir=tmp_path)) as manager:
        await manager.load_entry(tiny)
        again, report = await run(manager, prompt=PROMPT, steer=(vector(),))
        assert (again, report.cached_tokens) == (steered, 0)


async def test_prompt_lookup_does_not_change_a_steered_answer(
    no_shared_model: None, tiny: ModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculativeBatch, "_cost", 1.0)
    repeated = TokenPrompt(tokens=(*range(1000, 1040), *range(1000, 1040), *range(1000, 1004)))
    # A large vector before the last norm makes the answer repeat one token.
    asked = options(vector(1, scale=50.0), prompt=repeated, max_tokens=40)
    answers = {}
    for lookup in (False, True):
        async with ModelManager(Settings()) as manager:
            await manager.load_entry(tiny, LoadSpec(model=tiny.id, prompt_lookup=lookup))
            answers[lookup] = await run(manager, **asked)
    assert answers[True][0] == answers[False][0]
    assert answers[True][1].accepted_tokens > 0 == answers[False][1].accepted_tokens


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (vector(2), r"layer 2; tiny has 2 layers, 0 to 1"),
        (vector(width=33), r"33 components; the residual stream of tiny has 32"),
        (vector(weights="0" * 64), r"files have the SHA-256 0{64}; those of tiny have [0-9a-f]{64}"),
        (SteeringVector(layer=0, vector="AADAfwAAwH8="), r"component 0 of the vector is nan"),
        (SteeringVector(layer=0, vector="AAA"), r"'AAA' is not base64"),
        (SteeringVector(layer=0, vector="AAAA"), r"3 bytes; send four bytes"),
        (vector(scale=1e38), r"their product must be a finite float32 number"),
    ],
)
async def test_a_vector_that_does_not_fit_is_refused(
    manager: ModelManager, wrong: SteeringVector, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        await manager.submit(request(steer=(wrong,)))
    assert refused.value.param == "steer"
    assert (await run(manager))[1].output_tokens
