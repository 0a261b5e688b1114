"""Tests of tool calls in real formats with mlx-lm's parsers, at any token boundaries; invalid calls stay text."""

import json
import re
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.requests import Tool, ToolUse
from lmx_lab.engine.text.channels import CONTENT, REASONING
from lmx_lab.engine.text.splitter import TextSplitter
from lmx_lab.engine.text.tool_calls import CallNumbering, EnforcedCallReader, ParsedCallReader, UnmarkedCalls
from tests.engine.text.splitting import Tokens, answer, channel_format_of, require_linear, run, tool_parser
from tests.support.engines import merge

glm47, json_tools, kimi_k2, mistral, pythonic, qwen3_coder = map(
    tool_parser, ("glm47", "json_tools", "kimi_k2", "mistral", "pythonic", "qwen3_coder")
)
QWEN_CODER_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n"
    "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>"
)
KIMI_CALLS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>'
    '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>'
)
KIMI_SPECIALS = [
    f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
]
GLM_SPECIALS = [f"<{slash}{name}>" for name in ("think", "tool_call", "arg_key", "arg_value") for slash in ("", "/")]
HERMES_BROKEN = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\n</tool_call>',
    '<tool_call>\n["get_weather", 1]\n</tool_call>',
    "<tool_call>\n[]\n</tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"name": "f", "parameters": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": [-Infinity]}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "f\\udfff", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 3000 + "}}</tool_call>",
    '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
]


@dataclass(frozen=True)
class Case:
    """The raw output of a model and the expected answer."""

    parser: ModuleType
    raw: str
    text: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    reasoning: str = ""
    initial: str = CONTENT
    specials: tuple[str, ...] | list[str] = ()
    ids: list[str] | None = None

    @property
    def channel_format(self):
        return channel_format_of(self.parser, initial=self.initial)


CASES = {
    "hermes, thoughts and content before": Case(
        json_tools,
        "<think>\nThe user wants the weather.\n</think>\n\nLet me look. \n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🏔"}}\n</tool_call>',
        "Let me look.",
        [("get_weather", {"city": "Zürich 🏔"})],
        "The user wants the weather.",
    ),
    "hermes, several calls, thoughts opened by the prompt": Case(
        json_tools,
        'Two cities.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": "{\\"y\\": null}"}\n</tool_call>\n',
        "",
        [("f", {"x": 1}), ("g", {"y": None})],
        "Two cities.",
        REASONING,
    ),
    "hermes, content after": Case(
        json_tools,
        'A <tool_call>{"name": "f", "arguments": {}}</tool_call> \nand that is <all>.\n',
        "A \nand that is <all>.\n",
        [("f", {})],
    ),
    "hermes, a call in the thoughts, which it ends": Case(
        json_tools,
        'Hm, \n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n',
        "",
        [("f", {})],
        "Hm,",
        REASONING,
    ),
    "hermes, a broken call between others": Case(
        json_tools,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": oops}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '\n<tool_call>{"name": oops}</tool_call>',
        [("f", {}), ("g", {})],
    ),
    "hermes, without the end marker": Case(
        json_tools, 'Ok <tool_call>{"name": "f", "arguments": {"x": 1}}', "Ok", [("f", {"x": 1})]
    ),
    "hermes, cut off": Case(json_tools, 'Ok <tool_call>{"name": "f", "argu', 'Ok <tool_call>{"name": "f", "argu'),
    "mistral, the old style": Case(
        mistral,
        'Sure. [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}, '
        '{"name": "g", "arguments": {}, "id": "abcdefghi"}]',
        "Sure.",
        [("f", {"x": 1}), ("g", {})],
        specials=["[TOOL_CALLS]", "[ARGS]"],
    ),
    "mistral, the new style": Case(
        mistral,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{"a": [1, 2]}',
        "",
        [("get_weather", {"city": "Paris"}), ("add", {"a": [1, 2]})],
        specials=["[TOOL_CALLS]", "[ARGS]"],
    ),
    "mistral, cut off": Case(
        mistral,
        'Sure. [TOOL_CALLS]get_weather[ARGS]{"city": "Par',
        'Sure. [TOOL_CALLS]get_weather[ARGS]{"city": "Par',
        specials=["[TOOL_CALLS]", "[ARGS]"],
    ),
    "qwen3-coder": Case(
        qwen3_coder,
        f"I will check.\n\n{QWEN_CODER_CALL}\n{QWEN_CODER_CALL}",
        "I will check.",
        [("get_weather", {"city": "São Paulo", "unit": "celsius"})] * 2,
    ),
    "qwen3-coder, no function": Case(
        qwen3_coder, "<tool_call>\nget_weather\n</tool_call>", "<tool_call>\nget_weather\n</tool_call>"
    ),
    "glm-4.7": Case(
        glm47,
        "<think>Weather, then.</think>I'll check.<tool_call>get_weather<arg_key>city</arg_key><arg_value>北京"
        "</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "I'll check.",
        [("get_weather", {"city": "北京", "days": 3})],
        "Weather, then.",
        specials=GLM_SPECIALS,
    ),
    "kimi-k2": Case(
        kimi_k2,
        f"Checking.  {KIMI_CALLS}",
        "Checking.",
        [("get_weather", {"city": "Paris"}), ("add", {"a": 1, "b": 2})],
        specials=KIMI_SPECIALS,
        ids=["functions.get_weather:0", "functions.add:1"],
    ),
    "kimi-k2, arguments that are not an object": Case(
        kimi_k2,
        KIMI_CALLS.replace('{"city": "Paris"}', "Paris"),
        KIMI_CALLS.replace('{"city": "Paris"}', "Paris"),
        specials=KIMI_SPECIALS,
    ),
    "lfm2": Case(
        pythonic,
        '<|tool_call_start|>[get_weather(city="Paris", days=2), now()]<|tool_call_end|>Checking the weather.',
        "Checking the weather.",
        [("get_weather", {"city": "Paris", "days": 2}), ("now", {})],
        specials=["<|tool_call_start|>", "<|tool_call_end|>"],
    ),
    "lfm2, a set is not JSON": Case(
        pythonic,
        "<|tool_call_start|>[f(x={1, 2})]<|tool_call_end|>",
        "<|tool_call_start|>[f(x={1, 2})]<|tool_call_end|>",
        specials=["<|tool_call_start|>", "<|tool_call_end|>"],
    ),
} | {f"hermes, broken {raw[:90]}": Case(json_tools, f"So: {raw} .", f"So: {raw} .") for raw in HERMES_BROKEN}


def check(case, found):
    assert (found.text, found.reasoning) == (case.text, case.reasoning)
    assert found.calls == [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in case.calls]
    assert len(set(found.ids)) == len(found.ids)
    assert case.ids is None or found.ids == case.ids


each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_an_answer_in_one_or_two_tokens(case):
    size = len(case.raw.encode())
    for cuts in ([], *([cut] for cut in range(1, size, 1 + size // 500))):
        check(case, answer(Tokens(case.raw, cuts, case.specials), case.channel_format))


@each_case
def test_an_answer_in_tokens_of_one_byte(case):
    tokens = Tokens(case.raw, range(len(case.raw.encode())), case.specials)
    found = answer(tokens, case.channel_format)
    check(case, found)
    assert found.entries == list(range(len(tokens.chunks)))


@pytest.mark.slow
@given(st.sampled_from(list(CASES.values())), st.sets(st.integers(1, 400)))
def test_an_answer_in_random_tokens(case, cuts):
    check(case, answer(Tokens(case.raw, cuts, case.specials), case.channel_format))


def test_special_tokens_that_are_not_part_of_the_format_have_no_text():
    case = CASES["hermes, content after"]
    assert answer(Tokens("a<|x|>b", [], ["<|x|>"]), case.channel_format).text == "ab"
    # In a call in the model's own format they can be part of the call.
    inside = '<tool_call>{"name": "f", "arguments": {"x": "<|x|>"}}</tool_call>'
    assert answer(Tokens(inside, [], ["<|x|>"]), case.channel_format).calls == [("f", '{"x": "<|x|>"}')]
    enforced = channel_format_of(json_tools, parsed=False)
    assert answer(Tokens(inside, [], ["<|x|>"]), enforced).calls == [("f", '{"x": ""}')]


# Ids


def test_ids_have_nine_letters_and_digits():
    for _ in range(50):
        assert re.fullmatch("[A-Za-z0-9]{9}", CallNumbering().begin("f").id)


def test_the_id_that_a_model_wrote_is_kept_unless_it_is_repeated():
    numbering = CallNumbering()
    deltas = [numbering.begin("f", "{}", id_) for id_ in ("one", "one", "", None, "two")]
    ids = [delta.id for delta in deltas]
    assert (ids[0], ids[4]) == ("one", "two")
    assert len(set(ids)) == 5
    assert [delta.index for delta in deltas] == [0, 1, 2, 3, 4]


# Parsers that fail


def fail(error):
    def parse(_):
        raise error("no call")

    return parse


def endless():
    loop = {"name": "f", "arguments": {}}
    loop["arguments"]["x"] = loop
    return loop


@pytest.mark.parametrize(
    "parse",
    [
        *map(fail, [ValueError, KeyError, RecursionError, MemoryError, AttributeError, SyntaxError]),
        *(
            lambda _, value=value: value
            for value in [
                None,
                "f",
                7,
                [],
                {},
                [[]],
                [None],
                {"name": None, "arguments": {}},
                {"name": "f", "arguments": None},
                {"name": "f", "arguments": "{"},
                {"name": "f", "arguments": {(1, 2): 3}},
                {"name": "f", "arguments": {"x": ...}},
                {"name": "f", "arguments": {"x": float("nan")}},
                endless(),
            ]
        ),
    ],
)
def test_the_text_is_returned_if_the_parser_fails_or_returns_an_invalid_call(parse):
    calls = ParsedCallReader(parse, "<t>", CallNumbering())
    assert calls.feed("so") == calls.feed("me") == calls.close("</t>") == []
    assert not calls.accepted
    assert (calls.raw, calls.held) == ("<t>some</t>", 11)


@pytest.mark.parametrize("id_", [7, "", "\ud800"])
def test_an_invalid_id_is_replaced(id_):
    calls = ParsedCallReader(lambda _: {"name": "f", "arguments": {}, "id": id_}, "", CallNumbering())
    (delta,) = calls.close("")
    assert delta.id != id_
    assert len(delta.id or "") == 9


# Calls enforced by a grammar

NAMES = st.text(st.sampled_from('ab"\\é😀{}\n'), min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(
    st.text(st.sampled_from('a"\\{}[]é'), max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(st.sampled_from('a"\\{}[]/<>é\n'), max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_size=3,
)
SPACE = st.text(st.sampled_from(" \n\t\r"), max_size=2)


@st.composite
def enforced(draw):
    """Return the text of a call, its name and the text of its arguments."""
    name, arguments = draw(NAMES), draw(ARGUMENTS)
    indent = draw(st.none() | st.integers(0, 2))
    raw = json.dumps(arguments, ensure_ascii=draw(st.booleans()), indent=indent)
    parts = ["{", '"name"', ":", json.dumps(name), ",", '"arguments"', ":", raw, "}", ""]
    return "".join(draw(SPACE) + part for part in parts), name, raw


@pytest.mark.long
@pytest.mark.slow
@given(enforced(), st.lists(st.integers(1, 6), min_size=1))
def test_an_enforced_call_is_returned_as_written(call, sizes):
    text, name, arguments = call
    calls, at, deltas = EnforcedCallReader("<t>", CallNumbering()), 0, []
    for size in sizes * len(text):
        deltas += calls.feed(text[at : at + size])
        at += size
    deltas += calls.close("</t>")
    assert merge(deltas)[0] == [(name, arguments)]
    assert calls.held == 0


@pytest.mark.slow
@given(enforced(), enforced(), st.sets(st.integers(1, 200)))
def test_enforced_calls_in_an_answer(one, two, cuts):
    raw = f"So.\n<tool_call>{one[0]}</tool_call>\n<tool_call>{two[0]}</tool_call>\n"
    tokens = Tokens(raw, cuts)
    found = answer(tokens, channel_format_of(json_tools, parsed=False))
    assert (found.text, found.calls) == ("So.", [one[1:], two[1:]])
    assert found.entries == list(range(len(tokens.chunks)))


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        # The calls of an answer, and the number of those before the first repetition.
        ([("look", '{"at": "sea"}'), ("look", '{"at":\n  "sea"}'), ("wait", "{}")], 1),
        ([("look", '{"at": "sea"}'), ("look", '{"at": "sea "}'), ("wait", '{"at": "sea"}')], 3),
        ([("wait", "{}"), ("look", '{"at": "a\\" b"}'), ("look", '{"at": "a\\"  b"}'), ("wait", "{ }")], 3),
    ],
)
def test_an_answer_may_end_before_a_repeated_call(calls, kept):
    written = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls]
    raw = "\n".join(written)
    always = channel_format_of(json_tools, parsed=False)
    once = replace(always, calls=replace(always.calls, may_repeat=False))
    for cuts in [(), range(len(raw)), range(0, len(raw), 7)]:
        assert answer(Tokens(raw, cuts), always).calls == calls
        tokens = Tokens(raw, cuts)
        found = answer(tokens, once)
        assert (found.text, found.calls, found.stopped) == ("", calls[:kept], kept < len(calls))
        assert found.entries == list(range(len(found.entries)))


def test_an_enforced_call_is_streamed():
    calls = EnforcedCallReader("<t>", CallNumbering())
    fed = ['\n{"na', 'me": "f', 'g"', ', "arguments"', ": {", '"x": "}\\', '"', '{"', "}", "} "]
    given = [[(delta.name, delta.arguments) for delta in calls.feed(text)] for text in fed]
    name, rest = [("fg", "")], [[(None, piece)] for piece in ["{", '"x": "}\\', '"', '{"', "}"]]
    assert given == [[], [], name, [], *rest, []]


NO_CALLS = ["", " ", "x", "{} {", '{"nam', '{"nome": "f"}']
NO_CALLS += ['{"name": "f', '{"name": 7}', '{"name": ""}', '{"name": "\n"']
CUT_OFF, MARKED = '{"x": [1, "a', '{"x": "<tool_call>\\"</tool_call></tool_call>"}'


@pytest.mark.parametrize(
    ("raw", "text", "calls"),
    [
        *((f"So. <tool_call>{text}{end}",) * 2 + ([],) for text in NO_CALLS for end in ("", "</tool_call>")),
        (f'So. <tool_call>{{"name": "f", "arguments": {CUT_OFF}', "So.", [("f", CUT_OFF)]),
        (f'<tool_call>{{"name": "f", "arguments": {MARKED}}}</tool_call> done', " done", [("f", MARKED)]),
    ],
)
def test_an_enforced_call_may_be_cut_off_or_contain_markers_and_other_text_is_content(raw, text, calls):
    for cuts in [(), *([cut] for cut in range(len(raw))), range(len(raw))]:
        tokens = Tokens(raw, cuts)
        found = answer(tokens, channel_format_of(json_tools, parsed=False))
        assert (found.text, found.calls) == (text, calls)
        assert found.entries == list(range(len(tokens.chunks)))


# Calls without markers

F, G = '{"name": "f", "arguments": {"x": "}"}}', '{"arguments": "{\\"y\\": 1}", "name": "g"}'
F_CALL, G_CALL = ("f", '{"x": "}"}'), ("g", '{"y": 1}')
MARKED_G = '<tool_call>{"name": "g", "arguments": {"y": 1}}</tool_call>'
UNMARKED = [
    (F, [F_CALL]),
    (f"\n {F}\n{G}\n", [F_CALL, G_CALL]),
    (f"{F}, {F}{G}", [F_CALL, F_CALL, G_CALL]),
    (f"[{F},\n {G}]", [F_CALL, G_CALL]),
    (f"```json\n{F}\n```", [F_CALL]),
    (f"```json\n[{F}]\n```\n\n```\n{G}\n```", [F_CALL, G_CALL]),
    (f"<think>Hm.</think>\n\n{F}", [F_CALL]),
    (f"{F}\n{MARKED_G}", [F_CALL, G_CALL]),
    (f"{MARKED_G}\n{F}", [G_CALL, F_CALL]),
    (F.replace("arguments", "parameters"), [F_CALL]),
    (f'{{"type": "function", "function": {F}}}', [F_CALL]),
    (f'{{"type": "function", {F[1:]}', [F_CALL]),
]
NOT_UNMARKED = [
    f"Like this: {F}",
    f"{F} is a call.",
    f"```json\n{F}\n```\nis a call.",
    f"{F}\n{F[:-1]}",
    f"{F}\n{F.replace('f', 'h', 1)}",
    F.replace('"f"', '"ff"'),
    F.replace('"f"', '"F"'),
    '{"name": "f"}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": {"x": oops}}',
    '{"name": "f", "arguments": {"x": ' + "[" * 3000 + "}}",
    '{"name": "Ada", "age": 36}',
    '{"function": 1}',
    '{"type": "function", "function": 1}',
    "[]",
    "```json\n```",
    f"[{' ' * 300}{F}]",
    "{{",
]


def without_markers(**options):
    tools = ToolUse(tools=tuple(Tool(name=name, parameters={}) for name in "fg"), **options)
    known = channel_format_of(json_tools, parsed=False)
    return replace(known, calls=replace(known.calls, unmarked=tools))


@pytest.mark.parametrize(("raw", "calls"), [*UNMARKED, *((raw, []) for raw in NOT_UNMARKED)])
def test_an_answer_of_calls_without_markers_calls_and_any_other_is_text(raw, calls):
    for cuts in [(), *([cut] for cut in range(len(raw))), range(len(raw))]:
        tokens = Tokens(raw, cuts)
        found = answer(tokens, without_markers())
        assert (found.text, found.calls) == ("" if calls else raw, calls)
        assert found.entries == list(range(len(tokens.chunks)))


def test_calls_without_markers_need_permission():
    assert answer(Tokens(F, ()), channel_format_of(json_tools, parsed=False)).text == F
    assert answer(Tokens(F, ()), channel_format_of()).text == F
    assert answer(Tokens(f"{F}\n{G}", ()), without_markers(parallel=False)).calls == [F_CALL]


@pytest.mark.parametrize(("stop", "text", "calls"), [("!", "", [F_CALL]), ("}}", F[:-2], []), ("arg", F[:15], [])])
def test_a_stop_string_applies_to_calls_without_markers(stop, text, calls):
    found = answer(Tokens(f"{F}\n!", range(99)), without_markers(), [stop])
    assert (found.text, found.calls, found.stopped) == (text, calls, True)


def test_text_is_held_back_only_as_long_as_it_may_be_a_call():
    def pieces(raw):
        tokens = Tokens(raw, range(len(raw)))
        splitter = TextSplitter(tokens.decode, (), without_markers())
        return [piece.text for piece in run(splitter, range(len(tokens.chunks))) if piece.text]

    assert pieces('{"name": "Ada"}') == ['{"name": "A', *'da"}']
    assert pieces('```python\n"a"') == ['```python\n"', *'a"']
    assert pieces(f"{F}\nis") == [f"{F}\ni", "s"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ['{"name": "f', '{"name": "f", "arguments": {"x": "', '{"name": "f", "arguments": {'])
@pytest.mark.parametrize(
    ("make", "close"),
    [
        (lambda: EnforcedCallReader("", CallNumbering()), lambda calls: calls.close("")),
        (lambda: ParsedCallReader(json.loads, "", CallNumbering()), lambda calls: calls.close("")),
        (lambda: UnmarkedCalls(without_markers().calls.unmarked, CallNumbering()), lambda calls: calls.finish()),
    ],
)
def test_reading_takes_time_linear_in_the_length_of_a_call(text, make, close):
    def read(count):
        calls = make()
        calls.feed(text)
        for _ in range(count):
            calls.feed("x")
        close(calls)

    require_linear(read, 3_000)
