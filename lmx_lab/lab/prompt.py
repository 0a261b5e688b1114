"""What the chat verbs are given, as the request that the server would get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lmx_lab.errors import InvalidRequestError
from lmx_lab.server.errors import invalid
from lmx_lab.server.translate import ANY_MODEL
from lmx_lab.wire.chat import ChatRequest

Prompt = str | Sequence[Mapping[str, Any]]


def chat_request(prompt: Prompt, parameters: Mapping[str, Any]) -> ChatRequest:
    """
    Raises:
        InvalidRequestError: the first thing that is wrong, by name.
    """
    fields = dict(parameters)
    if "stream" in fields:
        raise InvalidRequestError("stream is a parameter of chat(); use astream(...) here", param="stream")
    system = fields.pop("system", None)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(messages, Sequence):
        messages = [*([{"role": "system", "content": system}] if system is not None else []), *messages]
    try:
        return ChatRequest.model_validate({"model": ANY_MODEL, "messages": messages, **fields})
    except ValidationError as exc:
        raise invalid(exc) from exc
