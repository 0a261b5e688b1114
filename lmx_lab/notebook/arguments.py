"""What the verbs are given, as the server would get it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, PydanticUserError, ValidationError

from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.error_bodies import validation_error
from lmx_lab.server.translate import ANY_MODEL
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody

Prompt = str | Sequence[Mapping[str, Any]]
Texts = str | Iterable[str] | Iterable[int] | Iterable[Sequence[int]]
"""One text, texts, the token ids of one text, or those of several; also as an array or a column of a data frame."""
Documents = Iterable[str | Mapping[str, Any]]
Body = TypeVar("Body", bound=BaseModel)


def _plain_list(items: Any) -> Any:
    return list(items) if isinstance(items, tuple) else items


def _plain_bias(bias: Any) -> Any:
    if not isinstance(bias, Mapping):
        return bias
    return {str(token) if type(token) is int else token: value for token, value in bias.items()}


def _plain_format(asked: Any) -> Any:
    """A pydantic model's class stands for its JSON schema."""
    if not (isinstance(asked, type) and issubclass(asked, BaseModel)):
        return asked
    try:
        schema = asked.model_json_schema()
    except PydanticUserError as exc:
        said = f"response_format: {asked.__name__} has no JSON schema: {exc.message}"
        raise InvalidRequestError(said, param="response_format") from exc
    return {"type": "json_schema", "json_schema": {"name": asked.__name__[:256], "schema": schema}}


PLAIN = {"stop": _plain_list, "tools": _plain_list, "logit_bias": _plain_bias, "response_format": _plain_format}
"""What Python has and JSON has not, as the wire has it."""


def chat_request(prompt: Prompt, parameters: Mapping[str, Any]) -> ChatRequest:
    """
    Raises:
        InvalidRequestError: the first thing that is wrong, by name.
    """
    fields = {name: PLAIN[name](value) if name in PLAIN else value for name, value in parameters.items()}
    if "stream" in fields:
        raise InvalidRequestError("stream is a parameter of chat(); use astream(...) here", param="stream")
    system = fields.pop("system", None)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(messages, Sequence):
        messages = [*([{"role": "system", "content": system}] if system is not None else []), *messages]
    request = _valid(ChatRequest, {"model": ANY_MODEL, "messages": messages, **fields})
    # What a Reply does not hold.
    for name, asked in (("n", request.choices > 1), ("logprobs", request.logprobs)):
        if asked:
            raise InvalidRequestError(f"{name}: a reply is one text; use OpenAI(**lab.openai) for more", param=name)
    return request


def embeddings_body(texts: Texts, *, model: str | os.PathLike[str] | None, **fields: Any) -> EmbeddingsBody:
    """
    Raises:
        InvalidRequestError: the first thing that is wrong, by name.
    """
    given = texts if isinstance(texts, str) else [_plain(item) for item in _listed(texts, "texts")]
    numbers = {name: _plain(value) for name, value in fields.items()}
    return _valid(EmbeddingsBody, {"model": _named(model), "input": given, **numbers})


def rerank_body(query: str, documents: Documents, *, model: str | os.PathLike[str] | None, **fields: Any) -> RerankBody:
    """
    Raises:
        InvalidRequestError: the first thing that is wrong, by name.
    """
    if isinstance(documents, str | Mapping):
        raise InvalidRequestError("documents is one document; give a list of them", param="documents")
    given = [dict(item) if isinstance(item, Mapping) else item for item in _listed(documents, "documents")]
    numbers = {name: _plain(value) for name, value in fields.items()}
    return _valid(RerankBody, {"model": _named(model), "query": query, "documents": given, **numbers})


def _listed(items: object, name: str) -> list[Any]:
    """The items, also of an array or a column. What is iterable but no list of texts would be taken for one."""
    if hasattr(items, "columns"):
        raise InvalidRequestError(f"{name} is a whole data frame; give one of its columns", param=name)
    single = isinstance(items, bytes | bytearray | memoryview | Mapping) or getattr(items, "shape", None) == ()
    if single or not isinstance(items, Iterable):
        raise InvalidRequestError(f"{name} is {items!r:.80}; give a list of texts", param=name)
    found = list(items)
    if found and isinstance(found[0], bytes | bytearray):
        raise InvalidRequestError(f"{name} has {found[0]!r:.80}; give texts, decoded", param=name)
    return found


def _plain(value: Any) -> Any:
    """Tuples, ranges and arrays of token ids as lists, their numbers as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, tuple | list | range) else value


def _named(model: str | os.PathLike[str] | None) -> str:
    return ANY_MODEL if model is None else model_name(model)


def _valid(shape: type[Body], fields: Mapping[str, Any]) -> Body:
    try:
        return shape.model_validate(fields)
    except ValidationError as exc:
        raise validation_error(exc) from exc


def model_name(model: object) -> str:
    """The id or path of a model as text.

    Raises:
        InvalidRequestError: it is neither.
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str) or not name.strip():
        raise InvalidRequestError(f"model is {model!r}; give an id such as 'smollm2-135m', or a path", param="model")
    return name
