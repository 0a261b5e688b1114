"""On every engine, a long answer is paused for a request that waits, and continues with the same text."""

import asyncio

import pytest

from lmx_lab.engine import AnswerFormat, Caller, Sampling, scheduler
from lmx_lab.engine.llama_cpp import queue
from tests.support.engines import finish, numbers, request, run

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TOKENS = 150
# Longer, because llama.cpp computes 150 tokens of the tiny model before it notices that other requests wait.
PLAIN = {"prompt": numbers(20, start=100), "max_tokens": 400, "ignore_eos": True}
WITH_STATE = {
    "prompt": numbers(20, start=200),
    "max_tokens": 2 * TOKENS,
    "sampling": Sampling(temperature=1.0, seed=7, frequency_penalty=0.3),
    "answer_format": AnswerFormat(kind="regex", text=f"[a-f]{{{TOKENS}}}"),
}
"""A request whose next token depends on a random state, on counted tokens and on a grammar."""


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr(scheduler, "TURN_S", 0.0)
    monkeypatch.setattr(scheduler, "WAIT_S", 0.0)
    monkeypatch.setattr(queue, "PAUSE_CHECK_S", 0.001)


async def test_a_long_answer_is_paused_for_a_request_that_waits(busy, model_format):
    # llama.cpp cannot continue an answer with a grammar, so it is not paused.
    bodies = [PLAIN, {**PLAIN, "top_logprobs": 1} if model_format == "gguf" else WITH_STATE]
    alone = [await run(busy, **body) for body in bodies]
    streams = [await busy.submit(request(**body, caller=Caller(client="192.0.2.1"))) for body in bodies]
    answers = [asyncio.create_task(finish(stream)) for stream in streams]
    for at in range(2):
        # One client has both slots, so each of these requests of other clients gets its slot by a pause.
        caller = Caller(client=f"192.0.2.{2 + at}")
        _, short = await run(busy, prompt=numbers(5, start=1000 * at), max_tokens=3, ignore_eos=True, caller=caller)
        assert short.output_tokens == 3
        assert not any(answer.done() for answer in answers)
    paused = [await answer for answer in answers]
    assert [text for text, _ in paused] == [text for text, _ in alone]
    for (_, report), (_, expected) in zip(paused, alone, strict=True):
        assert report.output_tokens == expected.output_tokens > TOKENS / 3
        assert (report.prompt_tokens, report.finish_reason) == (expected.prompt_tokens, expected.finish_reason)
    steps = [stream.steps.steps() for stream in streams]
    assert sum(step.kind == "paused" for each in steps for step in each) == 2
    for each, (_, report) in zip(steps, paused, strict=True):
        assert sum(step.tokens for step in each if step.kind == "decode") == report.output_tokens
