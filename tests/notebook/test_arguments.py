"""What the verbs are given: lists in all of Python's shapes, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel

from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.arguments import chat_request, embeddings_body, rerank_body
from lmx_lab.wire.formats import JsonSchemaFormat, NamedSchema


@pytest.mark.parametrize(
    "given",
    [
        [101, 102],
        (101, 102),
        range(101, 103),
        np.array([101, 102]),
        np.array([101, 102], np.int32),
        [np.int64(101), np.int64(102)],
        pd.Series([101, 102]),
        iter([101, 102]),
    ],
)
def test_token_ids_of_one_text(given: Any) -> None:
    assert embeddings_body(given, model=None).input == [101, 102]


@pytest.mark.parametrize(
    "given",
    [
        [[101, 102], [3, 4]],
        [(101, 102), (3, 4)],
        np.array([[101, 102], [3, 4]]),
        [np.array([101, 102]), range(3, 5)],
    ],
)
def test_token_ids_of_several(given: Any) -> None:
    assert embeddings_body(given, model=None).input == [[101, 102], [3, 4]]


@pytest.mark.parametrize(
    "given", [["a", "b"], ("a", "b"), pd.Series(["a", "b"]), np.array(["a", "b"]), iter("ab"), pd.Index(["a", "b"])]
)
def test_texts_in_any_container(given: Any) -> None:
    assert embeddings_body(given, model=None).input == ["a", "b"]
    assert embeddings_body(["a"], model=None, dimensions=np.int64(4)).dimensions == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (pd.DataFrame({"text": ["a"]}), "a whole data frame; give one of its columns"),
        ({"text": "a"}, "give a list of texts"),
        (b"ab", "give a list of texts"),
        (bytearray(b"ab"), "give a list of texts"),
        (memoryview(b"ab"), "give a list of texts"),
        (np.array("ab"), "give a list of texts"),
        (None, "give a list of texts"),
        (5, "give a list of texts"),
        ([b"ab"], "give texts, decoded"),
    ],
)
def test_what_is_no_list_of_texts_is_said_to_be_none(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        embeddings_body(given, model=None)
    if not isinstance(given, dict):
        with pytest.raises(InvalidRequestError, match=said):
            rerank_body("query", given, model=None)


def test_documents_may_be_any_mappings() -> None:
    body = rerank_body(
        "q", [MappingProxyType({"text": "a"}), {"text": "b", "id": 7}, "c"], model=None, top_n=np.int64(2)
    )
    assert (body.texts, body.top_n) == (("a", "b", "c"), 2)


class Town(BaseModel):
    name: str
    twins: list[Town] = []


Item = TypeVar("Item")


class Box(BaseModel, Generic[Item]):
    item: Item


def asked_schema(response_format: Any) -> NamedSchema:
    found = chat_request("hello", {"response_format": response_format}).response_format
    assert isinstance(found, JsonSchemaFormat)
    return found.json_schema


def test_a_models_class_stands_for_its_schema() -> None:
    asked = asked_schema(Town)
    assert (asked.name, asked.schema_) == ("Town", Town.model_json_schema())
    assert asked_schema(Box[int]).name == "Box[int]"


class Odd(BaseModel):
    run: Callable[[], int]


@pytest.mark.parametrize(
    ("given", "said"),
    [(Odd, "Odd has no JSON schema"), (dict, "must be an object"), (Town(name="a"), "must be an object")],
)
def test_what_has_no_schema_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        chat_request("hello", {"response_format": given})
    assert caught.value.param == "response_format"


def test_tools_may_be_a_tuple() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    request = chat_request("hello", {"tools": (tool,), "tool_choice": "required"})
    assert [one.function.name for one in request.tools or ()] == ["look"]
