"""Convert the arguments of ``Lab``'s methods to request bodies of the server's routes, and validate them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from pydantic import BaseModel, PydanticUserError

from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.completions import CompletionRequest, shape_of
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.errors import validated
from lmx_lab.wire.rerank import RerankBody

Prompt = str | Sequence[Mapping[str, Any]]
Texts = str | Iterable[str] | Iterable[int] | Iterable[Sequence[int]]
"""One or several texts, or the token ids of one or several texts; also an array or a column of a data frame."""
Documents = Iterable[str | Mapping[str, Any]]


def _to_python(value: Any) -> Any:
    """Convert tuples, ranges and arrays of token ids to lists of Python's numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_to_python(item) for item in value] if isinstance(value, tuple | list | range) else value


def _bias_with_text_keys(bias: Any) -> Any:
    if not isinstance(bias, Mapping):
        return bias
    pairs = [(_to_python(token), _to_python(value)) for token, value in bias.items()]
    return {str(token) if type(token) is int else token: value for token, value in pairs}


def _schema_format(response_format: Any) -> Any:
    """Replace the class of a pydantic model by the format of its JSON schema."""
    if not (isinstance(response_format, type) and issubclass(response_format, BaseModel)):
        return response_format
    name = response_format.__name__
    try:
        schema = response_format.model_json_schema()
    except PydanticUserError as exc:
        raise InvalidRequestError(
            f"response_format: {name} has no JSON schema: {exc.message}", param="response_format"
        ) from None
    return {"type": "json_schema", "json_schema": {"name": name[:256], "schema": schema}}


def _tools(tools: Any) -> Any:
    """Replace Python functions by tools with their name, docstring and the JSON schema of their parameters."""
    if callable(tools):
        tools = [tools]
    converted = list(tools) if isinstance(tools, Iterable) and not isinstance(tools, str | bytes | Mapping) else tools
    if not isinstance(converted, list) or not any(map(callable, converted)):
        return converted
    # Imported here, because reading docstrings takes a package that most programs do not need.
    from lmx_lab.wire.function_schema import function_schema, name_of

    functions: dict[str, Any] = {}

    def of_function(function: Any) -> dict[str, Any]:
        schema = function_schema(function)
        name = name_of(function)
        # The server ignores a second tool with the same name.
        if functions.setdefault(name, function) != function:
            raise InvalidRequestError(
                f"tools has two functions with the name {name!r:.100}; rename one of them", param="tools"
            )
        described = {"name": name, "description": schema.description, "parameters": schema.parameters}
        return {"type": "function", "function": described}

    return [of_function(tool) if callable(tool) else tool for tool in converted]


def _steer_items(steer: Any) -> Any:
    """Return vectors as items of the request field; a single vector is a list of one."""
    if steer is None:
        return None
    # Imported here, because modules of ``instrument`` import this one.
    from lmx_lab.instrument.steering import Steer

    items = steer if isinstance(steer, list | tuple) else [steer]
    if wrong := [type(item).__name__ for item in items if not isinstance(item, Steer | Mapping)]:
        raise InvalidRequestError(
            f"steer contains a value of type {wrong[0]}; pass a list of vectors, such as [Steer(layer, vector, scale)]",
            param="steer",
        )
    return [
        item.to_json() if isinstance(item, Steer) else {name: _to_python(value) for name, value in item.items()}
        for item in items
    ]


CONVERSIONS = {
    "stop": _to_python,
    "tools": _tools,
    "logprobs": _to_python,
    "logprob_tokens": _to_python,
    "logit_bias": _bias_with_text_keys,
    "response_format": _schema_format,
    "steer": _steer_items,
}
"""For each parameter that accepts Python values without a JSON form, the function that converts them to values of the
chat format."""


def chat_request(prompt: Prompt, parameters: Mapping[str, Any]) -> ChatRequest:
    """Return the request for a prompt.

    Args:
        prompt: A text, or messages.
        parameters: Parameters of the chat format, and ``system``.

    Raises:
        InvalidRequestError: an argument is invalid; ``param`` is the first invalid one.
    """
    fields = {name: CONVERSIONS[name](value) if name in CONVERSIONS else value for name, value in parameters.items()}
    if isinstance(count := fields.get("logprobs"), int) and not isinstance(count, bool):
        fields |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs", count)}
    if fields.get("logprob_tokens"):
        fields = {"logprobs": True} | fields
    # A list or column of texts is not a conversation; the message shows a loop that sends each text.
    if isinstance(prompt, Mapping):
        raise InvalidRequestError("the prompt is one message; pass a list of messages", param="messages")
    is_conversation = isinstance(prompt, Sequence) and not (prompt and all(isinstance(item, str) for item in prompt))
    if isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes) and not is_conversation:
        size = f" with {counted(len(prompt), 'item')}" if isinstance(prompt, Sized) else ""
        raise InvalidRequestError(
            f"the prompt is a {type(prompt).__name__}{size}, but chat() takes one conversation: a text, or a list of "
            "messages. For one reply for each text: [lab.chat(text) for text in texts], or all at the same time: "
            "await asyncio.gather(*[lab.achat(text) for text in texts])",
            param="messages",
        )
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        is_short = prompt is None or isinstance(prompt, int | float | bytes | bytearray)
        found = f"is {prompt!r:.80}" if is_short else f"has the type {type(prompt).__name__}"
        raise InvalidRequestError(f"the prompt {found}; pass a text, or a list of messages", param="messages")
    if "stream" in fields:
        raise InvalidRequestError(
            "stream is a parameter of chat() only; to await a stream, call astream(...)", param="stream"
        )
    system = fields.pop("system", None)
    if system is not None and not isinstance(system, str | list):
        raise InvalidRequestError(f"system is {system!r:.80}; it must be a text", param="system")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [*([{"role": "system", "content": system}] if system is not None else []), *messages]
    request = validated(ChatRequest, {"model": ANY_MODEL, "messages": messages, **fields})
    if (request.n or 1) > 1:
        raise InvalidRequestError(
            "n is not available here, because a reply has one text; use OpenAI(**lab.openai)", param="n"
        )
    return request


def completion_request(prompt: str | Sequence[int], parameters: Mapping[str, Any]) -> CompletionRequest:
    """Return the request for the continuation of a plain text or of token ids.

    Raises:
        InvalidRequestError: an argument is invalid.
    """
    fields = {name: CONVERSIONS[name](value) if name in CONVERSIONS else value for name, value in parameters.items()}
    request = validated(CompletionRequest, {"model": ANY_MODEL, "prompt": _to_python(prompt), **fields})
    if (request.n or 1) > 1 or shape_of(request.prompt) not in ("str", "list[int]"):
        raise InvalidRequestError(
            "complete() continues one prompt once; use OpenAI(**lab.openai).completions for several", param="prompt"
        )
    if request.stream:
        raise InvalidRequestError("complete() does not stream; leave stream out", param="stream")
    return request


def embeddings_body(texts: Texts, *, model: str | os.PathLike[str] | None, **fields: Any) -> EmbeddingsBody:
    """Return the request for vectors of texts.

    Args:
        fields: Other fields of the body; None is the default.

    Raises:
        InvalidRequestError: an argument is invalid; ``param`` is the first invalid one.
    """
    values = texts if isinstance(texts, str) else [_to_python(item) for item in _complete(list_of(texts, "texts"))]
    return validated(EmbeddingsBody, {"model": _model_field(model), "input": values, **fields})


def rerank_body(query: str, documents: Documents, *, model: str | os.PathLike[str] | None, **fields: Any) -> RerankBody:
    """Return the request for a ranking of documents.

    Args:
        fields: Other fields of the body; None is the default.

    Raises:
        InvalidRequestError: an argument is invalid; ``param`` is the first invalid one.
    """
    if isinstance(documents, str | Mapping):
        raise InvalidRequestError("documents is a single document; pass a list of documents", param="documents")
    listed = _complete(list_of(documents, "documents"), "documents")
    values = [dict(item) if isinstance(item, Mapping) else item for item in listed]
    return validated(RerankBody, {"model": _model_field(model), "query": query, "documents": values, **fields})


def list_of(items: object, name: str, *, of: str = "texts") -> list[Any]:
    """Return the items of any iterable, such as a list, an array or a column of a table, except of types that are
    iterable but are not lists.

    Args:
        name: Name of the argument, for error messages.
        of: Name of the items, for error messages.

    Raises:
        InvalidRequestError: the value is not a list of several items.
    """
    if hasattr(items, "columns"):
        raise InvalidRequestError(f"{name} is a data frame; pass one of its columns", param=name)
    convert = next(filter(None, (getattr(items, method, None) for method in ("to_pylist", "tolist", "to_list"))), None)
    found = convert() if convert is not None and not isinstance(items, memoryview) else items
    if isinstance(found, str | bytes | bytearray | memoryview | Mapping) or not isinstance(found, Iterable):
        raise InvalidRequestError(f"{name} is {items!r:.80}; pass a list of {of}", param=name)
    result = list(found)
    if result and isinstance(result[0], bytes | bytearray):
        raise InvalidRequestError(f"{name} contains the bytes {result[0]!r:.80}; decode them to text", param=name)
    return result


def _complete(items: list[Any], name: str = "texts") -> list[Any]:
    """Check that none of the items is a missing value, as in a column of a table."""
    for at, item in enumerate(items):
        is_nan = isinstance(item, float) and math.isnan(item)
        if item is None or is_nan or type(item).__name__ in ("NAType", "NaTType"):
            raise InvalidRequestError(f"{name}[{at}] is {item!r:.40}; pass texts only", param=f"{name}[{at}]")
    return items


def _model_field(model: str | os.PathLike[str] | None) -> str:
    return ANY_MODEL if model is None else model_name(model)


def model_name(model: object) -> str:
    """Return the id or path of a model as text.

    Raises:
        InvalidRequestError: the value is neither an id nor a path.
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str) or not name.strip():
        raise InvalidRequestError(f"model is {model!r}; pass an id such as 'smollm2-135m', or a path", param="model")
    return name
