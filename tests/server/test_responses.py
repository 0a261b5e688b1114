"""Tests of lmx_lab.server.responses: names and inputs of tools, and the store of responses."""

import pytest

from lmx_lab.errors import InvalidRequestError, NotFoundError
from lmx_lab.server.responses.convert import chat_name, custom_input
from lmx_lab.server.responses.routes import ResponseStore, StoredResponse
from lmx_lab.wire.formats import NAME_CHARACTERS


def test_names_in_namespaces_are_joined_and_stay_unique_if_they_are_too_long():
    assert chat_name("look", None) == chat_name("look", "") == "look"
    assert chat_name("look", "mcp__files") == chat_name("look", "mcp__files__") == "mcp__files__look"
    names = {chat_name("x" * 120 + end, "mcp__files") for end in ("a", "b")}
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


def stored(name, *, size=10, status="completed"):
    return StoredResponse(id=name, status=status, body=b"x" * size, conversation=b"")


def test_the_least_recently_used_responses_are_removed():
    store = ResponseStore(responses=3, size_bytes=100)
    for name in ("a", "b", "c"):
        store.put(stored(name))
    store.get("a")
    store.put(stored("d"))
    assert [name in store for name in "abcd"] == [True, False, True, True]
    store.put(stored("e", size=81))
    assert [name in store for name in "acde"] == [False, False, True, True]
    # A response that is replaced counts once, and one that exceeds the limit alone is not kept.
    store.put(stored("e", size=90))
    store.put(stored("f", size=101))
    assert [name in store for name in "def"] == [True, True, False]


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_only_ended_responses_can_be_continued(status):
    store = ResponseStore()
    store.put(stored("done", status=status))
    assert store.previous("done").id == "done"
    store.put(stored("running", status="in_progress"))
    with pytest.raises(InvalidRequestError, match="running is in_progress"):
        store.previous("running")
    with pytest.raises(InvalidRequestError, match="send the whole conversation as input"):
        store.previous("gone")
    with pytest.raises(NotFoundError):
        store.delete("gone")
