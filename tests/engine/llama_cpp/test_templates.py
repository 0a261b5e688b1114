"""Chat templates of GGUF files are rendered as by llama.cpp, and answers in the formats of their families are read."""

import functools
import json
import re
from dataclasses import dataclass, replace

import pytest
from mlx_lm import tokenizer_utils

from lmx_lab.engine import Caller, ChatPrompt, GenerationRequest, Tool, ToolUse
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.engine.llama_cpp.tokenizer import GgufTokenizer, join_texts
from lmx_lab.engine.preparer import render_chat_template
from lmx_lab.engine.sandbox import shared_pool
from lmx_lab.engine.text.chat_format_detection import ChatFormat, detect_chat_format
from lmx_lab.engine.text.splitter import TextSplitter
from lmx_lab.engine.text.tool_prompt import template_tools
from lmx_lab.engine.tokenizing.templates import TemplateRefusalError, render_chat
from lmx_lab.errors import InvalidRequestError
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.gguf.header import read_header
from lmx_lab.weights.gguf.tokenizer import CONTROL, USER_DEFINED
from tests.support.engines import entry_of, merge
from tests.support.families import FAMILIES, MORE_FAMILIES, Family

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ALL = {**FAMILIES, **MORE_FAMILIES}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A <city> & more"}, "days": {"type": "integer"}},
    "required": ["city"],
}
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = ToolUse(
    tools=(
        Tool(name="weather", parameters=CITY, description="Looks."),
        Tool(name="add", parameters=NUMBER, description="Adds."),
    )
)
PARIS, ADD = ("weather", {"city": "Zürich 🏔", "days": 2}), ("add", {"a": 1})
SYSTEM = {"role": "system", "content": "Be <brief> & kind."}
USER = {"role": "user", "content": 'Where is "ü"?\n'}
ANSWER = {"role": "assistant", "content": "Here."}
REASONED = {**ANSWER, "reasoning_content": "Hm."}
CALLS = [{"id": "abcdefg00", "type": "function", "function": {"name": PARIS[0], "arguments": PARIS[1]}}]
CALLING = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "abcdefg00", "name": "weather", "content": "rain"}
CONVERSATIONS = {
    "one question": ((USER,), None),
    "system message": ((SYSTEM, USER), None),
    "turns": ((SYSTEM, USER, ANSWER, USER), None),
    "tools": ((SYSTEM, USER), TOOLS),
    "call and result": ((USER, CALLING, RESULT), TOOLS),
    "turns with calls": ((SYSTEM, USER, CALLING, RESULT, ANSWER, USER), TOOLS),
    "reasoning": ((USER, REASONED, USER), None),
}


@dataclass(frozen=True)
class Known:
    file: GgufTokenizer
    chat_format: ChatFormat


@pytest.fixture(scope="module")
def families(tiny_gguf):
    header = read_header(tiny_gguf, arrays=True)
    return {name: known_of(header, family) for name, family in ALL.items()}


def known_of(header, family):
    """Return what is known about the file with this header after the tokens and the template of a family are added."""
    more = [*family.tokens, *family.specials]
    kinds = [USER_DEFINED] * len(family.tokens) + [CONTROL] * len(family.specials)
    tokens = [*header.items("tokenizer.ggml.tokens"), *more]
    values = {
        "tokenizer.chat_template": family.template,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*header.items("tokenizer.ggml.token_type"), *kinds],
        "tokenizer.ggml.eos_token_id": tokens.index(family.eos[0]),
    }
    file = GgufTokenizer(replace(header, metadata={**header.metadata, **values}))
    return Known(file, detect_chat_format(file))


def inputs_of(known, conversation):
    """Return messages and variables for our renderer and for llama.cpp."""
    messages, tools = CONVERSATIONS[conversation]
    prompt = ChatPrompt(messages=messages, tools=tools)
    given = known.chat_format.template_input(GenerationRequest(prompt=prompt), prompt)
    converted, options = given.pop("messages"), {name: given[name] for name in given.keys() - {"tools"}}
    body = {"messages": converted, "chat_template_kwargs": options}
    if known.chat_format.supports_tools:
        # Otherwise, tools, calls and results are texts of the messages.
        body["messages"] = [
            {
                **message,
                "tool_calls": [{**call, "function": written(call["function"])} for call in message["tool_calls"]],
            }
            if "tool_calls" in message
            else message
            for message in messages
        ]
        body |= {} if tools is None else {"tools": template_tools(tools)}
    return converted, given, body


def written(function):
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


# Rendering


@pytest.mark.parametrize("name", ALL)
async def test_the_template_of_a_family_is_rendered_as_by_llama_cpp(families, tiny_gguf, name):
    known = families[name]
    fields = {"chat_template": ALL[name].template, "n_ctx": 512, "ui": False, "verbosity": 1}
    process = await LlamaProcess.start(tiny_gguf, fields, environ={}, max_bytes=2**31)
    shown, expected = {}, {}
    try:
        connection = LlamaConnection(process.socket, process.api_key)
        for conversation in CONVERSATIONS:
            messages, options, body = inputs_of(known, conversation)
            ours = await outcome(render_chat(known.file, messages, add_generation_prompt=True, **options))
            theirs = await outcome(connection.post("/apply-template", body))
            shown[conversation], expected[conversation] = ours, theirs
    finally:
        await process.stop()
    assert shown == expected
    assert not any(text.startswith("refused") for text in shown.values())


async def outcome(rendering):
    """Return the text of a chat, or why the template refuses it."""
    try:
        answer = await rendering
    except (TemplateRefusalError, RefusedError) as exc:
        return f"refused: {exc}"
    return answer if isinstance(answer, str) else answer["prompt"]


STALE = {**RESULT, "content": "sleet"}
HISTORIES = {
    "a result whose call was cut away": (STALE, USER),
    "the same after other messages": (SYSTEM, USER, ANSWER, STALE, ANSWER, USER),
    "a second result of a call": (USER, CALLING, RESULT, STALE, ANSWER, USER),
    "a result with another id": (USER, CALLING, {**STALE, "tool_call_id": "other"}, ANSWER, USER),
    "a call without a result": (USER, {**CALLING, "content": "sleet"}, USER),
    "two calls with one result": (USER, {**CALLING, "tool_calls": [*CALLS, {**CALLS[0], "id": "abcdefg01"}]}, STALE),
}


@pytest.mark.parametrize("name", ALL)
async def test_the_template_of_each_family_writes_all_parts_of_a_shortened_history(families, tiny_gguf, name):
    known, entry = families[name], entry_of(tiny_gguf, name)
    missing = {}
    for case, messages in HISTORIES.items():
        for tools in (TOOLS, None):
            prompt = ChatPrompt(messages=messages, tools=tools)
            request = GenerationRequest(prompt=prompt)
            try:
                text = await render_chat_template(known.file, known.chat_format, entry, request, prompt)
            except InvalidRequestError as exc:
                text = exc.message
            if "sleet" not in text:
                missing[case] = text
    assert missing == {}


WRITTEN = "what the model wrote"


@pytest.mark.parametrize("name", ALL)
async def test_texts_of_other_parts_that_look_like_a_call_are_not_replaced(families, tiny_gguf, name):
    known, entry = families[name], entry_of(tiny_gguf, name)
    known.chat_format.written.add("", "", [(CALLS[0]["id"], PARIS[0], json.dumps(PARIS[1]))], WRITTEN, 0)

    async def shown(messages, tools, caller):
        prompt = ChatPrompt(messages=messages, tools=tools)
        request = GenerationRequest(prompt=prompt, caller=caller)
        return await render_chat_template(known.file, known.chat_format, entry, request, prompt)

    async def restored(messages, tools=TOOLS):
        """Return the text before and after the call, and the call as the template writes it."""
        by_template = await shown(messages, tools, Caller(client="192.168.1.5"))
        before, after = (await shown(messages, tools, Caller())).split(WRITTEN)
        assert by_template.startswith(before)
        assert by_template.endswith(after)
        return before, by_template.removeprefix(before).removesuffix(after), after

    _, call, _ = await restored((USER, CALLING, RESULT))
    assert PARIS[0] in call
    quoted = f"See {call} there."
    tools = replace(TOOLS, tools=(replace(TOOLS.tools[0], description=quoted), TOOLS.tools[1]))
    user, result = {**USER, "content": quoted}, {**RESULT, "content": quoted}
    other = {"id": "abcdefg01", "type": "function", "function": {"name": PARIS[0], "arguments": {"city": quoted}}}
    for messages in (
        (user, {**CALLING, "reasoning_content": quoted}, RESULT),
        (USER, CALLING, result, ANSWER, USER, {**CALLING, "tool_calls": [other]}),
    ):
        _, replaced, after = await restored(messages, tools)
        assert replaced == call
        assert not after.startswith(" there.")


async def test_calls_of_one_answer_that_a_template_writes_in_several_messages_are_left_to_it(families, tiny_gguf):
    known, entry = families["lfm"], entry_of(tiny_gguf, "lfm")
    calls = [CALLS[0], {**CALLS[0], "id": "abcdefg02"}]
    for used in (calls, CALLS):
        written = [(call["id"], PARIS[0], json.dumps(PARIS[1])) for call in used]
        known.chat_format.written.add("", "", written, WRITTEN, 0)
    prompt = ChatPrompt(messages=(USER, CALLING, RESULT, {**CALLING, "tool_calls": calls}, RESULT), tools=TOOLS)
    request = GenerationRequest(prompt=prompt)
    text = await render_chat_template(known.file, known.chat_format, entry, request, prompt)
    assert text.count(WRITTEN) == 1
    assert text.count("weather(") == 2


async def test_a_template_that_needs_the_reasoning_of_each_answer_gets_an_empty_one(tiny_gguf):
    """llama.cpp does the same for the only family that needs it, which it recognizes by its markers."""
    needs = (
        "{% for message in messages %}{{ message.content }}"
        "{% if message.role == 'assistant' and message.reasoning_content is not defined %}"
        "{{ raise_exception('no reasoning') }}{% endif %}{% endfor %}"
    )
    known = await in_thread(functools.partial(known_of, read_header(tiny_gguf, arrays=True), Family(needs)))
    messages, options, _ = inputs_of(known, "turns")
    assert "Here." in await render_chat(known.file, messages, **options)


# Answers


@pytest.mark.parametrize("name", ALL)
def test_the_format_of_calls_and_reasoning_is_the_one_that_mlx_lm_finds(families, name):
    file = families[name].file
    assert tokenizer_utils._infer_thinking(file)[:2] == (
        (file.think_start, file.think_end) if file.has_thinking else (None, None)
    )
    parser = tokenizer_utils._infer_tool_parser(file)
    assert (file.tool_parser and file.tool_parser.__module__.rpartition(".")[2]) == (
        None if parser == "json_tools" else parser
    )


@pytest.mark.parametrize("name", ALL)
def test_an_answer_in_the_format_of_a_family_is_divided(families, name):
    known, answer = families[name], ALL[name].answer
    prompt = ChatPrompt(messages=(USER,), tools=TOOLS)
    request = GenerationRequest(prompt=prompt)
    given = known.chat_format.template_input(request, prompt)
    rendering = render_chat(known.file, given.pop("messages"), add_generation_prompt=True, **given)
    thinking = known.chat_format.reasoning_state(shared_pool().portal.run(rendering))
    splitter = TextSplitter(join_texts, (), known.chat_format.channel_format(request, thinking))
    # Special tokens arrive as ids, and other text in any pieces.
    special = {
        text: token for token, text in known.chat_format.literals.items() if text not in known.chat_format.markers
    }
    parts = re.split(f"({'|'.join(map(re.escape, special))})", answer)
    pieces = [
        splitter.add(special[part]) if part in special else splitter.add(character)
        for part in parts
        for character in (part if part not in special else [part])
    ]
    pieces.append(splitter.finish())
    calls, _ = merge(call for piece in pieces for call in piece.calls)
    text, reasoning = ("".join(getattr(piece, kind) for piece in pieces) for kind in ("text", "reasoning"))
    assert (text, reasoning) == ("Look.", "Hm." if "Hm." in answer else "")
    expected = [PARIS] if name == "harmony" else [PARIS, ADD]
    assert [(called, json.loads(arguments)) for called, arguments in calls] == expected
