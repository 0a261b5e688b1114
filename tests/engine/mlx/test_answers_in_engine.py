"""Formats, forced tool calls and reasoning in the MLX engine, with a random model that has the markers."""

import asyncio
import math

import pytest

from lmx_lab.engine import AnswerFormat
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from tests.support.engines import (
    ONLY_WAIT,
    PLACE_FORMAT,
    FinishedAnswer,
    chat_request,
    finish,
    finish_answer,
    is_place,
    manager_with,
    request,
)
from tests.support.engines import run_chat as run

pytestmark = pytest.mark.anyio

THINK = 3
FOUR_SLOTS = Settings(slots=4, queue_limit=8)


@pytest.fixture
def manager(shared, thinker):
    with shared.use(FOUR_SLOTS, thinker) as manager:
        yield manager


@pytest.fixture
async def own_manager(no_shared_model, thinker):
    async with manager_with(thinker, FOUR_SLOTS) as manager:
        yield manager


# Reasoning

# Tokens with whole characters, the likeliest first, so that the reasoning does not end inside a character.
WORDS = {300 + number: 1000.0 - 40 * number for number in range(10)}


def without_white_space(*texts):
    """Join the texts without white space, which is removed at the ends of reasoning."""
    return "".join("".join(texts).split())


async def test_a_budget_of_0_leaves_only_the_end_marker(manager):
    answer = await run(manager, open_thoughts=True, thinking_budget=0, bias=WORDS, max_tokens=8)
    assert (answer.reasoning, answer.report.reasoning_tokens, answer.report.output_tokens) == ("", 1, 8)
    assert answer.text


async def test_reasoning_ends_exactly_at_its_budget(manager):
    free = await run(manager, open_thoughts=True, bias=WORDS, max_tokens=8)
    cut = await run(manager, open_thoughts=True, thinking_budget=5, bias=WORDS, max_tokens=9)
    assert (free.text, free.report.reasoning_tokens) == ("", 8)
    assert cut.report.reasoning_tokens == 5 + 1
    assert free.reasoning.startswith(cut.reasoning)
    assert without_white_space(cut.reasoning, cut.text) == without_white_space(free.reasoning)


async def test_a_budget_counts_from_the_start_of_the_reasoning(manager):
    answer = await run(manager, thinking_budget=2, bias={THINK: 1040, **WORDS}, max_tokens=7)
    plain = await run(manager, thinking_budget=2, bias=WORDS, max_tokens=5)
    assert (plain.reasoning, plain.report.reasoning_tokens) == ("", 0)
    # The marker that begins, two tokens, the marker that ends.
    assert answer.report.reasoning_tokens == 4
    assert answer.report.output_tokens == 7
    assert without_white_space(answer.reasoning, answer.text) == without_white_space(plain.text)


async def test_a_budget_has_no_effect_if_the_prompt_has_closed_the_reasoning(manager):
    answer = await run(manager, enable_thinking=False, thinking_budget=0, bias=WORDS, max_tokens=8)
    assert (answer.reasoning, answer.report.reasoning_tokens, answer.report.output_tokens) == ("", 0, 8)


# In one batch


async def test_constrained_and_free_answers_do_not_affect_each_other(manager):
    options = [
        {"answer_format": PLACE_FORMAT, "enable_thinking": False},
        {"tools": ONLY_WAIT, "content": "Who?"},
        {"max_tokens": 40, "content": "Why?"},
        {"open_thoughts": True, "thinking_budget": 4, "answer_format": PLACE_FORMAT, "bias": WORDS},
        {"answer_format": AnswerFormat(kind="regex", text="[ab]{20}"), "enable_thinking": False},
    ]
    alone = [await run(manager, **changes) for changes in options]
    together = await asyncio.gather(*(run(manager, **changes) for changes in options))
    assert is_place(together[0].text)
    assert [name for name, _ in together[1].calls] == ["wait"]
    assert together[2].report.output_tokens == 40
    assert set(together[4].text) <= {"a", "b"}
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.reasoning, one.calls) == (other.text, other.reasoning, other.calls)


# Log-probabilities, ends, errors


async def test_a_call_has_logprobs_too(manager):
    answer = await run(manager, tools=ONLY_WAIT, open_thoughts=True, thinking_budget=3, top_logprobs=0)
    assert len(answer.logprobs) == answer.report.output_tokens
    assert all(entry.logprob is not None and math.isfinite(entry.logprob) for entry in answer.logprobs)


async def test_an_answer_needs_no_more_tokens_than_its_format(manager):
    pattern = AnswerFormat(kind="regex", text="[0-9]{7}")
    plenty = await run(manager, answer_format=pattern, enable_thinking=False)
    # SmolLM2's tokenizer has a token for each digit; the one that ends the text is not needed.
    enough = await run(manager, answer_format=pattern, enable_thinking=False, max_tokens=7)
    short = await run(manager, answer_format=pattern, enable_thinking=False, max_tokens=6)
    assert (plenty.reason, enough.reason, short.reason) == ("stop", "stop", "length")
    assert plenty.text == enough.text == short.text + plenty.text[-1]


async def test_a_format_that_cannot_be_continued_ends_only_its_answer(manager):
    # The grammar compiles and is valid for more tokens than its check tries, but then allows no token.
    dead_end = AnswerFormat(kind="lark", text="start: WAY END\nWAY: /[qz]{100}/\nEND: /a+/ & /b+/")
    accepted = await manager.submit(chat_request(answer_format=dead_end, enable_thinking=False, max_tokens=200))
    failing, neighbour = await asyncio.gather(
        finish_answer(accepted),
        run(manager, answer_format=AnswerFormat(kind="regex", text="[ab]{60}"), enable_thinking=False),
        return_exceptions=True,
    )
    assert isinstance(failing, InvalidRequestError)
    assert "no text can be a whole answer" in failing.message
    assert isinstance(neighbour, FinishedAnswer)
    assert (len(neighbour.text), neighbour.reason) == (60, "stop")
    assert is_place((await run(manager, answer_format=PLACE_FORMAT, enable_thinking=False)).text)


async def test_grammars_do_not_keep_the_model_in_memory(own_manager):
    loaded = own_manager.snapshot.model_memory_bytes
    kept = await own_manager.submit(chat_request(answer_format=PLACE_FORMAT, open_thoughts=True, thinking_budget=2))
    await finish_answer(kept)
    await run(own_manager, tools=ONLY_WAIT)
    freed = await own_manager.unload()
    assert freed >= loaded * 0.95
    assert own_manager.snapshot.memory_used_bytes < loaded * 0.05


async def test_the_first_two_grammars_may_be_compiled_at_the_same_time(own_manager):
    answer = await asyncio.gather(
        run(own_manager, answer_format=PLACE_FORMAT, enable_thinking=False),
        run(own_manager, tools=ONLY_WAIT),
        run(own_manager, answer_format=AnswerFormat(kind="regex", text="(yes|no)"), enable_thinking=False),
    )
    assert is_place(answer[0].text)
    assert is_place(answer[1].calls[0][1])
    assert answer[2].text in ("yes", "no")


async def test_an_answer_with_a_forced_text_has_one_token_in_each_step_and_delays_no_other(manager):
    # The whole text is forced: after each token, the format allows exactly one.
    text = "the sea is wide and deep " * 40
    forced_request = request(max_tokens=100, answer_format=AnswerFormat(kind="regex", text=text))
    # Only the first request waits until the format is compiled.
    await finish(await manager.submit(forced_request))
    free = await manager.submit(request(max_tokens=300, ignore_eos=True))
    await anext(free)
    forced = await manager.submit(forced_request)
    answers = await asyncio.gather(finish(free), finish(forced))
    assert text.startswith(answers[1][0])
    free_steps, forced_steps = (
        {step.step: step.tokens for step in each.steps.steps() if step.kind == "decode"} for each in (free, forced)
    )
    assert forced_steps == dict.fromkeys(forced_steps, 1)
    during = {at for at in free_steps if min(forced_steps) <= at <= max(forced_steps)}
    assert during == forced_steps.keys()
    assert len(during) > 50
