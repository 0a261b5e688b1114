"""Prompts with a gap, rendered chats and the bytes of tokens have the same contract on every engine. For the same
weights, prompts, greedy texts and log-probabilities of both formats agree.
"""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from lmx_lab.engine import ChatPrompt, InfillPrompt, TextPrompt
from lmx_lab.engine.echo.model import BEGIN, MESSAGE
from lmx_lab.errors import ContextLengthError, InvalidRequestError, NotLoadedError
from lmx_lab.weights.tokenizer_files import can_infill
from tests.contract.engines.entries import SETTINGS
from tests.support.asking import invalid
from tests.support.engines import (
    PLACE_TOOLS,
    PROMPT,
    TOOL_CONVERSATION,
    echo_entry,
    entry_of,
    finish,
    finish_with_logprobs,
    loaded,
    request,
    run,
)
from tests.support.gguf import with_values
from tests.support.models import rename_tokens, write_tiny_llama

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
MARKS = {"<repo_name>": "<|fim_prefix|>", "<reponame>": "<|fim_suffix|>", "<file_sep>": "<|fim_middle|>"}
"""SmolLM2's tokens, and Qwen's names for the tokens around a gap."""
PREFIX, SUFFIX, MIDDLE = 3, 4, 5
FIRST = "<|im_start|>"
"""SmolLM2's token with the id 1, which its GGUF file declares as the first one of a text."""
GAP = InfillPrompt(prefix="def f(a):\n    ", suffix="\n    return b")


@pytest.fixture(scope="session")
def coders(with_names):
    """The tiny model with tokens for filling gaps."""
    return with_names("coder", lambda path: rename_tokens(path, MARKS), MARKS, "{{ messages[0].content }}")


@pytest.fixture(scope="module")
async def coder(coders, model_format):
    async with loaded(coders[model_format], SETTINGS) as model:
        yield model


@pytest.fixture(scope="session")
def beginners(tmp_path_factory, smollm2, tiny_gguf):
    """The tiny model with a tokenizer that adds a token before each text; the echo engine adds none."""
    folder = tmp_path_factory.mktemp("beginner")
    write_tiny_llama(folder / "mlx", smollm2.path, seed=0)
    tokenizer = Tokenizer.from_file(str(folder / "mlx" / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single=f"{FIRST} $A", special_tokens=[(FIRST, 1)])
    tokenizer.save(str(folder / "mlx" / "tokenizer.json"))
    gguf = with_values(tiny_gguf, folder / "beginner.gguf", {"tokenizer.ggml.add_bos_token": True})
    return {"mlx": entry_of(folder / "mlx", "beginner"), "gguf": entry_of(gguf, "beginner"), "echo": echo_entry("tiny")}


async def test_a_text_that_begins_with_the_token_of_every_text_has_it_once(beginners, model_format):
    async with loaded(beginners[model_format], SETTINGS) as model:
        plain, first = await tokens_of(model, "The sea"), await tokens_of(model, FIRST)
        added = [] if model_format == "echo" else first
        for text, expected in (
            ("The sea", [*added, *plain]),
            (f"{FIRST}The sea", [*first, *plain]),
            (f"{FIRST}{FIRST}The sea", [*first, *first, *plain]),
            (FIRST, first),
        ):
            prompt = request(prompt=TextPrompt(text=text), max_tokens=1, ignore_eos=True)
            assert await model.model.encode(prompt) == expected
            stream = await model.submit(prompt)
            assert list(stream.prompt) == expected
            await finish(stream)


async def tokens_of(model, text):
    return await model.model.encode(request(prompt=TextPrompt(text=text, special=False)))


async def test_a_gap_is_marked_by_the_tokens_of_the_model(coder, coders, model_format):
    before, after = [await tokens_of(coder, text) for text in (GAP.prefix, GAP.suffix)]
    expected = [PREFIX, *before, SUFFIX, *after, MIDDLE]
    if model_format == "echo":
        expected = [BEGIN, *before, MESSAGE, *after, MESSAGE]
    assert await coder.model.encode(request(prompt=GAP)) == expected
    stream = await coder.submit(request(prompt=GAP, max_tokens=4, ignore_eos=True))
    assert list(stream.prompt) == expected
    text, _ = await finish(stream)
    assert text == (await run(coder, prompt=GAP, max_tokens=4, ignore_eos=True))[0] != ""
    assert can_infill(coders[model_format])


async def test_the_text_in_a_gap_ends_with_a_token_that_ends_a_file(coder, model_format):
    if model_format == "echo":
        pytest.skip("the echo engine has one token that ends an answer")
    ends = replace(request().sampling, logit_bias=((0, 1000.0),))
    report = (await run(coder, prompt=GAP, sampling=ends, max_tokens=4))[1]
    assert (report.finish_reason, report.output_tokens) == ("stop", 1)


async def test_a_model_without_these_tokens_refuses_a_gap(model, chat_models, model_format):
    if model_format == "echo":
        pytest.skip("the echo engine fills gaps")
    with invalid("suffix", "tiny cannot fill a gap before a suffix"):
        await model.submit(request(prompt=GAP))
    assert not can_infill(chat_models[model_format])


async def test_parts_around_a_gap_are_checked(coder):
    with invalid("suffix", "suffix has the lone surrogate"):
        await coder.submit(request(prompt=InfillPrompt(prefix="a", suffix="\ud800")))
    with pytest.raises(ContextLengthError):
        await coder.submit(request(prompt=InfillPrompt(prefix="a", suffix="word " * 1_000_000)))


async def test_the_text_of_a_chat_has_the_tokens_of_its_prompt(model, model_format):
    chat = request(prompt=ChatPrompt(messages=({"role": "user", "content": "Hi there!"},)))
    text = await model.model.render(chat)
    assert "Hi there!" in text
    tokens = await model.model.encode(chat)
    assert await model.model.decode(tokens) == text
    if model_format != "echo":
        assert await tokens_of(model, text) == tokens
    empty = request(prompt=ChatPrompt(messages=({"role": "user"},)))
    with pytest.raises(InvalidRequestError):
        await model.model.render(empty)


async def test_the_bytes_of_tokens_are_those_of_their_text(model, model_format):
    text = "Naïve 東京 😀\n"
    tokens = await tokens_of(model, text)
    pieces = await model.model.token_bytes(tokens)
    assert b"".join(pieces).decode() == text
    name = await model.model.token_bytes([2])
    assert name == [b"<|end|>" if model_format == "echo" else b"<|im_end|>"]
    for unknown in (-1, 10**6):
        with pytest.raises(InvalidRequestError, match=f"tokens has the token id {unknown}; tiny knows 0 to"):
            await model.model.decode([unknown])


async def test_a_closed_model_decodes_no_tokens(own):
    assert await own.model.decode([300])
    await own.close()
    for decode in (own.model.decode, own.model.token_bytes):
        with pytest.raises(NotLoadedError, match="long has been unloaded"):
            await decode([300])


async def test_an_empty_text_has_no_tokens(model):
    assert await tokens_of(model, "") == []


# The same weights in both formats


@pytest.fixture(scope="module")
async def both(chat_models):
    async with (
        loaded(chat_models["mlx"], SETTINGS) as mlx,
        loaded(chat_models["gguf"], SETTINGS) as gguf,
    ):
        yield mlx, gguf


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        TextPrompt(text="Naïve 東京 😀 1234\n\n  x = y"),
        TextPrompt(text="<|im_start|>user\nhi<|im_end|>\n"),
        ChatPrompt(messages=({"role": "user", "content": "  Hi there!  "},)),
        ChatPrompt(messages=TOOL_CONVERSATION[:2]),
        ChatPrompt(messages=TOOL_CONVERSATION, tools=PLACE_TOOLS),
        ChatPrompt(messages=TOOL_CONVERSATION),
    ],
)
async def test_both_formats_make_the_same_tokens_of_a_prompt(both, prompt):
    prompts = []
    for model in both:
        async with await model.submit(request(prompt=prompt, max_tokens=0)) as stream:
            prompts.append(stream.prompt)
    assert prompts[0] == prompts[1]


async def test_both_formats_generate_the_same_text_with_the_same_probabilities(both):
    scored_request = request(max_tokens=20, top_logprobs=5, ignore_eos=True)
    (text, ours), (other, theirs) = [await finish_with_logprobs(await model.submit(scored_request)) for model in both]
    assert text == other
    for one, two in zip(ours, theirs, strict=True):
        assert (one.token, one.text, one.bytes) == (two.token, two.text, two.bytes)
        assert one.logprob == pytest.approx(two.logprob, abs=0.02)
        assert [entry.logprob for entry in one.top] == pytest.approx([entry.logprob for entry in two.top], abs=0.02)


async def test_both_formats_decode_tokens_to_the_same_text(both):
    tokens = [300, 301, 2, 0, 218, 198, 10813, 242, 218]
    assert len({await model.model.decode(tokens) for model in both}) == 1
