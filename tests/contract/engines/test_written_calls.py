"""The prefix cache finds calls that the model wrote differently from its chat template, on both engines."""

import copy
import json

import pytest

from lmx_lab.engine import Caller, ChatPrompt, TextPrompt, TokenPrompt, Tool, ToolUse
from lmx_lab.engine.requests import AnswerStart
from lmx_lab.engine.text.written_calls import MAX_ENTRIES, CallMemory
from tests.contract.engines.entries import SETTINGS
from tests.support.engines import entry_of, loaded, merge, request, run
from tests.support.families import CODER, HARMONY, HERMES, KIMI, MISTRAL
from tests.support.gguf import with_context, with_tokens
from tests.support.models import MARKERS, rename_tokens, write_tiny_llama

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SPARE = ("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<issue_start>", "<issue_comment>")
KIMI_MARKERS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
WRITTEN_TOOLS = "{%- if tools %}{{ tools | tojson }}{% endif %}"


def tools_first(template):
    """Return a template that writes the tools before the messages, as those of real models do."""
    return WRITTEN_TOOLS + template.replace(WRITTEN_TOOLS, "")


HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>")
FAMILIES = {
    "harmony": (HARMONY, dict(zip(SPARE, HARMONY_MARKERS, strict=True))),
    "coder": (tools_first(CODER), MARKERS),
    "generic": (tools_first(HERMES), MARKERS),
    "kimi": (KIMI, dict(zip(SPARE, KIMI_MARKERS, strict=False))),
    "mistral": (MISTRAL.replace("</s>", "<|im_end|>"), dict(zip(SPARE, ("[TOOL_CALLS]", "[ARGS]"), strict=False))),
}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = ToolUse(tools=(Tool(name="note", parameters=SCHEMA), Tool(name="add", parameters=SCHEMA)))
LONG = "the sea is salty and the bread is warm, " * 3
USER = {"role": "user", "content": "Write a note."}
NOTE, ADD = ("note", {"text": LONG, "days": 2}), ("add", {"days": 1})
# The order of keys, the escapes and the white space are not those of the templates.
NOTE_JSON = f'{{"days":2,  "text":"{LONG.replace("s", chr(92) + "u0073", 1)}"}}'
CODER_NOTE = (
    f"<tool_call><function=note>\n<parameter=days>2</parameter>\n<parameter=text>{LONG}</parameter>"
    "</function></tool_call>"
)
CODER_ADD = "<tool_call><function=add><parameter=days>1</parameter></function></tool_call>"
UNMARKED = f'```json\n[{{"name": "note",  "parameters": {NOTE_JSON}}}]\n```'
ANSWERS = {
    "own format": ("coder", CODER_NOTE, [NOTE]),
    "white space after content": ("coder", f"Look.\n\n\n{CODER_NOTE}\n", [NOTE]),
    "after reasoning": ("coder", f"<think>\nHm.\n</think>\n\nLook.\n\n{CODER_NOTE}", [NOTE]),
    "two sections": ("coder", f"{CODER_NOTE}\n\n\n{CODER_ADD}", [NOTE, ADD]),
    "to the end of the answer": ("mistral", f"Look.[TOOL_CALLS] note[ARGS]{NOTE_JSON}", [NOTE]),
    "two in a section": (
        "mistral",
        f'[TOOL_CALLS]note[ARGS] {NOTE_JSON}[TOOL_CALLS]add[ARGS]{{"days":1}}',
        [NOTE, ADD],
    ),
    "an id of the model": (
        "kimi",
        f"{KIMI_MARKERS[0]} {KIMI_MARKERS[2]} functions.note:0 {KIMI_MARKERS[3]} {NOTE_JSON} {KIMI_MARKERS[4]}\n"
        f"{KIMI_MARKERS[1]}",
        [NOTE],
    ),
    "a name in a header": (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.note "
        f"<|constrain|>json<|message|>{NOTE_JSON}<|call|>",
        [NOTE],
    ),
    "without markers": ("generic", UNMARKED, [NOTE]),
    "without markers, of an own format": ("coder", UNMARKED, [NOTE]),
}
WITH_MARKER = f"Do not write {CODER_NOTE.replace('2', '3')} or <tool_call>."


@pytest.fixture(scope="module", params=["mlx", "gguf"])
async def models(tmp_path_factory, smollm2, tiny_gguf, request):
    folder, found = tmp_path_factory.mktemp("written"), {}
    for name, (template, tokens) in FAMILIES.items():
        path = folder / name
        if request.param == "mlx":
            write_tiny_llama(path, smollm2.path, seed=0, context=4096)
            rename_tokens(path, tokens)
            (path / "chat_template.jinja").write_text(template, encoding="utf-8")
        else:
            path = with_context(tiny_gguf, 4096, folder)
            path = with_tokens(path, tokens, folder / f"{name}.gguf", template)
        found[name] = entry_of(path, name)
    async with (
        loaded(found["coder"], SETTINGS) as coder,
        loaded(found["generic"], SETTINGS) as generic,
        loaded(found["harmony"], SETTINGS) as harmony,
        loaded(found["kimi"], SETTINGS) as kimi,
        loaded(found["mistral"], SETTINGS) as mistral,
    ):
        yield {"coder": coder, "generic": generic, "harmony": harmony, "kimi": kimi, "mistral": mistral}


async def answered(model, raw, *history, caller=None):
    """Compute a chat and an answer with this text. Return its message, and the number of tokens of both."""
    chat = request(prompt=ChatPrompt(messages=history, tools=TOOLS), caller=caller or Caller())
    prompt = await model.model.encode(chat)
    answer = await model.model.encode(request(prompt=TextPrompt(text=raw, special=False)))
    start = AnswerStart(prompt=tuple(prompt), answer=tuple(answer))
    stream = await model.submit(request(prompt=chat.prompt, start=start, max_tokens=len(answer), caller=chat.caller))
    deltas = [delta async for delta in stream]
    pieces = [call for delta in deltas for call in delta.tool_calls]
    ids = [call.id for call in pieces if call.id is not None]
    calls = [
        {"type": "function", "id": id_, "function": {"name": name, "arguments": json.loads(arguments)}}
        for id_, (name, arguments) in zip(ids, merge(pieces)[0], strict=True)
    ]
    # The beginning of an answer is computed only if tokens follow it.
    await run(model, prompt=TokenPrompt(tokens=(*prompt, *answer)), max_tokens=1, caller=chat.caller)
    text, reasoning = ("".join(getattr(delta, kind) for delta in deltas) for kind in ("text", "reasoning"))
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    return {**message, "reasoning_content": reasoning} if reasoning else message, len(prompt) + len(answer)


def following(message, *before):
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "Done."}
        for call in message["tool_calls"]
    ]
    return (*before, message, *results)


async def cached(model, history, caller=None):
    prompt = ChatPrompt(messages=history, tools=TOOLS)
    return (await run(model, prompt=prompt, max_tokens=1, caller=caller or Caller()))[1].cached_tokens


def called(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.parametrize(("family", "raw", "calls"), ANSWERS.values(), ids=ANSWERS)
async def test_a_call_is_cached_as_the_model_wrote_it(models, family, raw, calls):
    if family == "generic" and models[family].entry.format == "gguf":
        pytest.skip("llama.cpp cannot begin an answer whose calls a grammar enforces; the same text is tested below")
    user = {"role": "user", "content": f"Write something of {len(raw)} characters."}
    message, computed = await answered(models[family], raw, user)
    assert called(message) == calls
    assert await cached(models[family], following(message, user)) >= computed - 3


async def test_every_turn_finds_its_history(models):
    history, computed = (USER,), 0
    for turn in range(10):
        # A model writes the same call in different ways.
        raw = CODER_NOTE.replace("2<", "2" + "\n" * (turn % 3) + "<")
        message, computed = await answered(models["coder"], raw, *history)
        history = following(message, *history)
        assert await cached(models["coder"], history) >= 0.95 * computed
    assert computed > 600


async def rendered(model, history, **fields):
    return await model.model.render(request(prompt=ChatPrompt(messages=history, tools=TOOLS), **fields))


async def test_changed_calls_are_written_by_the_template(models):
    message, _ = await answered(models["coder"], CODER_NOTE, USER)
    assert CODER_NOTE in await rendered(models["coder"], (USER, message))
    for value in ("2", 3, True):
        changed = copy.deepcopy(message)
        changed["tool_calls"][0]["function"]["arguments"]["days"] = value
        assert CODER_NOTE not in await rendered(models["coder"], (USER, changed))
    assert CODER_NOTE not in await rendered(models["coder"], (USER, message), caller=Caller(client="192.168.1.5"))


async def test_calls_without_ids_are_found_by_their_content(models):
    message, _ = await answered(models["coder"], CODER_NOTE, USER)
    message["tool_calls"][0]["id"] = "call_0"
    assert CODER_NOTE in await rendered(models["coder"], (USER, message))


async def test_an_answer_with_more_calls_does_not_replace_the_same_call_of_an_earlier_answer(models):
    user = {"role": "user", "content": "Write a note, and add."}
    longer = CODER_NOTE.replace("2<", "2\n<") + CODER_ADD
    first, _ = await answered(models["coder"], CODER_NOTE, user)
    both, _ = await answered(models["coder"], longer, user, first)
    for message in (first, both):
        message["tool_calls"][0]["id"] = "call_0"
    text = await rendered(models["coder"], (user, first, both))
    assert CODER_NOTE in text
    assert longer in text


async def test_text_that_looks_like_a_call_is_not_changed(models):
    history = ({"role": "user", "content": WITH_MARKER},)
    message, computed = await answered(models["coder"], CODER_NOTE, *history)
    text = await rendered(models["coder"], (*history, message))
    assert WITH_MARKER in text
    assert text.count(CODER_NOTE) == 1
    assert await cached(models["coder"], following(message, *history)) >= computed - 3
    as_template = CODER_NOTE.replace("<function", "\n<function")
    quoting = {"role": "user", "content": f"Why {as_template}?"}
    text = await rendered(models["coder"], (quoting, {**message, "reasoning_content": f"I write {as_template}."}))
    assert text.count(as_template) == 2
    assert text.count(CODER_NOTE) == 1


def test_calls_that_are_nested_too_deeply_are_not_remembered():
    memory, deep = CallMemory(), {}
    memory.add("", "", [("a", "note", '{"a":' * 100_000 + "1" + "}" * 100_000)], "call", 0)
    memory.add("", "", [("b", "note", "{}")], "call", 0)
    for _ in range(100_000):
        deep = {"a": deep}
    for arguments, known in ((deep, False), ({1, 2}, False), ({}, True)):
        calls = [{"id": "a", "function": {"name": "note", "arguments": arguments}}]
        assert (memory.find("", {"tool_calls": calls}) is not None) == known


def test_the_oldest_calls_are_forgotten():
    memory = CallMemory()
    for number in range(MAX_ENTRIES):
        memory.add("", "", [(str(number), "note", f'{{"a": {number}}}')], "call", 0)
    found = [
        memory.find("", {"tool_calls": [{"id": "", "function": {"name": "note", "arguments": {"a": number}}}]})
        for number in range(MAX_ENTRIES)
    ]
    assert [each is not None for each in found] == [False] * (MAX_ENTRIES // 2) + [True] * (MAX_ENTRIES // 2)
