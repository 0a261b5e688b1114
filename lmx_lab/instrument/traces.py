"""Convert texts, conversations, token ids and answers to the input of traces, and show the values of hooks.

The text of a trace is read in another thread, because a recorded request reads its answer from the recording.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from lmx_lab.backend import Backend, TokenAnswer
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.pages import Displayed, write_file
from lmx_lab.results.tables import Html, html_table
from lmx_lab.values.integers import integer
from lmx_lab.values.steering import recorded_steering
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import HookNamesBody, TraceBody
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.errors import validated

Shape = tuple[int | str, ...]
Token = int | str
"""The id or the text of a token."""
HOOKS = TraceBody(trace=HookNamesBody(kind="hooks"))
"""The request for the names of the hooks."""
BLOCK = re.compile(r"^blocks\.\d+\.")


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
    format: str = ""
    """The format of the model's files; empty if any format is allowed."""

    async def run(self, backend: Backend, trace: Mapping[str, Any]) -> Trace:
        """Compute a trace of the text.

        Args:
            trace: The fields of one of the classes of ``AnyTrace``, without ``input``.

        Raises:
            LabError: see ``ModelManager.trace``; a field is invalid, or the files of the model have changed.
        """
        if self.weights or self.format:
            await backend.require_weights(self.model, self.weights, self.format)
        return await backend.trace(validated(TraceBody, {"model": self.model, "trace": {**trace, "input": self.text}}))


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
    if not answer.prompt_ids or not answer.ids:
        raise InvalidRequestError(
            "the token ids of this answer are not known, because its server runs in another process, or the engine "
            "did not return them; trace its text",
            param="what",
        )
    tokens = [*answer.prompt_ids, *answer.ids]
    return Traced(text={"tokens": tokens}, model=answer.model, weights=answer.weights, format=answer.format)


def traced_pair(clean: What, corrupt: What) -> tuple[Traced, Traced]:
    """Return the two texts of a patch sweep. If one of them is an answer, both require its model.

    Raises:
        InvalidRequestError: see ``traced``; or they are answers of different models.
    """
    texts = traced(clean), traced(corrupt)
    models = {text.model for text in texts} - {ANY_MODEL}
    weights, formats = ({getattr(text, name) for text in texts} - {""} for name in ("weights", "format"))
    if max(map(len, (models, weights, formats))) > 1:
        raise InvalidRequestError(
            f"clean is an answer of {texts[0].model} and corrupt one of {texts[1].model}, or their weights differ; "
            "pass answers of the same model",
            param="clean",
        )
    model, hash_, format_ = (found.pop() if found else "" for found in (models, weights, formats))
    one, other = (replace(text, model=model or ANY_MODEL, weights=hash_, format=format_) for text in texts)
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


class ActivationCache(Displayed, dict[str, NDArray[Any]]):
    """The values of hooks by name: float32 arrays whose first axis is the position.

    Attributes:
        model: Id of the model.
        tokens: Token ids of the whole text.
        texts: Text of each token.
        positions: The positions in the text that the rows of the arrays belong to.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.arrays)
        self._trace = trace
        self.model = trace.model
        self.tokens = trace.tokens
        self.texts = trace.texts
        self.positions: tuple[int, ...] = tuple(trace.details["positions"])

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self.values())

    def to_safetensors(self, path: str | os.PathLike[str]) -> Path:
        """Write the arrays to a safetensors file, and return its path. The metadata contains the tokens as JSON.

        Raises:
            InvalidRequestError: the file cannot be written.
        """
        return write_file(path, self._trace.encode())

    def __repr__(self) -> str:
        rows = [f"  {name}  {text}" for name, text in _grouped({name: self[name].shape for name in self})]
        text = "".join(self.texts)
        head = (
            f"<ActivationCache of {self.model}: {len(self)} hooks at {len(self.positions)} of {len(self.tokens)} "
            f"positions, {self.nbytes / 1e6:.1f} MB, text {text[:60]!r}>"
        )
        return "\n".join([head, *rows])

    def _repr_html_(self) -> str:
        return _table(repr(self).split("\n", 1)[0].strip("<>"), {name: self[name].shape for name in self})


class HookTable(Displayed, dict[str, Shape]):
    """The hooks of a model with the shapes of their values; ``position`` and ``key`` stand for numbers of tokens."""

    def __init__(self, trace: Trace) -> None:
        self.model = trace.model
        sizes: Mapping[str, Sequence[int]] = trace.details["hooks"]
        super().__init__((name, ("position", *(each or "key" for each in size))) for name, size in sizes.items())

    def __repr__(self) -> str:
        rows = [f"  {name}  {text}" for name, text in _grouped(self)]
        return "\n".join([f"<{len(self)} hooks of {self.model}>", *rows])

    def _repr_html_(self) -> str:
        return _table(f"{len(self)} hooks of {self.model}", self)


def _grouped(shapes: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return the names and shapes, with one row for hooks that differ only in their block."""
    groups: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((BLOCK.sub("blocks.*.", name), shape), []).append(name)
    rows = []
    for (kind, shape), names in groups.items():
        title = names[0] if len(names) == 1 else f"{kind} ({len(names)} blocks)"
        rows.append((title, f"({', '.join(map(str, shape))})"))
    return rows


def _table(title: str, shapes: Mapping[str, Shape]) -> str:
    rows = ((Html(f"<code>{html.escape(name)}</code>"), shape) for name, shape in _grouped(shapes))
    return f"<div>{html.escape(title)}</div>{html_table((), rows)}"


# Methods of a lab


async def hooks(backend: Backend) -> HookTable:
    """Return the names of the values that can be read while the loaded model computes, with their shapes.

    The names are those of TransformerLens.

    Raises:
        NotLoadedError: no model is loaded.
        InvalidRequestError: the model is not loaded on MLX, or has no list of blocks.
        AdminForbiddenError: the server runs on another machine.
    """
    return HookTable(await on_loop(backend.portal, backend.trace(HOOKS)))


async def trace(
    backend: Backend, what: What, hooks: str | Sequence[str], *, positions: int | Sequence[int] | None = None
) -> ActivationCache:
    """Compute a text, and return the values of hooks at its positions as float32 arrays.

    The text is computed again from its tokens, between the steps of running answers, which are not affected.

    Args:
        what: A text, messages, token ids, a reply or a recorded request. A reply is traced together with its
            prompt.
        hooks: Names from ``hooks()``, in which ``*`` stands for any characters, such as
            ``blocks.*.hook_resid_post``. In ``blocks.-1.hook_resid_post``, the number counts from the last block; the
            result has the number of the block in its place.
        positions: The positions whose values are returned, in this order, by default all; negative ones count from the
            end.

    Raises:
        NotLoadedError: no model is loaded, or not the model of the answer.
        InvalidRequestError: a hook or position does not exist, the values are larger than ``trace_bytes``, or the
            model is not loaded on MLX.
        ContextLengthError: the text is longer than the model's context.
        AdminForbiddenError: the server runs on another machine.
    """
    fields, text = activation_fields(hooks, positions), await in_thread(lambda: traced(what))
    return ActivationCache(await on_loop(backend.portal, text.run(backend, fields)))
