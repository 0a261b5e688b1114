"""Convert texts, conversations, token ids and answers to the texts of traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.answer import TokenAnswer
from lmx_lab.values.steering import recorded_steering
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.generation import ANY_MODEL
from lmx_lab.wire.tracing import TraceBody
from lmx_lab.wire.validation import invalid_request


class Answer(Protocol):
    """A reply or a recorded request."""

    @property
    def _tokens(self) -> TokenAnswer: ...


What = str | Sequence[int] | Sequence[Mapping[str, Any]] | Answer
"""A text, token ids, messages, or an answer, of which the prompt and the answer are computed."""


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
            LabError: see ``ModelManager.trace``; a field is invalid, or the files of the model have changed since.
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
        InvalidRequestError: it is none of the kinds in ``What``, or the token ids of the answer are not known.
    """
    if isinstance(what, str):
        return Traced(text={"text": what})
    if isinstance(answer := getattr(what, "_tokens", None), TokenAnswer):
        return traced_answer(answer)
    items = what.tolist() if hasattr(what, "tolist") else list(what) if isinstance(what, Sequence) else None
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return Traced(text={"tokens": items})
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
            "this answer was steered, and a trace does not add the vectors; trace its token ids for the values without "
            "them",
            param="what",
        )
    if not answer.prompt or not answer.ids:
        raise InvalidRequestError(
            "the ids of this answer's tokens are not known, because its server runs elsewhere or the engine did not "
            "report them; trace its text",
            param="what",
        )
    return Traced(text={"tokens": [*answer.prompt, *answer.ids]}, model=answer.model, weights=answer.weights)


def activation_fields(hooks: str | Sequence[str], positions: int | Sequence[int] | None) -> dict[str, Any]:
    """Return the fields of a request for the values of hooks."""
    return {"kind": "activations", "hooks": hook_list(hooks), "positions": position_list(positions)}


def hook_list(hooks: str | Sequence[str]) -> list[str]:
    """Return the names of hooks as a list.

    Raises:
        InvalidRequestError: they are neither a text nor a list.
    """
    if not isinstance(hooks, str | Sequence):
        raise InvalidRequestError(f"hooks is {hooks!r:.40}; it must be a name or a list of names", param="hooks")
    return [hooks] if isinstance(hooks, str) else list(hooks)


def position_list(positions: int | Sequence[int] | None) -> list[int] | None:
    """Return positions as a list; None for all."""
    return None if positions is None else [positions] if isinstance(positions, int) else list(positions)


def token_label(text: str) -> str:
    """Return the text of a token on one line, with visible spaces and line breaks."""
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
