"""Arguments of tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from lmx_lab.daemon.turns.prompt import parse_arguments


@pytest.mark.parametrize(
    ("text", "value"), [("", {}), (" \n", {}), ('{"x": "\\ud83d"}', {"x": "?"}), ('{"x": 1.5}', {"x": 1.5})]
)
def test_valid_arguments_are_parsed(text: str, value: dict[str, Any]) -> None:
    assert parse_arguments(text) == value
