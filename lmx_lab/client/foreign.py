"""Refusals of chat-format servers of any make, as the package's own errors.

What they look like: ``{"error": {"message", "type", "code", "param"}}`` with a word or a status as its code (OpenAI,
llama.cpp, vLLM, Ollama), ``{"error": "…"}`` (mlx_lm.server, LM Studio), ``{"object": "error", "message": …}`` (older
vLLM), ``{"detail": …}`` (FastAPI).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pydantic_core

from lmx_lab import errors
from lmx_lab.client.errors import ERROR_CLASSES as OWN_CODES
from lmx_lab.client.errors import ServerDescription, UnexpectedResponse, error_in, wrong_server_error
from lmx_lab.errors import LabError

CHAT_SERVER = ServerDescription(kind="a chat-format server")
SAID = 500
# The words of llama.cpp, vLLM, OpenAI and LM Studio; the statuses that come with them are 400 and 500.
TOO_LONG = re.compile(r"context.{0,20}(length|size|window)|exceed_context_size|too many tokens", re.IGNORECASE)
NO_MODEL = re.compile(r"model|repo", re.IGNORECASE)
LOADING = re.compile(r"loading", re.IGNORECASE)
BY_STATUS: dict[int, type[LabError]] = {
    400: errors.InvalidRequestError,
    401: errors.UnauthorizedError,
    403: errors.UnauthorizedError,
    413: errors.BodyTooLargeError,
    422: errors.InvalidRequestError,
    429: errors.QueueFullError,
}


def chat_server_error(answer: UnexpectedResponse) -> LabError:
    """The error of an answer that is no success, or no answer of a chat-format server at all."""
    return _told(answer.body, answer) or wrong_server_error(answer)


def error_in_chat_event(text: str, url: str) -> LabError | None:
    """The error that a stream's event tells of, or a document in a stream's place; None if it is neither."""
    return _told(text, UnexpectedResponse(url=url, status=500, kind="", retry_after=None, body=b""))


def _told(text: str | bytes, answer: UnexpectedResponse) -> LabError | None:
    try:
        document = pydantic_core.from_json(text)
    except ValueError:
        return None
    if not isinstance(document, Mapping) or (said := _said(document)) is None:
        return None
    if (kind := _kind(said, answer.status)) is None:
        # One of the lab's own codes, whose message is made for people already.
        return error_in(text, retry_after=answer.retry_after)
    retry_after = answer.retry_after or ""
    advised = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
    return kind(f"{answer.url} says: {said['message']:.{SAID}}", retry_after_s=advised)


def _said(document: Mapping[str, Any]) -> dict[str, Any] | None:
    detail = document.get("error")
    if isinstance(detail, Mapping):
        return {**detail, "message": str(detail.get("message") or detail.get("code") or "an error without a message")}
    if isinstance(detail, str) and detail:
        return {"message": detail}
    if document.get("object") == "error":
        return {**document, "message": str(document.get("message"))}
    if "detail" in document:
        return {"message": str(document["detail"])}
    return None


def _kind(said: Mapping[str, Any], status: int) -> type[LabError] | None:
    code = said.get("code")
    if isinstance(code, str) and code in OWN_CODES:
        return None
    if isinstance(code, int) and code in range(400, 600):
        # llama.cpp may send an error with the status 200.
        status = code
    if TOO_LONG.search(f"{said['message']} {code} {said.get('type')}"):
        return errors.ContextLengthError
    if code == "model_not_found" or (status == 404 and NO_MODEL.search(said["message"])):
        return errors.ModelNotFoundError
    if status == 503 and LOADING.search(said["message"]):
        return errors.ModelBusyError
    return BY_STATUS.get(status, errors.EngineError)
