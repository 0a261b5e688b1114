"""Tests of the store of lmx_lab.server.responses.routes."""

import pytest

from lmx_lab.errors import InvalidRequestError, NotFoundError
from lmx_lab.server.responses.routes import ResponseStore, StoredResponse


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
