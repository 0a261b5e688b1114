"""Tests that tools, tool choices and tool calls in a history are converted for the engine or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lmx_lab.engine import ChatPrompt, Tool, ToolUse
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.errors import validation_error
from lmx_lab.server.translate import generation_request
from lmx_lab.values.outputs import ToolCallDelta, merge_tool_calls
from tests.support.asking import chat

USER = {"role": "user", "content": "hello"}


def prompt(**changes):
    found = generation_request(chat(**changes)).prompt
    assert isinstance(found, ChatPrompt)
    return found


def use(**changes):
    return prompt(**changes).tools


def check_refusal(changes, param, expected):
    """Check the field and parts of the message of an error, which comes from the validation or from the conversion."""
    try:
        generation_request(chat(**changes))
    except ValidationError as exc:
        error = validation_error(exc)
    except InvalidRequestError as exc:
        error = exc
    else:
        pytest.fail("nothing was refused")
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert [part for part in expected if part not in error.message] == []
    assert len(error.message) < 1000


def function(name="look", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


# --- tools and the choice


def test_all_fields_of_a_tool_are_translated():
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    found = use(tools=[function(description="Looks.", parameters=parameters, strict=True)])
    assert found == ToolUse(tools=(Tool(name="look", description="Looks.", parameters=parameters),))


@pytest.mark.parametrize(
    "parameters",
    [
        *([], {"type": "object", "properties": []}, {"type": "", "properties": {}}, {"type": None, "properties": {}}),
        {"type": ["object", "null"], "properties": {}},
    ],
)
def test_the_type_of_an_object_may_be_missing_and_empty_objects_may_be_lists(parameters):
    found = use(tools=[function(parameters=parameters)]).tools[0].parameters
    assert (found.get("type", "object"), found.get("properties", {})) == ("object", {})


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}},
        {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}},
        {"type": "custom", "name": "look", "description": "Looks.", "input_schema": {"type": "object"}},
    ],
)
def test_a_tool_may_be_written_as_in_other_formats(tool):
    expected = Tool(name="look", description="Looks.", parameters={"type": "object"}, strict=False)
    assert use(tools=[function(), tool, function("see")]).tools[0].name == "look"
    assert use(tools=[tool]) == ToolUse(tools=(expected,))


@pytest.mark.parametrize("fields", [{}, {"parameters": None, "description": None, "strict": None}])
def test_a_tool_without_parameters_takes_no_arguments(fields):
    found = use(tools=[function(**fields)])
    assert found.tools[0].parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("choice", "forced", "only"),
    [(None, False, None), ("auto", False, None), ("required", True, None), (function("see"), True, "see")],
)
def test_tool_choice_selects_optional_forced_and_single_tools(choice, forced, only):
    found = use(tools=[function(), function("see")], tool_choice=choice)
    assert [tool.name for tool in found.tools] == ["look", "see"]
    assert (found.forced, found.only, found.parallel) == (forced, only, True)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"tools": None}, {"tools": []}, {"tools": [function()], "tool_choice": "none"}),
        *({"tool_choice": choice} for choice in (None, "auto", "none")),
    ],
)
def test_without_tools_or_with_the_choice_none_no_tools_are_used(changes):
    assert use(**changes) is None


def test_a_forced_call_ignores_the_format():
    fields = {"tools": [function()], "response_format": {"type": "json_object"}}
    assert generation_request(chat(**fields)).answer_format is not None
    assert generation_request(chat(tool_choice="required", **fields)).answer_format is None


LARGE = {"description": "x" * 140_000}


@pytest.mark.parametrize(
    ("changes", "param", "expected"),
    [
        ({"tools": "look"}, "tools", ["list"]),
        ({"tools": [function()] * 200}, "tools", ["200", "128"]),
        ({"tools": [function("look up")]}, "tools.0.function.name", ["letters", "digits", "'look up'"]),
        ({"tools": [function("")]}, "tools.0.function.name", ["letters"]),
        ({"tools": [function("a" * 129)]}, "tools.0.function.name", ["129", "128"]),
        # The choice is not checked if a tool is invalid.
        ({"tools": [function("a b")], "tool_choice": function("see")}, "tools.0.function.name", ["'a b'"]),
        ({"tools": [{"type": 5}]}, "tools.0.type", ["string"]),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", ["no tools"]),
        ({"tools": [{"type": "function"}]}, "tools.0.function", ["required"]),
        ({"tools": [function(description=5)]}, "tools.0.function.description", ["string"]),
        ({"tools": [function(parameters=[1])]}, "tools.0.function.parameters", ["an object", "a list"]),
        ({"tools": [function(parameters="{}")]}, "tools.0.function.parameters", ["an object", "a string"]),
        ({"tools": [function(parameters={"type": "array"})]}, "tools.0.function.parameters", ["'array'", "'object'"]),
        ({"tools": [function(parameters={"type": ["array"]})]}, "tools.0.function.parameters", ["'object'"]),
        ({"tools": [function(parameters={"x": {1}})]}, "tools", ["'look'", "number 0", "JSON"]),
        (
            {"tools": [function("a", parameters=LARGE), function("b", parameters=LARGE)]},
            "tools",
            ["280,036", "262,144"],
        ),
        ({"tool_choice": "required"}, "tool_choice", ["'required'", "no tools"]),
        ({"tool_choice": "required", "tools": []}, "tool_choice", ["no tools"]),
        ({"tool_choice": function()}, "tool_choice", ["'look'", "no tools"]),
        ({"tool_choice": function("see"), "tools": [function()]}, "tool_choice", ["'see'", "'look'"]),
        (
            {"tool_choice": function("see"), "tools": [function(f"f{n}") for n in range(128)]},
            "tool_choice",
            ["'f0'", "123 more"],
        ),
        ({"tool_choice": "all", "tools": [function()]}, "tool_choice", ["'required'", "'all'"]),
        ({"tool_choice": {"type": "tool", "name": "see"}, "tools": [function()]}, "tool_choice", ["'see'", "'look'"]),
        ({"tool_choice": 5, "tools": [function()]}, "tool_choice", ["'required'", '{"type": "function"']),
        ({"tool_choice": {"type": "function"}, "tools": [function()]}, "tool_choice.function", ["required"]),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [function()]}, "tool_choice.allowed_tools", ["required"]),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [function("see")]}, "tools": [function()]},
            "tool_choice",
            ["'see'", "'look'"],
        ),
        ({"tool_choice": "required", "tools": [function()], "ignore_eos": True}, "tool_choice", ["ignore_eos"]),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", ["boolean"]),
        ({"functions": [{"name": "f"}], "tools": [function()]}, "functions", ["send only tools"]),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", ["'g'", "'f'"]),
        ({"function_call": {"name": "f"}}, "function_call", ["no functions"]),
        ({"function_call": 5}, "function_call", ['{"name":']),
        (
            {"functions": [{"name": "f"}], "function_call": {"name": "f"}, "ignore_eos": True},
            "function_call",
            ["ignore_eos"],
        ),
        ({"functions": [{"name": "f", "parameters": {"a": "x" * 280_000}}]}, "functions", ["262,144"]),
    ],
)
def test_the_error_of_an_invalid_tool_or_choice_names_the_field(changes, param, expected):
    check_refusal(changes, param, expected)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("any", {"forced": True}),
        ({"type": "any"}, {"forced": True}),
        ({"type": "auto"}, {}),
        ({"type": "tool", "name": "see"}, {"forced": True, "only": "see"}),
        ({"type": "function", "name": "see"}, {"forced": True, "only": "see"}),
    ],
)
def test_choices_in_the_spelling_of_other_services_are_read(choice, expected):
    empty = {"type": "object", "properties": {}}
    tools = tuple(Tool(name=name, parameters=empty, strict=False) for name in ("look", "see"))
    assert use(tools=[function("look"), function("see")], tool_choice=choice) == ToolUse(tools=tools, **expected)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_only_allowed_tools_are_offered(mode, is_flat):
    see = {"type": "function", "name": "see"} if is_flat else function("see")
    allowed = {"mode": mode, "tools": [see]}
    choice = {"type": "allowed_tools", **(allowed if is_flat else {"allowed_tools": allowed})}
    found = use(tools=[function("look"), function("see")], tool_choice=choice)
    assert ([tool.name for tool in found.tools], found.forced) == (["see"], mode == "required")


def test_the_first_of_several_tools_with_one_name_counts_and_hosted_tools_are_ignored():
    tools = [function(description="first"), {"type": "web_search", "filters": {}}, function(description="second")]
    request = chat(tools=tools)
    assert [tool.description for tool in use(tools=tools).tools] == ["first"]
    assert list(request.ignored()) == ["tools.web_search", "tools.look"]


# --- calls in a history


def call(arguments="{}", id="c1", **fields):
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}, **fields}


def with_calls(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result_of(id="c1", **fields):
    return {"role": "tool", "content": "seen", "tool_call_id": id, **fields}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *[("", {}), (" ", {}), ("{}", {}), ("null", {}), ('{"a": [1, null]}', {"a": [1, None]})],
        *[({"a": 1}, {"a": 1}), ({}, {})],
        # What an answer that was cut off contains, or what a model wrote in place of an object.
        *[(text, text) for text in ('{"a": 1', "[1]", '"x"', "5", "true", '{"a": "\\ud800"}', "[" * 40_000)],
    ],
)
def test_the_template_gets_arguments_as_an_object_or_unchanged(arguments, expected):
    call_message, result_message = prompt(messages=[with_calls(call(arguments)), result_of(name="look")]).messages
    function = {"name": "look", "arguments": expected}
    assert call_message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "c1", "function": function}],
    }
    assert result_message == {"role": "tool", "content": "seen", "tool_call_id": "c1", "name": "look"}


def test_answers_are_valid_as_history():
    sent = with_calls(
        {**call(index=0), "function": {"name": "look", "arguments": '{"a":1}', "parsed_arguments": {"a": 1}}},
        {"id": "c2", "type": None, "function": {"name": "look", "arguments": ""}},
        refusal=None,
        annotations=[],
        audio=None,
        function_call=None,
        parsed=None,
        reasoning_content=None,
    )
    (message,) = prompt(messages=[sent]).messages
    assert [one["id"] for one in message["tool_calls"]] == ["c1", "c2"]
    assert set(message) == {"role", "content", "tool_calls"}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning": "later", "reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm", "reasoning_content": None}, "hm"),
    ],
)
def test_reasoning_has_one_name_in_the_template(sent, expected):
    (message,) = prompt(messages=[{"role": "assistant", "content": "a", **sent}]).messages
    assert message == {"role": "assistant", "content": "a", "reasoning_content": expected}


@pytest.mark.parametrize(
    "messages",
    [
        [with_calls(call(id="a"), call(id="b")), result_of("b"), result_of("a"), USER],
        [with_calls(call()), result_of(content=[{"type": "text", "text": "x"}])],
        [with_calls(call()), USER],
        [with_calls(call(id="a"), call(id="b")), result_of("b")],
        [with_calls(call()), result_of(), with_calls(call()), result_of()],
    ],
)
def test_each_call_has_at_most_one_result_in_any_order(messages):
    assert len(prompt(messages=messages).messages) == len(messages)


@pytest.mark.parametrize(
    "note", [USER, {"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": "a"}]
)
def test_results_follow_their_calls_in_the_template(note):
    first, second = with_calls(call(id="a"), call(id="b")), with_calls(call(id="c"))
    sent = [USER, first, result_of("a"), note, result_of("b"), second, result_of("c"), USER]
    roles = [(message["role"], message.get("tool_call_id")) for message in prompt(messages=sent).messages]
    noted = "system" if note["role"] == "developer" else note["role"]
    assert roles == [
        *[("user", None), ("assistant", None), ("tool", "a"), ("tool", "b"), (noted, None)],
        *[("assistant", None), ("tool", "c"), ("user", None)],
    ]


def test_results_without_ids_belong_to_the_first_call_of_their_function_or_else_to_the_first_call():
    named = [{"function": {"name": name}} for name in ("look", "hear", "look")]
    answers = [result_of(None, name="hear"), result_of(None, name="look"), result_of(None)]
    _, *results = prompt(messages=[with_calls(*named), *answers]).messages
    assert [message["tool_call_id"] for message in results] == ["call_2", "call_1", "call_3"]
    again = prompt(messages=[with_calls(*named), *answers, with_calls(*named), result_of(None)]).messages
    assert [one["id"] for one in again[4]["tool_calls"]] == ["call_4", "call_5", "call_6"]
    assert again[5]["tool_call_id"] == "call_4"


@pytest.mark.parametrize(
    ("messages", "ids"),
    [
        ([USER, result_of()], [None, "c1"]),
        ([result_of(None)], [None]),
        ([result_of(""), USER], [None, None]),
        ([with_calls(call()), USER, result_of("zz")], [None, None, "zz"]),
        ([with_calls(call()), USER, result_of(), USER, result_of()], [None, "c1", None, None, "c1"]),
        ([with_calls(call()), result_of(None), USER, result_of(None)], [None, "c1", None, None]),
        # A call after its result does not count.
        ([result_of(), with_calls(call()), USER, result_of()], ["c1", None, "c1", None]),
    ],
)
def test_a_result_without_a_call_stays_where_it_is(messages, ids):
    assert [message.get("tool_call_id") for message in prompt(messages=messages).messages] == ids


def test_calls_with_the_same_id_have_a_result_each():
    sent = [with_calls(call(), call()), USER, result_of(), result_of(), USER]
    roles = [message["role"] for message in prompt(messages=sent).messages]
    assert roles == ["assistant", "tool", "tool", "user", "user"]


def test_functions_become_tools_of_which_one_is_called_at_a_time():
    found = use(
        functions=[{"name": "look", "parameters": {"type": "object"}}, {"name": "hear"}], function_call={"name": "look"}
    )
    assert [tool.name for tool in found.tools] == ["look", "hear"]
    assert (found.forced, found.only, found.parallel) == (True, "look", False)
    assert use(functions=[{"name": "look"}], function_call="none") is None


def test_unknown_fields_in_messages_are_ignored_and_named():
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    sent = [
        {"role": "user", "content": [part], "timestamp": 5, "id": "m1"},
        with_calls(call(provider_specific_fields={}, caller=None), thinking_blocks=[], annotations=[], audio=None),
        result_of(usage={"tokens": 1}),
    ]
    request = chat(messages=sent, tools=[function(cache_control={})])
    assert list(request.ignored()) == [
        *("messages.timestamp", "messages.id", "messages.content.cache_control"),
        *("messages.thinking_blocks", "messages.annotations", "messages.tool_calls.provider_specific_fields"),
        *("messages.usage", "tools.function.cache_control"),
    ]
    assert [message["content"] for message in prompt(messages=sent).messages] == ["hello", "", "seen"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
SHOWN = "[image, not shown to this model]"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE]}, USER], f"See\n{SHOWN}"),
        ([{"role": "assistant", "content": None, "refusal": "I do not."}, USER], "I do not."),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER], "No."),
        ([{"role": "assistant", "content": None, "audio": {"id": "a1"}}, USER], "[audio, not shown to this model]"),
        ([{"role": "assistant", "content": [{"type": "new"}]}, USER], "[new, not shown to this model]"),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": []}]}, USER], ""),
    ],
)
def test_a_history_with_other_parts_is_read_as_text(sent, expected):
    assert prompt(messages=sent).messages[0]["content"] == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [([{"type": "text", "text": "x"}, IMAGE], f"x\n{SHOWN}"), ({"t": 5}, '{"t":5}'), ([1, "a"], '[1,"a"]'), (5, "5")],
)
def test_the_result_of_a_tool_can_be_anything(content, expected):
    assert prompt(messages=[USER, with_calls(call()), result_of(content=content)]).messages[-1]["content"] == expected


ARGUMENTS = "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    ("messages", "param", "expected"),
    [
        ([USER, with_calls(call([1]))], ARGUMENTS, ["a JSON object", "a list"]),
        ([USER, with_calls(call("[" * 60_000))], "messages", ["50,000 lists", "arguments"]),
        ([USER, with_calls(call({"a": {1}}))], ARGUMENTS, ["cannot be written as JSON"]),
        ([with_calls({"id": "c1"})], "messages.0.tool_calls.0", ["has no function"]),
        ([with_calls(*[call(id=str(n)) for n in range(2049)])] * 2, "messages", ["4,098", "4,096"]),
        ([USER, {"role": "user", "content": [IMAGE]}], "messages.1.content.0", ["images", "send text"]),
        ([{**USER, "tool_calls": [call()]}], "messages.0", ["tool_calls", "'assistant'", "'user'"]),
        ([{**USER, "tool_call_id": "c1"}], "messages.0", ["tool_call_id", "'tool'"]),
        ([{**USER, "reasoning": "hm"}], "messages.0", ["reasoning_content", "'assistant'"]),
        ([{**USER, "function_call": {"name": "f"}}], "messages.0", ["function_call", "'assistant'", "'user'"]),
    ],
)
def test_the_error_of_an_invalid_history_names_the_message(messages, param, expected):
    check_refusal({"messages": messages}, param, expected)


# --- reasoning


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "x": [1]}},
            {"reasoning_effort": "none", "enable_thinking": True, "x": [1]},
        ),
        ({"reasoning": {"effort": "max", "exclude": False}}, {"reasoning_effort": "max"}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True}),
        ({"thinking": {"type": "auto"}}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"reasoning_effort": "5"}, "reasoning_effort": "low"}, {"reasoning_effort": "5"}),
    ],
)
def test_the_reasoning_effort_is_passed_to_the_template(changes, expected):
    assert prompt(**changes).template_options == expected


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0, 0), (64, 64), (5.0, 5)])
def test_the_reasoning_budget_is_translated(given, expected):
    assert generation_request(chat(thinking_token_budget=given)).thinking_budget == expected


@pytest.mark.parametrize(
    ("changes", "param", "expected"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort", ["'huge'", "'xhigh'"]),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", ["must be a JSON object"]),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", ["set by this server"]),
        ({"chat_template_kwargs": {"chat_template": ""}}, "chat_template_kwargs.chat_template", ["'chat_template'"]),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", ["set by this server"]),
        ({"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs.a-b", ["name of a variable"]),
        ({"chat_template_kwargs": {"x": {1}}}, "chat_template_kwargs.x", ["JSON"]),
        ({"thinking_token_budget": -1}, "thinking_token_budget", ["-1", "0"]),
        ({"thinking_token_budget": True}, "thinking_token_budget", ["integer"]),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget", ["integer"]),
    ],
)
def test_the_error_of_an_invalid_reasoning_field_names_it(changes, param, expected):
    check_refusal(changes, param, expected)


# --- pieces of calls


PIECES = st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3)), max_size=20)


@pytest.mark.slow
@given(PIECES, st.integers(0, 20))
def test_merging_pieces_of_calls_is_associative(pieces, cut):
    deltas = [
        ToolCallDelta(index=index, arguments=text, id=f"c{index}" if first else None, name="f" if first else None)
        for at, (index, text) in enumerate(pieces)
        for first in [index not in [other for other, _ in pieces[:at]]]
    ]
    whole = merge_tool_calls(deltas)
    assert merge_tool_calls([*merge_tool_calls(deltas[:cut]), *merge_tool_calls(deltas[cut:])]) == whole
    for merged in whole:
        assert merged.arguments == "".join(text for index, text in pieces if index == merged.index)
        assert (merged.id, merged.name) == (f"c{merged.index}", "f")
