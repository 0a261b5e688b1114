"""Test the conversion of verbs' arguments: lists of all Python types, and invalid values."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel

from lmx_lab.arguments import chat_request, embeddings_body, rerank_body
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.formats import JsonSchemaFormat


@pytest.mark.parametrize(
    "value",
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
def test_token_ids_of_one_text(value):
    assert embeddings_body(value, model=None).input == [101, 102]


@pytest.mark.parametrize(
    "value",
    [[[101, 102], [3, 4]], [(101, 102), (3, 4)], np.array([[101, 102], [3, 4]]), [np.array([101, 102]), range(3, 5)]],
)
def test_token_ids_of_several_texts(value):
    assert embeddings_body(value, model=None).input == [[101, 102], [3, 4]]


@pytest.mark.parametrize(
    "value", [["a", "b"], ("a", "b"), pd.Series(["a", "b"]), np.array(["a", "b"]), iter("ab"), pd.Index(["a", "b"])]
)
def test_texts_can_be_in_any_container(value):
    assert embeddings_body(value, model=None).input == ["a", "b"]
    assert embeddings_body(["a"], model=None, dimensions=np.int64(4)).dimensions == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (pd.DataFrame({"text": ["a"]}), "a data frame; pass one of its columns"),
        ({"text": "a"}, "pass a list of texts"),
        *((value, "pass a list") for value in (b"ab", bytearray(b"ab"), memoryview(b"ab"), np.array("ab"), None, 5)),
        ([b"ab"], "decode them to text"),
        ([], "has 0 items; send at least 1"),
        ([None], r"\[0\] is None; pass texts only"),
        (pd.Series(["a", None]), r"\[1\] is (None|nan); pass texts only"),
        (["a", pd.NA], r"\[1\] is <NA>; pass texts only"),
        (["a", 1], r"\.1: "),
    ],
)
def test_a_value_that_is_not_a_list_of_texts_is_refused(value, message):
    with pytest.raises(InvalidRequestError, match=message):
        embeddings_body(value, model=None)
    if not isinstance(value, dict):
        with pytest.raises(InvalidRequestError, match=message):
            rerank_body("query", value, model=None)


def test_documents_are_a_list_although_texts_may_be_one():
    with pytest.raises(InvalidRequestError, match="a single document; pass a list"):
        rerank_body("query", "a", model=None)


def test_documents_may_be_any_mappings():
    body = rerank_body(
        "q", [MappingProxyType({"text": "a"}), {"text": "b", "id": 7}, "c"], model=None, top_n=np.int64(2)
    )
    assert (body.texts, body.top_n) == (("a", "b", "c"), 2)


# --- chat


@pytest.mark.parametrize(
    ("prompt", "parameters", "param"),
    [
        ("hi", {"temprature": 1}, "temprature"),
        ("hi", {"temperature": 3}, "temperature"),
        ("hi", {"max_tokens": 0}, "max_tokens"),
        ("hi", {"stream": True}, "stream"),
        ([], {}, "messages"),
        ([5], {}, "messages.0"),
        ({"role": "user", "content": "hi"}, {}, "messages"),
        ([{"role": "poet", "content": "hi"}], {}, "messages.0.role"),
        (7, {}, "messages"),
        ("hello", {"n": 2}, "n"),
        ("hello", {"logprobs": 100}, "top_logprobs"),
    ],
)
def test_the_error_names_the_invalid_parameter(prompt, parameters, param):
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(prompt, parameters)
    assert caught.value.param == param


@pytest.mark.parametrize("texts", [["a", "b"], ("a", "b"), pd.Series(["a", "b"]), np.array(["a", "b"]), iter("ab")])
def test_several_texts_are_refused_with_the_loop_that_asks_about_each(texts):
    with pytest.raises(InvalidRequestError, match=r"one conversation.*\[lab\.chat\(text\) for text in texts\]"):
        chat_request(texts, {})


@pytest.mark.parametrize("prompt", [None, 3, float("nan"), b"hello", pathlib.Path("a")])
def test_what_is_neither_a_text_nor_messages_is_refused(prompt):
    with pytest.raises(
        InvalidRequestError, match=r"the prompt (is|has the type) .*; pass a text, or a list of messages"
    ):
        chat_request(prompt, {})
    with pytest.raises(InvalidRequestError, match="system is 3; it must be a text"):
        chat_request("hello", {"system": 3})


def test_a_misspelled_parameter_names_the_right_one():
    with pytest.raises(InvalidRequestError, match="did you mean 'temperature'"):
        chat_request("hi", {"temprature": 1})


def test_the_number_of_alternatives_can_be_the_value_of_logprobs():
    for parameters in ({"logprobs": 5}, {"logprobs": True, "top_logprobs": 5}):
        request = chat_request("hi", parameters)
        assert (request.logprobs, request.top_logprobs) == (True, 5)
    assert not chat_request("hi", {"logprobs": False}).logprobs


def test_python_values_are_converted_to_json_values():
    request = chat_request("hello", {"logit_bias": {5: 1, "7": 2.0}, "stop": ("a", "b")})
    assert request.logit_bias == {"5": 1, "7": 2.0}
    assert request.stop == ["a", "b"]


def test_values_of_numpy_are_converted_to_json_values():
    parameters = {
        "max_tokens": np.int64(5),
        "temperature": np.float32(0.5),
        "logprobs": np.int64(3),
        "logprob_tokens": np.array([1, 2]),
        "logit_bias": {np.int64(7): np.float32(2)},
    }
    expected = {"max_tokens": 5, "temperature": 0.5, "logprobs": 3, "logprob_tokens": [1, 2], "logit_bias": {7: 2.0}}
    assert chat_request("hello", parameters) == chat_request("hello", expected)
    for value in (True, np.True_):
        with pytest.raises(InvalidRequestError, match="max_tokens: Input should be a valid integer"):
            chat_request("hello", {"max_tokens": value})


@pytest.mark.parametrize("bias", [{True: 1}, {5.0: 1}, {-1: 1}, [5]])
def test_a_bias_whose_keys_are_not_token_ids_is_refused(bias):
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        chat_request("hello", {"logit_bias": bias})


def test_a_system_prompt_comes_first():
    request = chat_request([{"role": "user", "content": "hi"}], {"system": "Be brief."})
    assert [message.role for message in request.messages] == ["system", "user"]


class Town(BaseModel):
    name: str
    twins: list[Town] = []


Item = TypeVar("Item")


class Box(BaseModel, Generic[Item]):
    item: Item


def requested_schema(response_format):
    response = chat_request("hello", {"response_format": response_format}).response_format
    assert isinstance(response, JsonSchemaFormat)
    return response.json_schema


def test_a_pydantic_class_is_converted_to_its_schema():
    schema = requested_schema(Town)
    assert (schema.name, schema.schema_) == ("Town", Town.model_json_schema())
    assert requested_schema(Box[int]).name == "Box[int]"


class Odd(BaseModel):
    run: Callable[[], int]


@pytest.mark.parametrize(
    ("value", "message"),
    [(Odd, "Odd has no JSON schema"), (dict, "must be an object"), (Town(name="a"), "must be an object")],
)
def test_a_type_without_a_schema_is_refused(value, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chat_request("hello", {"response_format": value})
    assert caught.value.param == "response_format"


def test_tools_can_be_a_tuple():
    look = {"type": "function", "function": {"name": "look"}}
    request = chat_request("hello", {"tools": (look,), "tool_choice": "required"})
    assert [tool.function.name for tool in request.tools or ()] == ["look"]
