"""For the same weights in both formats, prompts, greedy texts and log-probabilities agree."""

import pytest

from lmx_lab.engine import ChatPrompt, ModelManager, TextPrompt
from tests.engine.contract.entries import SETTINGS
from tests.support.engines import (
    DESCRIBED_TOOLS,
    PROMPT,
    TOOL_CONVERSATION,
    finish_with_logprobs,
    load_entry,
    request,
    text_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
async def both(chat_models):
    async with ModelManager(SETTINGS) as mlx, ModelManager(SETTINGS) as gguf:
        await load_entry(mlx, chat_models["mlx"])
        await load_entry(gguf, chat_models["gguf"])
        yield mlx, gguf


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        TextPrompt(text="Naïve 東京 😀 1234\n\n  x = y"),
        TextPrompt(text="<|im_start|>user\nhi<|im_end|>\n"),
        ChatPrompt(messages=({"role": "user", "content": "  Hi there!  "},)),
        ChatPrompt(messages=TOOL_CONVERSATION[:2]),
        ChatPrompt(messages=TOOL_CONVERSATION, tools=DESCRIBED_TOOLS),
        ChatPrompt(messages=TOOL_CONVERSATION),
    ],
)
async def test_both_formats_make_the_same_tokens_of_a_prompt(both, prompt):
    prompts = []
    for manager in both:
        async with await manager.submit(request(prompt=prompt, max_tokens=0)) as stream:
            prompts.append(stream.prompt)
    assert prompts[0] == prompts[1]


async def test_both_formats_generate_the_same_text_with_the_same_probabilities(both):
    scored_request = request(max_tokens=20, top_logprobs=5, ignore_eos=True)
    (text, ours), (other, theirs) = [
        await finish_with_logprobs(await manager.submit(scored_request)) for manager in both
    ]
    assert text == other
    for one, two in zip(ours, theirs, strict=True):
        assert (one.token, one.text, one.bytes) == (two.token, two.text, two.bytes)
        assert one.logprob == pytest.approx(two.logprob, abs=0.02)
        assert [entry.logprob for entry in one.top] == pytest.approx([entry.logprob for entry in two.top], abs=0.02)


async def test_both_formats_decode_tokens_to_the_same_text(both):
    tokens = [300, 301, 2, 0, 218, 198, 10813, 242, 218]
    assert len({await text_of(manager, tokens) for manager in both}) == 1
