"""Enforced formats, tools and reasoning have the same contract on every engine."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from lmx_lab.engine import AnswerFormat, ChatPrompt, Sampling, TextPrompt, Tool, ToolUse
from lmx_lab.engine.grammar.schemas import enforceable
from lmx_lab.engine.sandbox import shared_pool
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.steering import SteeringVector
from tests.contract.engines.entries import SETTINGS
from tests.support.asking import invalid
from tests.support.engines import (
    ONLY_WAIT,
    PLACE_FORMAT,
    PLACE_TOOLS,
    TOOL_CONVERSATION,
    chat_request,
    echo_entry,
    engine_alone,
    finish_answer,
    is_place,
    load_on,
    loaded,
    merge,
    toward,
    until_idle,
)
from tests.support.engines import run_chat as run
from tests.support.generated_schemas import generated_schemas
from tests.support.waiting import auntil

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
REGEX = AnswerFormat(kind="regex", text="[a-c]{5}-(left|right)")
LARK = AnswerFormat(kind="lark", text='start: "x" DIGITS\nDIGITS: /[0-9]{3}/')
FORCED = replace(PLACE_TOOLS, forced=True, parallel=False)


LONG = "Where is the river, and where is the sea, and how far is it from here?"


@pytest.fixture(scope="module")
async def _roomy_model(chat_models, model_format):
    # A prompt with tools has more tokens on the echo engine.
    entry = echo_entry("tiny", context=4096) if model_format == "echo" else chat_models[model_format]
    async with loaded(entry, SETTINGS) as model:
        yield model


@pytest.fixture
async def model(_roomy_model):
    """``tiny`` in memory, shared by the tests of this module."""
    yield _roomy_model
    await until_idle(_roomy_model)


async def answer_or_refusal(model, **changes):
    """Return the answer, or the error of a refused request."""
    try:
        return await run(model, **changes)
    except InvalidRequestError as exc:
        return exc


@pytest.fixture
def marker(tiny):
    """The tokens of the marker that begins a tool call."""
    return Tokenizer.from_file(str(tiny.path / "tokenizer.json")).encode("<tool_call>").ids


@pytest.fixture(scope="module")
async def thinker(thinkers, model_format):
    """A model that has markers of reasoning and tool calls, and a template with tools."""
    if model_format == "echo":
        pytest.skip("echo has no template that opens the reasoning; its reasoning is tested in tests/engine/echo")
    async with loaded(thinkers[model_format], SETTINGS) as model:
        yield model


# Formats


async def test_a_schema_is_enforced_whatever_the_temperature(model):
    for seed in range(4):
        result = await run(model, answer_format=PLACE_FORMAT, sampling=Sampling(temperature=2, seed=seed))
        assert is_place(result.text)
        assert result.reason == "stop"
    assert is_place((await run(model, answer_format=PLACE_FORMAT, prompt=TextPrompt(text="river"))).text)


@pytest.mark.parametrize(("form", "pattern"), [(REGEX, "[a-c]{5}-(left|right)"), (LARK, "x[0-9]{3}")])
async def test_patterns_and_grammars_are_enforced(model, form, pattern):
    texts = {(await run(model, answer_format=form, sampling=Sampling(seed=seed))).text for seed in range(4)}
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 1


async def test_keys_are_written_in_the_tokens_of_the_tokenizer(model, tiny, model_format):
    named = {name: {"type": "boolean"} for name in ("setup", "conditions", "publication_year")}
    form = AnswerFormat(
        kind="json_schema", text=json.dumps({"type": "object", "properties": named, "required": [*named]})
    )
    answer = await run(model, answer_format=form, top_logprobs=0)
    assert json.loads(answer.text).keys() == named.keys()
    if model_format != "echo":
        tokenizer = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
        known = [tokenizer.decode([token]) for name in named for token in tokenizer.encode(f'"{name}"').ids[1:-1]]
        written = [entry.text for entry in answer.logprobs]
        assert [text for text in written if text in known] == known


@pytest.mark.parametrize("constant", ["x <|im_end|> y", "<|message|>", "long text " * 300])
async def test_a_constant_may_be_long_or_spell_a_special_token(model, constant):
    form = AnswerFormat(kind="json_schema", text=json.dumps({"const": constant}))
    answer = await run(model, answer_format=form, max_tokens=400)
    written = json.dumps(constant)
    assert answer.text == written[: len(answer.text)]
    assert answer.report.finish_reason == ("stop" if answer.text == written else "length")


async def test_an_enum_may_have_thousands_of_values(model):
    values = [f"value {at} of {at * 7919}" for at in range(2500)]
    form = AnswerFormat(kind="json_schema", text=json.dumps({"enum": values}))
    answer = await finish_answer(await model.submit(chat_request(answer_format=form)))
    assert json.loads(answer.text) in values


async def test_white_space_in_json_is_limited(model):
    # The bias makes white space the likeliest tokens.
    spaces = Sampling(temperature=0, logit_bias=tuple((token, 100.0) for token in (198, 216, 221, 256, 284)))
    schema_format = AnswerFormat(
        kind="json_schema", text=json.dumps({"type": "array", "items": {"const": 1}, "maxItems": 2})
    )
    result = await run(model, answer_format=schema_format, sampling=spaces)
    assert json.loads(result.text) in ([], [1], [1, 1])


@pytest.mark.parametrize("name", generated_schemas())
async def test_answers_follow_the_schemas_of_generators(model, name):
    given = generated_schemas()[name]
    form = AnswerFormat(kind="json_schema", text=json.dumps(given), strict=False)
    result = await run(model, answer_format=form, max_tokens=600, sampling=Sampling(temperature=0.5, seed=1))
    assert result.reason == "stop", result.text
    # Zod's times are not those of the format that it names.
    checker = Draft202012Validator(enforceable(given, strict=False), format_checker=Draft202012Validator.FORMAT_CHECKER)
    checker.validate(json.loads(result.text))


@pytest.mark.parametrize("escape", ["\\u12ab", "\\/"])
async def test_a_model_may_write_any_escape_in_a_string(model, tiny, model_format, escape):
    one = AnswerFormat(kind="json_schema", text=json.dumps({"type": "string", "maxLength": 1}))
    tokens = Tokenizer.from_file(str(tiny.path / "tokenizer.json")).encode(f'"{escape}').ids
    # The echo engine says what the message says.
    options = chat_request(answer_format=one, content=f'"{escape}"')
    result = await finish_answer(await model.submit(options if model_format == "echo" else toward(options, tokens)))
    assert result.text == f'"{escape}"'


BROKEN = {
    "json_schema": ['{"type": 5}', '{"type": "string", "pattern": "(["}', '{"not": {"type": "string"}}'],
    "regex": ["[a-", "(?=ahead)"],
    "lark": ["start: nope", "start: /[a-/", "start: %json { nothing", ""],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in BROKEN.items() for text in texts])
async def test_an_invalid_format_is_refused_before_the_first_token(model, kind, text):
    with invalid("response_format", "cannot be enforced"):
        await model.submit(chat_request(answer_format=AnswerFormat(kind=kind, text=text)))


async def test_a_format_is_either_enforced_or_refused(model):
    result = await answer_or_refusal(model, answer_format=AnswerFormat(kind="lark", text="start: <[^300]>"))
    if isinstance(result, InvalidRequestError):
        assert result.param == "response_format"
        assert 'load the model with engine="mlx"' in result.message


async def test_a_format_may_allow_any_text(model):
    for kind, text in (("regex", "(?s:.*)"), ("lark", "start: /(?s:.*)/")):
        result = await run(model, answer_format=AnswerFormat(kind=kind, text=text), content=LONG, max_tokens=10)
        assert result.report.output_tokens == 10


async def test_a_format_cannot_be_combined_with_ignore_eos(model):
    for changes in ({"answer_format": PLACE_FORMAT}, {"tools": ONLY_WAIT}, {"tools": PLACE_TOOLS}):
        with invalid("ignore_eos"):
            await model.submit(chat_request(ignore_eos=True, **changes))
    assert (await run(model, ignore_eos=True, max_tokens=5)).report.output_tokens == 5


async def test_a_format_with_too_few_tokens_ends_with_length(model):
    digits = AnswerFormat(kind="regex", text="[0-9]{9}")
    cut = await run(model, answer_format=digits, max_tokens=5)
    assert (len(cut.text), cut.reason) == (5, "length")


# Tools


async def test_a_forced_call_is_the_whole_answer(model):
    result = await run(model, tools=FORCED)
    ((name, arguments),) = result.calls
    assert name in ("look", "wait")
    assert is_place(arguments)
    assert (result.text, result.reason) == ("", "tool_calls")


async def test_a_named_tool_is_called_once(model):
    result = await run(model, tools=ONLY_WAIT)
    assert [name for name, _ in result.calls] == ["wait"]
    assert is_place(result.calls[0][1])
    assert (result.text, result.reason) == ("", "tool_calls")


async def test_forced_parallel_calls_are_all_calls_with_ids_of_their_own(model):
    stream = await model.submit(chat_request(tools=replace(PLACE_TOOLS, forced=True), max_tokens=400))
    deltas = [delta async for delta in stream]
    pieces = [call for delta in deltas for call in delta.tool_calls]
    calls = merge(pieces)[0]
    assert 1 <= len(calls) <= 16
    assert all(is_place(arguments) for _, arguments in calls[:-1])
    assert "".join(delta.text for delta in deltas) == ""
    assert len({(name, json.dumps(json.loads(arguments))) for name, arguments in calls[:-1]}) == len(calls[:-1])
    ids = [piece.id for piece in pieces if piece.id is not None]
    assert len(set(ids)) == len(ids) == len({piece.index for piece in pieces})
    assert [piece.name for piece in pieces if piece.id is not None].count(None) == 0


async def test_a_forced_answer_ends_before_it_repeats_a_call(model):
    only = {"type": "object", "properties": {"place": {"const": "sea"}}, "required": ["place"]}
    tool = Tool(name="look", parameters=only)
    result = await run(model, tools=ToolUse(tools=(tool,), forced=True), max_tokens=400)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == [("look", {"place": "sea"})]
    assert (result.text, result.reason) == ("", "tool_calls")


async def test_optional_tools_need_not_be_called(model):
    result = await run(model, tools=PLACE_TOOLS, content=LONG, max_tokens=10)
    assert (result.calls, result.report.output_tokens, result.reason) == ([], 10, "length")
    assert result.text


async def test_a_call_that_the_model_starts_follows_its_schema(model, marker, model_format):
    options = chat_request(tools=replace(PLACE_TOOLS, parallel=False))
    if model_format == "echo":
        # It says what the message says; there is no such place.
        said = '<tool_call>\n{"name": "look", "arguments": {"kind": "lake"}}\n</tool_call>'
        begun = chat_request(tools=replace(PLACE_TOOLS, parallel=False), content=said)
    else:
        begun = toward(options, marker)
    result = await finish_answer(await model.submit(begun))
    ((name, arguments),) = result.calls
    assert name in ("look", "wait")
    assert is_place(arguments)
    assert (result.text, result.reason) == ("", "tool_calls")


async def test_an_incomplete_call_ends_with_length(model):
    schema_format = await run(model, tools=ONLY_WAIT)
    cut = await run(model, tools=ONLY_WAIT, max_tokens=schema_format.report.output_tokens - 8)
    assert cut.reason == "length"
    assert schema_format.calls[0][1].startswith(cut.calls[0][1])


async def test_the_error_of_invalid_parameters_names_the_tool(model):
    wrong = Tool(name="odd", parameters={"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}})
    with pytest.raises(InvalidRequestError, match="the parameters of the tool 'odd'") as refused:
        await model.submit(chat_request(tools=ToolUse(tools=(*PLACE_TOOLS.tools, wrong), forced=True)))
    assert refused.value.param == "tools.2.function.parameters"
    # A request that need not call the tool is not refused.
    assert (await run(model, tools=ToolUse(tools=(*PLACE_TOOLS.tools, wrong)), max_tokens=5)).report.output_tokens == 5


async def test_the_schema_of_a_call_is_either_enforced_or_refused(model):
    address = {"type": "object", "properties": {"url": {"type": "string", "format": "uri"}}, "required": ["url"]}
    tools = ToolUse(tools=(*PLACE_TOOLS.tools, Tool(name="fetch", parameters=address)))
    # The tool need not be called, or another tool is called.
    assert (await run(model, tools=tools, max_tokens=5)).report.output_tokens == 5
    assert is_place((await run(model, tools=replace(tools, forced=True, only="wait"))).calls[0][1])
    result = await answer_or_refusal(model, tools=replace(tools, forced=True, only="fetch"), max_tokens=400)
    if isinstance(result, InvalidRequestError):
        assert result.param == "tools.2.function.parameters"
        assert "the tool 'fetch'" in result.message
        return
    assert [name for name, _ in result.calls] == ["fetch"]


async def test_results_of_tools_are_part_of_the_prompt(model):
    given = chat_request(prompt=ChatPrompt(messages=TOOL_CONVERSATION, tools=PLACE_TOOLS))
    async with await model.submit(given) as stream:
        shown = await model.model.decode(stream.prompt)
    assert await model.model.encode(given) == list(stream.prompt)
    for part in ("Be brief.", "Is the river wet?", '"kind": "river"', "It is.", "Looks."):
        assert part in shown
    assert is_place((await run(model, prompt=ChatPrompt(messages=TOOL_CONVERSATION, tools=ONLY_WAIT))).calls[0][1])


async def test_formats_tools_and_free_answers_do_not_affect_each_other(model):
    result = await asyncio.gather(
        run(model, answer_format=PLACE_FORMAT),
        run(model, tools=ONLY_WAIT),
        run(model, max_tokens=30, ignore_eos=True),
        run(model, answer_format=REGEX),
    )
    assert is_place(result[0].text)
    assert is_place(result[1].calls[0][1])
    assert result[2].report.output_tokens == 30
    assert re.fullmatch(REGEX.text, result[3].text)


# Models with markers of reasoning and tool calls


async def test_reasoning_is_separate_from_the_text_and_counted(thinker):
    open_ = await run(thinker, open_thoughts=True, max_tokens=12, ignore_eos=True)
    assert (open_.text, open_.report.reasoning_tokens) == ("", 12)
    assert open_.reasoning
    closed = await run(thinker, enable_thinking=False, max_tokens=12, ignore_eos=True)
    assert (closed.reasoning, closed.report.reasoning_tokens) == ("", 0)
    assert closed.text


async def test_the_answer_follows_the_reasoning(thinker):
    # Words and the marker that ends the reasoning, the likeliest first. Each bias applies once. No prompt has these
    # tokens.
    bias = {2000: 1040.0, 2001: 1030.0, 4: 1020.0, 2002: 1010.0, 2003: 1000.0}
    result = await run(thinker, open_thoughts=True, bias=bias, max_tokens=5)
    assert result.report.reasoning_tokens == 3
    assert result.reasoning.strip()
    assert result.text.strip()
    assert "think>" not in result.text + result.reasoning


async def test_a_format_is_enforced_after_open_reasoning(thinker):
    result = await run(thinker, open_thoughts=True, answer_format=PLACE_FORMAT, bias={2000: 1040.0, 4: 1030.0})
    assert result.reasoning.strip()
    assert is_place(result.text)


async def test_a_forced_call_follows_open_reasoning(thinker):
    result = await run(thinker, open_thoughts=True, tools=ONLY_WAIT, bias={2000: 1040.0, 4: 1030.0})
    assert [name for name, _ in result.calls] == ["wait"]
    assert is_place(result.calls[0][1])
    assert result.reasoning.strip()
    assert (result.text, result.reason) == ("", "tool_calls")


# Optional features


async def test_a_reasoning_budget_is_enforced_or_refused_by_llama_cpp(thinker, model_format):
    options = {"open_thoughts": True, "thinking_budget": 3, "max_tokens": 9}
    if model_format == "gguf":
        with invalid("thinking_budget", 'engine="mlx"'):
            await run(thinker, **options)
        return
    assert (await run(thinker, **options)).report.reasoning_tokens == 4


async def test_steering_is_supported_by_mlx_only(thinker, model_format):
    # 32 components in float32.
    options = {"steer": (SteeringVector(layer=0, vector="A" * 170 + "A="),), "max_tokens": 4}
    if model_format != "mlx":
        with invalid("steer", 'engine="mlx"'):
            await run(thinker, **options)
        return
    assert (await run(thinker, **options)).report.output_tokens


async def test_answers_that_may_call_tools_have_logprobs(thinker):
    for tools in (PLACE_TOOLS, ONLY_WAIT):
        assert (await run(thinker, tools=tools, enable_thinking=False, top_logprobs=1, max_tokens=4)).logprobs


async def test_the_process_that_checks_grammars_ends_with_the_model(chat_models, model_format):
    async with engine_alone(model_format, SETTINGS) as engine:
        model = await load_on(engine, chat_models[model_format])
        before = set(shared_pool().pids)
        await run(model, prompt=TextPrompt(text="a"), answer_format=REGEX)
        (process,) = set(shared_pool().pids) - before
        await model.close()
        del model
        await auntil(lambda: process not in shared_pool().pids)
