"""The chat format of a model on llama.cpp is detected from its template and its capabilities."""

import pytest

from lmx_lab.engine.llama_cpp.model import ALL_MARKERS, detect_chat_format
from tests.support.gguf import NO_SYSTEM_TEMPLATE, THINKS_FIRST_TEMPLATE, TOOLS_TEMPLATE


def test_the_markers_of_reasoning_are_read_from_the_template():
    chat_format = detect_chat_format(
        THINKS_FIRST_TEMPLATE, {"supports_tools": False}, {"<think>": (3,), "</think>": (4,)}
    )
    assert (chat_format.reasoning_markers, chat_format.supports_tools, chat_format.has_headers) == (
        ("<think>", "</think>"),
        False,
        False,
    )
    assert (chat_format.markers["<think>"], chat_format.markers["</think>"]) == ((3,), (4,))
    assert chat_format.reasoning_state("assistant\n<think>\n") == "open"
    # A marker that is not one token is found as text.
    assert chat_format.markers["<tool_call>"] == ("<tool_call>",)


@pytest.mark.parametrize(
    ("template", "markers"), [("", None), (TOOLS_TEMPLATE, ("<think>", "</think>")), (NO_SYSTEM_TEMPLATE, None)]
)
def test_not_every_template_has_reasoning(template, markers):
    assert detect_chat_format(template, {}, {}).reasoning_markers == markers


def test_the_capabilities_of_a_template_come_from_llama_cpp():
    assert detect_chat_format(TOOLS_TEMPLATE, {"supports_tools": True}, {}).supports_tools
    assert not detect_chat_format(TOOLS_TEMPLATE, {}, {}).supports_tools
    assert not detect_chat_format(NO_SYSTEM_TEMPLATE, {"supports_system_role": False}, {}).supports_system
    assert detect_chat_format(NO_SYSTEM_TEMPLATE, {}, {}).supports_system


def test_templates_with_headers_are_recognized_by_their_markers():
    harmony = detect_chat_format("<|channel|> <|message|> <|call|>", {"supports_tools": True}, {})
    assert harmony.has_headers
    assert harmony.reasoning_markers is None
    assert not detect_chat_format("<|message|> alone", {}, {}).has_headers


def test_each_marker_is_looked_up_once():
    assert len(set(ALL_MARKERS)) == len(ALL_MARKERS)
    assert {"<think>", "</think>", "<tool_call>", "</tool_call>"} <= set(ALL_MARKERS)
