"""Arguments of tool calls."""

import pytest

from lmx_lab.daemon.turns.prompt import parse_arguments


@pytest.mark.parametrize(
    ("text", "value"), [("", {}), (" \n", {}), ('{"x": "\\ud83d"}', {"x": "?"}), ('{"x": 1.5}', {"x": 1.5})]
)
def test_valid_arguments_are_parsed(text, value):
    assert parse_arguments(text) == value
