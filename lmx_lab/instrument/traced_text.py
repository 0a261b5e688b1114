"""Convert texts, conversations, token ids and answers to the input of traces."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import ValidationError

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.answer import TokenAnswer
from lmx_lab.values.steering import recorded_steering
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.errors import invalid_request
from lmx_lab.wire.tracing import TraceBody


class Answer(Protocol):
    """A reply or a recorded request."""

    @property
    def _tokens(self) -> TokenAnswer: ...


What = str | Sequence[int] | Sequence[Mapping[str, Any]] | Answer
"""A text, token ids, messages, or an answer, which is traced together with its prompt."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The text of a trace, and the model that must be loaded."""

    text: dict[str, Any]
    """The fields of ``TracedText``."""
    model: str = ANY_MODEL
    weights: str = ""
    """SHA-256 of the model's files; empty if any files are allowed."""

    async def run(self, backend: Backend, trace: Mapping[str, Any]) -> Trace:
        """Compute a trace of the text.

        Args:
            trace: The fields of one of the classes of ``AnyTrace``, without ``input``.

        Raises:
            LabError: see ``ModelManager.trace``; a field is invalid, or the files of the model have changed.
        """
        if self.weights:
            await backend.require_weights(self.model, self.weights)
        return await backend.trace(trace_body({**trace, "input": self.text}, model=self.model))


def trace_body(trace: Mapping[str, Any], *, model: str = ANY_MODEL) -> TraceBody:
    """Return the body of a request for a trace.

    Raises:
        InvalidRequestError: a field is invalid.
    """
    try:
        return TraceBody.model_validate({"model": model, "trace": trace})
    except ValidationError as exc:
        raise invalid_request(exc.errors()) from exc


def traced(what: What) -> Traced:
    """Return the text of a trace.

    Raises:
        InvalidRequestError: the argument has none of the types in ``What``, or the answer has no token ids.
    """
    if isinstance(what, str):
        return Traced(text={"text": what})
    if isinstance(answer := getattr(what, "_tokens", None), TokenAnswer):
        return traced_answer(answer)
    items = _items(what)
    if items and None not in (tokens := [integer(item) for item in items]):
        return Traced(text={"tokens": tokens})
    if items and all(isinstance(item, Mapping) for item in items):
        return Traced(text={"messages": items})
    raise InvalidRequestError(
        f"{what!r:.80} cannot be traced; pass a text, messages, token ids, a reply or a recorded request", param="what"
    )


def traced_answer(answer: TokenAnswer) -> Traced:
    """Return the prompt and the tokens of an answer as the text of a trace.

    Raises:
        InvalidRequestError: the token ids of the answer are not known, or it was steered.
    """
    if recorded_steering(answer.request):
        raise InvalidRequestError(
            "this answer was steered, but a trace does not add steering vectors; to trace it without them, pass its "
            "token ids",
            param="what",
        )
    if not answer.prompt or not answer.ids:
        raise InvalidRequestError(
            "the token ids of this answer are not known, because its server runs in another process, or the engine "
            "did not return them; trace its text",
            param="what",
        )
    return Traced(text={"tokens": [*answer.prompt, *answer.ids]}, model=answer.model, weights=answer.weights)


def traced_pair(clean: What, corrupt: What) -> tuple[Traced, Traced]:
    """Return the two texts of a patch sweep. If one of them is an answer, both require its model.

    Raises:
        InvalidRequestError: see ``traced``; or they are answers of different models.
    """
    texts = traced(clean), traced(corrupt)
    models = {text.model for text in texts} - {ANY_MODEL}
    weights = {text.weights for text in texts} - {""}
    if len(models) > 1 or len(weights) > 1:
        raise InvalidRequestError(
            f"clean is an answer of {texts[0].model} and corrupt one of {texts[1].model}, or their weights differ; "
            "pass answers of the same model",
            param="clean",
        )
    model, hash_ = models.pop() if models else ANY_MODEL, weights.pop() if weights else ""
    one, other = (replace(text, model=model, weights=hash_) for text in texts)
    return one, other


def activation_fields(hooks: str | Sequence[str], positions: int | Sequence[int] | None) -> dict[str, Any]:
    """Return the fields of a request for the values of hooks."""
    return {"kind": "activations", "hooks": hook_list(hooks), "positions": position_list(positions)}


def hook_list(hooks: str | Sequence[str]) -> list[str]:
    """Return the names of hooks as a list.

    Raises:
        InvalidRequestError: they are neither a name nor a list of names.
    """
    names = [hooks] if isinstance(hooks, str) else list(hooks) if isinstance(hooks, Sequence) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidRequestError(f"hooks is {hooks!r:.40}; it must be a name or a list of names", param="hooks")
    return names


def position_list(positions: int | Sequence[int] | None) -> list[int] | None:
    """Return positions as a list; None stands for all positions.

    Raises:
        InvalidRequestError: they are neither an index nor a list of indices.
    """
    if positions is None:
        return None
    single = integer(positions)
    items = [single] if single is not None else [integer(item) for item in _items(positions) or ()]
    found = [item for item in items if item is not None]
    if not found or len(found) < len(items):
        raise InvalidRequestError(
            f"positions is {positions!r:.40}; it must be an index, or a list, range or array of indices; leave it out "
            "for all positions",
            param="positions",
        )
    return found


def token_name(token: object, param: str) -> int | str:
    """Return the id or the text of a token.

    Args:
        param: Name of the argument, for the message.

    Raises:
        InvalidRequestError: the value is neither a token id nor a text.
    """
    if isinstance(token, str) and token:
        return token
    id_ = integer(token)
    if id_ is None or id_ < 0:
        raise InvalidRequestError(
            f"{param} is {token!r:.40}; it must be the id of a token, or a text that is exactly one token", param=param
        )
    return id_


def integer(value: object) -> int | None:
    """Return an integer of any type, such as a NumPy integer; None for other values, including booleans."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _items(value: object) -> list[Any] | None:
    """Return the items of a list, a range or an array; None for other values."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not (
        isinstance(value, Iterable) and isinstance(value, Sized)
    ):
        return None
    return list(value)


def token_label(text: str) -> str:
    """Return the text of a token on one line, with visible spaces and line breaks."""
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
