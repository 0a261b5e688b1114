"""What is wrong with a prompt, whichever engine reads it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, TokenPrompt
from lmx_lab.errors import ContextLengthError, InvalidRequestError
from lmx_lab.values.models import ModelEntry

AMPLE_CHARACTERS = 10
"""More than a token shows of ordinary text."""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse half characters, by the message they are in."""
    for at, message in enumerate(messages):
        check_characters(str(message.get("content", "")), f"messages.{at}.content")


def check_characters(text: str, param: str) -> None:
    """Refuse half characters."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        what = f"the lone surrogate {exc.object[exc.start]!r}, which is no character"
        raise InvalidRequestError(f"{param} has {what}", param=param) from exc


def param_of(request: GenerationRequest) -> str:
    """What the request calls its prompt."""
    return "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"


def check_length(request: GenerationRequest, prompt: Sequence[int], entry: ModelEntry, limit: int | None) -> None:
    """
    Args:
        limit: Tokens of prompt and answer that the model holds here.

    Raises:
        InvalidRequestError: the prompt is empty.
        ContextLengthError: it leaves no room for an answer.
    """
    if not prompt:
        raise InvalidRequestError("the prompt is empty: no token came out of it", param=param_of(request))
    if limit is not None and len(prompt) + min(1, request.max_tokens) > limit:
        raise too_long(request, str(len(prompt)), entry, limit)


def too_long(request: GenerationRequest, tokens: str, entry: ModelEntry, limit: int) -> ContextLengthError:
    """The error of a prompt with so many ``tokens``."""
    own = entry.context_length
    why = f" (of its {own}: memory holds no more)" if own is not None and limit < own else ""
    return ContextLengthError(
        f"the prompt has {tokens} tokens and {entry.id} holds {limit} in all{why}, the answer included; "
        "shorten the prompt",
        param=param_of(request),
    )


def check_tokens(request: GenerationRequest, entry: ModelEntry, vocabulary_size: int) -> None:
    """Token ids that the caller wrote must be tokens of this model.

    Raises:
        InvalidRequestError: one is not.
    """
    bias = [token for token, _ in request.sampling.logit_bias]
    given = request.prompt.tokens if isinstance(request.prompt, TokenPrompt) else ()
    for param, tokens in (("logit_bias", bias), ("prompt", given)):
        unknown = next((token for token in tokens if not 0 <= token < vocabulary_size), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"{param} has the token id {unknown}; {entry.id} knows 0 to {vocabulary_size - 1}", param=param
            )
