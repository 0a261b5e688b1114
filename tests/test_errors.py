"""Tests of the error classes: the tree in the docstring, and the statuses. ``tests/docs`` tests the table of codes."""

import re

import pytest

from lmx_lab import errors
from lmx_lab.errors import LabError, counted
from lmx_lab.http.errors import respond, status_of
from tests.support.asking import error_classes


def documented_tree():
    """Return (class, parent) for each line of the tree in the module's docstring."""
    path = []
    found = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"( +)([A-Z]\w+Error|LabError)\b", line):
            depth = len(match[1])
            path = [(level, name) for level, name in path if level < depth]
            found.append((match[2], path[-1][1] if path else None))
            path.append((depth, match[2]))
    return found


def test_the_tree_in_the_docstring_has_all_classes():
    real = [(kind.__name__, None if kind is LabError else kind.__mro__[1].__name__) for kind in error_classes()]
    assert sorted(documented_tree(), key=str) == sorted(real, key=str)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_and_a_body(kind):
    response = respond({"path": "/", "lmx_lab.request_id": "req_1"}, kind("what, the limit, the next step"))
    assert 400 <= status_of(kind("")) == response.status_code < 600


@pytest.mark.parametrize(("number", "text"), [(0, "0 tokens"), (1, "1 token"), (1200, "1,200 tokens")])
def test_a_count_has_the_singular_for_one(number, text):
    assert counted(number, "token") == text
