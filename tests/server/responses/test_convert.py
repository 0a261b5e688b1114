"""Tests of the tools in lmx_lab.server.responses.convert."""

import pytest

from lmx_lab.server.responses.convert import chat_name, custom_input
from lmx_lab.wire.formats import NAME_CHARACTERS


def test_names_in_namespaces_are_joined_and_stay_unique_if_they_are_too_long():
    assert chat_name("look", None) == chat_name("look", "") == "look"
    assert chat_name("look", "mcp__files") == chat_name("look", "mcp__files__") == "mcp__files__look"
    names = {chat_name("x" * 60 + end, "mcp__files") for end in ("a", "b")}
    assert len(names) == 2
    assert {len(name) for name in names} == {NAME_CHARACTERS}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\""}', 'a\n"b"'),
        ('{"input": "cut o', "cut o"),
        ('{"inp', ""),
        ("", ""),
        ('{"input": 5}', '{"input": 5}'),
        ("no JSON", "no JSON"),
    ],
)
def test_the_input_of_a_custom_tool_is_read_from_complete_and_incomplete_arguments(arguments, text):
    assert custom_input(arguments) == text
