"""On every engine, a long answer is paused for a request that waits, and continues with the same text."""

import asyncio

import pytest

from lmx_lab.engine import AnswerFormat, Caller, Sampling
from lmx_lab.engine.scheduler import Turns
from tests.contract.engines.entries import CONTEXT, FEW
from tests.support.engines import loaded, numbers, request, run

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
PLAIN = {"prompt": numbers(20, start=100), "ignore_eos": True}
WITH_STATE = {
    "prompt": numbers(20, start=200),
    "sampling": Sampling(temperature=1.0, seed=7, frequency_penalty=0.3),
    "answer_format": AnswerFormat(kind="regex", text="[a-f]+"),
    "min_tokens": CONTEXT // 2,
}
"""A request whose next token depends on a random state, on counted tokens and on a grammar."""


@pytest.fixture
async def impatient(long_models, model_format):
    """A model with two slots, which pauses a request as soon as another client waits."""
    turns = Turns(wait_s=0.0, turn_s=0.0, check_s=0.001)
    async with loaded(long_models[model_format], FEW, turns=turns) as model:
        yield model


class Reading:
    """An answer that is read in the background until it is closed."""

    def __init__(self, stream):
        self.stream = stream
        self.deltas = []
        self.progress = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        try:
            async for delta in self.stream:
                self.deltas.append(delta)
                self.progress.set()
        finally:
            self.progress.set()

    @property
    def pauses(self):
        return sum(step.kind == "paused" for step in self.stream.steps.steps())

    async def read_more(self):
        """Wait for the next part of the answer, or for its end."""
        if not self.task.done():
            self.progress.clear()
            await self.progress.wait()

    async def close_after_more(self):
        """Read more of the answer, and close it; return its text and its number of tokens."""
        await self.read_more()
        await self.stream.aclose()
        await self.task
        return "".join(delta.text for delta in self.deltas), sum(delta.tokens for delta in self.deltas)


async def test_a_long_answer_is_paused_for_a_request_that_waits(impatient, model_format):
    # llama.cpp cannot continue an answer with a grammar, so it is not paused.
    bodies = [PLAIN, {**PLAIN, "top_logprobs": 1} if model_format == "gguf" else WITH_STATE]
    long = {"max_tokens": CONTEXT - 100, "caller": Caller(client="192.0.2.1")}

    async def start(body):
        return Reading(await impatient.submit(request(**body, **long)))

    at = 0
    for body in bodies:
        reading, beside = await start(body), await start(PLAIN)
        while reading.task.done() or not reading.pauses:
            # On a busy machine, an answer may end before a short one has begun.
            reading = await start(body) if reading.task.done() else reading
            beside = await start(PLAIN) if beside.task.done() else beside
            # One client has both slots, so each of these requests of other clients gets its slot by a pause.
            at += 1
            caller, prompt = Caller(client=f"192.0.2.{1 + at}"), numbers(5, start=100 * (at % 400))
            _, short = await run(impatient, prompt=prompt, max_tokens=3, ignore_eos=True, caller=caller)
            assert short.output_tokens == 3
            # A paused answer gets its slot again before the next request takes it.
            await reading.read_more()
        text, tokens = await reading.close_after_more()
        await beside.close_after_more()
        decoded = sum(step.tokens for step in reading.stream.steps.steps() if step.kind == "decode")
        assert decoded >= tokens > 0
        alone, report = await run(impatient, **body, max_tokens=tokens)
        # The end of the text may be part of a character, which is held back until it is complete.
        assert alone.startswith(text)
        assert (len(alone) - len(text) <= 3, report.output_tokens) == (True, tokens)
