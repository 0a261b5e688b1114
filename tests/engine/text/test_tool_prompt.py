"""Tests of tools and call histories written as text, for templates without tools."""

import json

from lmx_lab.engine import Tool, ToolUse
from lmx_lab.engine.text.tool_prompt import (
    alternate,
    template_tools,
    unmatched_results,
    write_tools_as_text,
    write_unmatched_results,
)

WEATHER = Tool(name="weather", description="Das Wetter · 天気", parameters={"type": "object", "properties": {}})
TOOLS = ToolUse(tools=(WEATHER, Tool(name="add", parameters={"type": "object"})))
USER = {"role": "user", "content": "Is it raining in Zürich?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def calls(*given, content=""):
    made = [
        {"id": f"call{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(given)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(content, at=0):
    return {"role": "tool", "content": content, "tool_call_id": f"call{at}"}


def described(content):
    return [json.loads(line) for line in content.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()]


def test_tools_are_written_into_a_new_system_message():
    first, *rest = write_tools_as_text([USER], TOOLS)
    assert rest == [USER]
    assert first["role"] == "system"
    assert described(first["content"]) == template_tools(TOOLS)
    assert "Das Wetter · 天気" in first["content"]
    assert '<tool_call>\n{"name": ' in first["content"]


def test_tools_are_appended_to_the_system_message():
    first, *rest = write_tools_as_text([SYSTEM, USER], TOOLS)
    assert rest == [USER]
    assert first["content"].startswith("Be brief.\n\n# Tools")
    assert described(first["content"]) == template_tools(TOOLS)
    empty, _ = write_tools_as_text([{**SYSTEM, "content": ""}, USER], TOOLS)
    assert empty["content"].startswith("# Tools")
    assert SYSTEM["content"] == "Be brief."


def test_tools_are_written_into_the_first_user_message_if_there_is_no_system_role():
    (only,) = write_tools_as_text([USER], TOOLS, system=False)
    assert only["role"] == "user"
    assert described(only["content"]) == template_tools(TOOLS)
    assert only["content"].endswith("\n\nIs it raining in Zürich?")
    # A conversation with a system message is unchanged: the template rejects it in any case.
    assert write_tools_as_text([SYSTEM, USER], TOOLS, system=False) == write_tools_as_text([SYSTEM, USER], TOOLS)


def test_a_tool_without_a_description_has_no_description_key():
    weather, add = (tool["function"] for tool in template_tools(TOOLS))
    assert weather["description"] == WEATHER.description
    assert add == {"name": "add", "parameters": {"type": "object"}}


def test_calls_and_results_are_written_as_text_without_tools_too():
    made = calls(("weather", {"city": "Zürich 🏔", "n": [1, None]}))
    system, user, call, answer = write_tools_as_text([SYSTEM, USER, made, result('{"rain": "ja, ständig"}')], None)
    assert (system, user) == (SYSTEM, USER)
    assert call == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🏔", "n": [1, null]}}\n</tool_call>',
    }
    assert answer == {"role": "user", "content": '<tool_response>\n{"rain": "ja, ständig"}\n</tool_response>'}


def test_the_content_of_a_message_is_written_before_its_calls():
    (said,) = write_tools_as_text([calls(("add", {"a": 1}), ("weather", {}), content="Let me see.")], None)
    assert said["content"] == (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    )


def test_the_results_of_the_calls_of_one_message_are_one_message():
    history = [calls(("add", {}), ("weather", {})), result("1"), result("2", 1), calls(("add", {})), result("3"), USER]
    written = write_tools_as_text(history, None)
    assert [message["role"] for message in written] == ["assistant", "user", "assistant", "user", "user"]
    assert written[1]["content"] == ("<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>")
    assert written[3]["content"] == "<tool_response>\n3\n</tool_response>"
    assert written[4] == USER


def test_reasoning_and_names_are_unchanged():
    thought = {**calls(("add", {})), "reasoning_content": "Hm.", "name": "Ada"}
    (written,) = write_tools_as_text([thought], None)
    assert (written["reasoning_content"], written["name"]) == ("Hm.", "Ada")
    # An empty list of calls is removed.
    assert write_tools_as_text([{"role": "assistant", "content": "Hi", "tool_calls": []}], None) == [
        {"role": "assistant", "content": "Hi"}
    ]


def test_braces_in_tools_and_messages_are_not_placeholders():
    odd = ToolUse(tools=(Tool(name="odd", description="{tools} {0}", parameters={"type": "object"}),))
    first, _ = write_tools_as_text([{**SYSTEM, "content": "{tools}"}, USER], odd)
    assert first["content"].startswith("{tools}\n\n")
    assert described(first["content"].removeprefix("{tools}")) == template_tools(odd)


def test_a_strict_template_gets_arguments_as_objects_and_alternating_roles_around_results():
    cut = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": {"name": "a", "arguments": ""}}]}
    cases = [('{"a": 1, "b": "x', {"a": 1, "b": "x"}), ("[1", {"arguments": [1]}), ("x", {"arguments": "x"})]
    for given, expected in cases:
        cut["tool_calls"][0]["function"]["arguments"] = given
        written = alternate([SYSTEM, USER, cut, {"role": "tool", "content": "r"}, USER], system=True)
        assert [message["role"] for message in written] == ["system", "user", "assistant", "tool", "assistant", "user"]
        assert written[2]["tool_calls"][0]["function"]["arguments"] == expected


def test_a_strict_template_gets_a_message_of_the_user():
    assert alternate([SYSTEM], system=True) == [SYSTEM, {"role": "user", "content": ""}]
    roles = [message["role"] for message in alternate([SYSTEM, calls(("add", {})), result("1")], system=True)]
    assert roles == ["system", "user", "assistant", "tool"]


def test_results_without_a_call_are_found_and_written_as_messages_of_the_user():
    named = {**result("late"), "name": "weather"}
    history = [result("first"), calls(("add", {})), result("1"), result("again"), USER, named]
    assert list(unmatched_results(history)) == [0, 3, 5]
    written = write_unmatched_results(history)
    assert [(message["role"], message["content"]) for message in written] == [
        ("user", "Result of a tool:\nfirst"),
        ("assistant", ""),
        ("tool", "1"),
        ("user", "Result of a tool:\nagain"),
        ("user", USER["content"]),
        ("user", "Result of the tool weather:\nlate"),
    ]
    assert list(unmatched_results([calls(("add", {}), ("add", {})), result("1", 1), result("0", 0)])) == []
