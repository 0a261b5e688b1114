"""What the verbs are given, as the server would get it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lmx_lab.errors import InvalidRequestError
from lmx_lab.server.errors import invalid
from lmx_lab.server.translate import ANY_MODEL
from lmx_lab.wire.chat import ChatRequest

Prompt = str | Sequence[Mapping[str, Any]]


def _plain_stop(stop: Any) -> Any:
    return list(stop) if isinstance(stop, tuple) else stop


def _plain_bias(bias: Any) -> Any:
    if not isinstance(bias, Mapping):
        return bias
    return {str(token) if type(token) is int else token: value for token, value in bias.items()}


PLAIN = {"stop": _plain_stop, "logit_bias": _plain_bias}
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
    try:
        request = ChatRequest.model_validate({"model": ANY_MODEL, "messages": messages, **fields})
    except ValidationError as exc:
        raise invalid(exc) from exc
    # What a Reply does not hold.
    for name, asked in (("n", request.choices > 1), ("logprobs", request.logprobs)):
        if asked:
            raise InvalidRequestError(f"{name}: a reply is one text; use OpenAI(**lab.openai) for more", param=name)
    return request


def model_name(model: object) -> str:
    """The id or path of a model as text.

    Raises:
        InvalidRequestError: it is neither.
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str) or not name.strip():
        raise InvalidRequestError(f"model is {model!r}; give an id such as 'smollm2-135m', or a path", param="model")
    return name
