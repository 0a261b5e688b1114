"""Tests of chat format detection with the tokenizers, templates and recorded answers of several model families."""

import functools
import json
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from mlx_lm import tokenizer_utils

from lmx_lab.engine import AnswerFormat, ChatPrompt, GenerationRequest, TextPrompt, Tool, ToolUse
from lmx_lab.engine.grammar.compile import GrammarCompiler, read_token_table
from lmx_lab.engine.mlx.tokenizer import AnswerText
from lmx_lab.engine.text.channels import CONTENT, REASONING
from lmx_lab.engine.text.chat_format_detection import BETWEEN, GENERIC, ChatFormat, detect_chat_format
from lmx_lab.engine.text.splitter import TextSplitter
from lmx_lab.engine.text.tool_prompt import template_tools, write_tools_as_text
from tests.support.asking import invalid
from tests.support.engines import matchers_of, merge
from tests.support.families import FAMILIES, HERMES, Family

USER = {"role": "user", "content": "Hi"}


@dataclass(frozen=True)
class Known:
    tokenizer: Any
    chat_format: ChatFormat

    def tokens(self, text, *, whole=True):
        """Return the tokens of a text. Without ``whole``, characters outside added tokens are encoded one by one."""
        encode = self.tokenizer.encode
        if whole:
            return encode(text, add_special_tokens=False)
        added = self.tokenizer.added_tokens_decoder
        found = []
        for token in encode(text, add_special_tokens=False):
            characters = self.tokenizer.decode([token]) if token not in added else ""
            single = len(characters) > 1 and "\ufffd" not in characters
            found += (
                [part for one in characters for part in encode(one, add_special_tokens=False)] if single else [token]
            )
        return found


def write_tokenizer(folder, source, family):
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    last = len(tokenizer["model"]["vocab"])
    for at, text in enumerate((*family.tokens, *family.specials)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = text in family.specials
        tokenizer["added_tokens"].append({"id": last + at, "content": text, "special": special, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config = {**config, "chat_template": family.template, "eos_token": family.eos[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def asked(tools=None, answer_format=None, **changes):
    prompt = ChatPrompt(
        messages=changes.pop("messages", (USER,)), tools=tools, template_options=changes.pop("options", {})
    )
    return replace(GenerationRequest(prompt=prompt, answer_format=answer_format), **changes)


def rendered(known, request, *, prompt=True):
    given = known.chat_format.template_input(request, request.prompt)
    return known.tokenizer.apply_chat_template(
        given.pop("messages"), add_generation_prompt=prompt, tokenize=False, **given, **request.prompt.template_options
    )


def said(*calls, content="", thoughts=""):
    made = [
        {"id": f"abcdefg{at:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": thoughts}
    return {**message, "tool_calls": made} if made else message


def divided(known, raw, request, thinking, *, whole):
    splitter = TextSplitter(AnswerText(known.tokenizer).decode, (), known.chat_format.channel_format(request, thinking))
    pieces = [splitter.add(token) for token in known.tokens(raw, whole=whole)]
    pieces.append(splitter.finish())
    calls, _ = merge(call for piece in pieces for call in piece.calls)
    text, reasoning = ("".join(getattr(piece, kind) for piece in pieces) for kind in ("text", "reasoning"))
    return text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


pytestmark = pytest.mark.slow
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = ToolUse(tools=(Tool(name="weather", parameters=CITY), Tool(name="add", parameters={"type": "object"})))
JSON = AnswerFormat(kind="json_schema", text='{"type": "object", "properties": {"a": {"type": "integer"}}}')
PARIS = ("weather", {"city": "Zürich 🏔", "days": 2})
ADD = ("add", {"a": 1})


@pytest.fixture(scope="module")
def families(tmp_path_factory, smollm2):
    known = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder, smollm2.path, family)
        tokenizer = tokenizer_utils.load(folder)
        for end in family.eos:
            tokenizer.add_eos_token(end)
        known[name] = Known(tokenizer, detect_chat_format(tokenizer))
    return known


# Detection


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("hermes", (("<think>", "</think>"), True, None, False, True)),
        ("coder", (("<think>", "</think>"), True, "<tool_call>", False, True)),
        ("glm", (("<think>", "</think>"), True, "<tool_call>", False, True)),
        ("mistral", (None, True, "[TOOL_CALLS]", False, True)),
        ("harmony", (None, True, "to=functions.", True, True)),
        ("plain", (None, False, None, False, False)),
        ("seed", (("<seed:think>", "</seed:think>"), False, None, False, False)),
    ],
)
def test_the_chat_format_is_detected_from_the_tokenizer(families, family, expected):
    chat_format = families[family].chat_format
    reasoning_markers, supports_tools, start, has_headers, supports_system = expected
    assert chat_format.reasoning_markers == reasoning_markers
    assert (chat_format.supports_tools, chat_format.has_headers) == (supports_tools, has_headers)
    assert (chat_format.own_calls and chat_format.own_calls.start) == start
    assert chat_format.supports_system is supports_system
    assert families[family].tokens(reasoning_markers[1] if reasoning_markers else "") == list(chat_format.reasoning_end)
    assert not set(chat_format.literals) & set(families[family].tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    ("options", "thinking"),
    [
        ({}, "possible"),
        ({"enable_thinking": True}, "possible"),
        ({"enable_thinking": False}, "closed"),
        ({"open": True}, "open"),
    ],
)
def test_the_end_of_the_prompt_determines_the_reasoning_state(families, options, thinking):
    known = families["hermes"]
    assert known.chat_format.reasoning_state(rendered(known, asked(options=options))) == thinking
    assert families["mistral"].chat_format.reasoning_state("<think>") == "closed"


def test_reasoning_markers_without_tokens_of_their_own_are_found_in_the_template(tmp_path, smollm2):
    write_tokenizer(tmp_path, smollm2.path, Family(HERMES))
    tokenizer = tokenizer_utils.load(tmp_path)
    assert not tokenizer.has_thinking
    known = Known(tokenizer, detect_chat_format(tokenizer))
    assert known.chat_format.reasoning_markers == ("<think>", "</think>")
    assert len(known.chat_format.reasoning_end) > 1
    assert known.chat_format.markers["<think>"] == ("<think>",)
    # mlx-lm would disable thinking in the template.
    assert rendered(known, asked()).endswith("assistant\n")
    assert rendered(known, asked(options={"enable_thinking": False})).endswith("</think>\n\n")
    raw = "<think>\nHm.\n</think>\n\nYes."
    for whole in (True, False):
        assert divided(known, raw, asked(), "possible", whole=whole) == ("Yes.", "Hm.", [])


# Answers


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_answer_is_divided_into_content_reasoning_and_calls(families, family, whole):
    known = families[family]
    thinking = known.chat_format.reasoning_state(rendered(known, asked(TOOLS)))
    text, reasoning, calls = divided(known, FAMILIES[family].answer, asked(TOOLS), thinking, whole=whole)
    assert (text, reasoning) == ("Look.", "" if family in ("mistral", "plain") else "Hm.")
    # The calls of "coder" contain no types. If the schema of the tool has none either, values are strings.
    second = ("add", {"a": "1"}) if family == "coder" else ADD
    assert calls == ([PARIS] if family == "harmony" else [PARIS, second])


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_have_the_names_of_the_tools_even_if_the_format_of_the_model_cannot_contain_them(families, family):
    known, name = families[family], "mcp.files/weather"
    first, *others = TOOLS.tools
    tools = replace(TOOLS, tools=(replace(first, name=name), *others))
    history = (USER, said((name, PARIS[1]), content="Look."))
    given = known.chat_format.template_input(asked(tools), asked(tools, messages=history).prompt)
    shown = "mcp_files_weather" if family == "mistral" else name
    assert shown in str(given["messages"])
    assert shown in str(given.get("tools", given["messages"]))
    raw = FAMILIES[family].answer.replace(PARIS[0], shown)
    thinking = known.chat_format.reasoning_state(rendered(known, asked(tools)))
    _, _, calls = divided(known, raw, asked(tools), thinking, whole=True)
    assert calls[0] == (name, PARIS[1])


@pytest.mark.parametrize("family", ["hermes", "coder", "glm", "mistral", "harmony"])
def test_an_answer_that_the_template_rendered_is_parsed_to_the_same_parts(families, family):
    known = families[family]
    answer = said(PARIS, content="" if family == "harmony" else "Look.", thoughts="Hm.")
    before = rendered(known, asked(TOOLS))
    # Some of the templates write the tools at the end.
    after = rendered(known, asked(TOOLS, messages=(USER, answer)), prompt=False)
    head = before.removesuffix("<|im_start|>assistant\n").removesuffix("<|start|>assistant")
    head = head.removesuffix(json.dumps(template_tools(TOOLS)))
    assert after.startswith(head)
    raw = after.removeprefix(head).removeprefix("<|im_start|>assistant\n").removeprefix("<|start|>assistant")
    raw = raw.partition("<|im_end|>")[0].partition("</s>")[0].partition("<|call|>")[0]
    text, reasoning, calls = divided(known, raw, asked(TOOLS), "possible", whole=False)
    assert calls == [PARIS]
    assert (text, reasoning) == {"mistral": ("Look.", ""), "harmony": ("", "Hm.")}.get(family, ("Look.", "Hm."))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ("<|channel|>final<|message|>Hi.", ("Hi.", "", [])),
        ("<|channel|>final <|constrain|>json<|message|>{}", ("{}", "", [])),
        ("<|channel|>analysis<|message|>to=functions.add?<|end|><|start|>assistant", ("", "to=functions.add?", [])),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', ("", "", [ADD])),
        ("<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B", ("", "AB", [])),
        ("<|channel|>commentary to=functions.add<|message|>{", ("to=functions.add<|message|>{", "", [])),
    ],
)
def test_harmony_answers_are_divided_by_their_headers(families, raw, parts, whole):
    assert divided(families["harmony"], raw, asked(TOOLS), "closed", whole=whole) == parts


def test_harmony_calls_are_dropped_in_a_request_without_tools(families):
    for whole in (True, False):
        assert divided(families["harmony"], FAMILIES["harmony"].answer, asked(), "closed", whole=whole) == (
            "Look.",
            "Hm.",
            [],
        )


# Input of the template


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("content", ["", "Look."])
def test_every_template_renders_a_history_with_calls_and_results(families, family, offered, content):
    results = [{"role": "tool", "content": "rain", "tool_call_id": "abcdefg00", "name": "weather"}]
    history = (USER, said(PARIS, content=content, thoughts="Hm."), *results, said(content="It rains."), USER)
    text = rendered(families[family], asked(TOOLS if offered else None, messages=history))
    assert "Zürich 🏔" in text or "Z\\u00fcrich" in text
    assert "rain" in text
    assert "It rains." in text
    assert ('"add"' in text) is offered


def test_the_template_writes_the_tools_unless_the_generic_call_format_is_needed(families):
    for family, request in product(("hermes", "coder", "plain"), (asked(TOOLS), asked(TOOLS, JSON), asked(None, JSON))):
        chat_format, prompt = families[family].chat_format, request.prompt
        given = chat_format.template_input(request, prompt)
        unlike = family == "coder" and request.answer_format is not None and prompt.tools is not None
        if family == "plain" or unlike:
            assert given["messages"] == write_tools_as_text(prompt.messages, prompt.tools, system=family != "plain")
            assert "tools" not in given
        else:
            assert given["messages"] == [USER]
            assert given.get("tools") == (template_tools(TOOLS) if prompt.tools is not None else None)


def test_thinking_is_enabled_in_the_template_unless_the_caller_sets_an_option(families):
    for options, expected in (({}, True), ({"enable_thinking": False}, None), ({"thinking": False}, None)):
        request = asked(options=options)
        given = families["seed"].chat_format.template_input(request, request.prompt)
        assert given.get("enable_thinking") is expected
        assert "enable_thinking" not in families["mistral"].chat_format.template_input(request, request.prompt)


# Enforced and parsed calls

SENTENCE, JSON_ANSWER = "Hello.", '{"a": 1}'
CALL, OTHER = (
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "x"}}}}\n</tool_call>' for name in ("weather", "add")
)
TEXTS = {"sentence": SENTENCE, "json": JSON_ANSWER, "call": CALL, "other": OTHER, "two": f"{CALL}\n{OTHER}"}
TOOL_USES = {
    "none": None,
    "auto": TOOLS,
    "forced": replace(TOOLS, forced=True),
    "named": replace(TOOLS, forced=True, only="weather"),
}
THOUGHT = {"open": ("Hm.</think>\n\n",), "possible": ("", "<think>Hm.</think>\n\n"), "closed": ("",)}


def allowed(use, formatted):
    calls = {"none": set(), "named": {"call"}}.get(use, {"call", "other", "two"})
    if use in ("forced", "named"):
        return calls
    return calls | {"json"} if formatted else set(TEXTS)


@pytest.fixture(scope="module")
def accepts(families):
    # With and without tokens of their own for reasoning and calls.
    compilers = {
        family: GrammarCompiler(
            functools.partial(
                read_token_table,
                known.tokenizer,
                width=len(known.tokenizer),
                markers=known.chat_format.marker_tokens,
            )
        )
        for family, known in families.items()
        if family in ("hermes", "coder", "mistral")
    }

    def accepts(family, grammar, text):
        (matcher,) = matchers_of(compilers[family], grammar)
        tokens = families[family].tokens(text)
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    return accepts


@pytest.mark.parametrize("thinking", THOUGHT)
@pytest.mark.parametrize("formatted", [False, True])
@pytest.mark.parametrize("use", TOOL_USES)
@pytest.mark.parametrize("family", ["hermes", "coder", "none"])
def test_calls_are_enforced_by_a_grammar_or_parsed_in_the_models_own_format(
    families, accepts, *, family, use, formatted, thinking
):
    named = "mistral" if family == "none" else family
    chat_format = (
        families[named].chat_format if family != "none" else replace(families[named].chat_format, own_calls=None)
    )
    request = asked(TOOL_USES[use], JSON if formatted else None)
    own = family == "coder" and use == "auto" and not formatted

    calls = chat_format.call_format(request)
    assert (calls is None) is (use == "none")
    assert calls is None or (calls.parse is not None) is own
    assert own or calls is None or replace(calls, unmarked=None, may_repeat=True) == GENERIC
    assert calls is None or calls.may_repeat is (use not in ("forced", "named"))
    assert calls is None or calls.unmarked == (TOOL_USES[use] if use == "auto" and not formatted else None)

    channel_format = chat_format.channel_format(request, thinking)
    thinks = chat_format.reasoning_markers is not None and thinking != "closed"
    assert (channel_format is None) is (not thinks and use == "none")
    if channel_format is not None:
        content = BETWEEN if use in ("forced", "named") else CONTENT
        assert channel_format.initial == (REASONING if thinks and thinking == "open" else content)
        assert (REASONING in channel_format.transitions) is thinks
        assert channel_format.calls == calls or own

    grammar = chat_format.grammar(request, thinking)
    assert (grammar is None) is (own or (use == "none" and not formatted))
    if grammar is None:
        return
    prefixes = THOUGHT[thinking] if chat_format.reasoning_markers is not None else ("",)
    expected = {prefix + TEXTS[name] for prefix in prefixes for name in allowed(use, formatted)}
    tried = {prefix + text for prefix in ("", "Hm.</think>\n\n", "<think>Hm.</think>\n\n") for text in TEXTS.values()}
    accepted = {text for text in tried if accepts(named, grammar, text)}
    if use == "auto" and not formatted:
        # Only the calls are constrained, so other text is accepted too.
        assert expected <= accepted
    else:
        assert accepted == expected


def test_text_prompts_have_no_channels(families):
    request = GenerationRequest(prompt=TextPrompt(text="<think>"), answer_format=JSON)
    for known in families.values():
        assert known.chat_format.channel_format(request, "closed") is None
        assert known.chat_format.call_format(request) is None
    assert families["hermes"].chat_format.grammar(request, "closed") is not None


def test_a_call_is_enforced_after_its_special_token(families, accepts):
    grammar = families["hermes"].chat_format.grammar(asked(TOOLS), "closed")
    assert accepts("hermes", grammar, f"Look: {CALL}\nAnd {OTHER} so")
    assert not accepts("hermes", grammar, "Look: <tool_call>weather</tool_call>")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"answer_format": JSON}, "response_format"),
        ({"tools": TOOL_USES["forced"]}, "tool_choice"),
        ({"tools": TOOL_USES["named"]}, "tool_choice"),
        ({"tools": TOOLS, "answer_format": JSON}, "response_format"),
    ],
)
def test_a_chat_format_with_headers_rejects_enforced_formats(families, changes, param):
    chat_format = families["harmony"].chat_format
    with invalid(param, "headers"):
        chat_format.grammar(asked(**changes), "closed")
    assert chat_format.grammar(asked(TOOLS), "closed") is None
    assert chat_format.grammar(asked(), "closed") is None


def test_ignore_eos_is_accepted_with_calls_in_the_models_own_format_which_are_parsed_and_not_enforced(families):
    assert families["coder"].chat_format.grammar(asked(TOOLS, ignore_eos=True), "closed") is None
