"""Show what a model computes for a text or an answer: the values of hooks, the attention of a block, the tokens that it
would predict after each block, and the parts of the logit of a token.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmx_lab.backend import Backend, TokenAnswer
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import InvalidRequestError, counted, format_bytes
from lmx_lab.results.figures import HeatMap, Picture
from lmx_lab.results.frames import make_table
from lmx_lab.results.pages import Displayed, write_file
from lmx_lab.results.tables import Html, html_table
from lmx_lab.values.integers import integer, whole_number
from lmx_lab.values.steering import recorded_steering
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import HookNamesBody, TraceBody
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.errors import validated

if TYPE_CHECKING:
    import pandas as pd

Shape = tuple[int | str, ...]
Token = int | str
"""The id or the text of a token."""
HOOKS = TraceBody(trace=HookNamesBody(kind="hooks"))
"""The request for the names of the hooks."""
BLOCK = re.compile(r"^blocks\.\d+\.")
SHOWN_TOKENS = 40
"""Maximum number of tokens on each axis of a displayed ``AttentionPattern``, counted from the first."""
LENS_COLUMNS = {
    **{"block": "int64", "position": "int64", "token": "str", "rank": "int64", "predicted": "str"},
    **{"id": "int64", "logprob": "float32"},
}
SHOWN_POSITIONS = 16
"""Maximum number of positions of a displayed ``LogitLensTable``, counted from the last."""


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
        InvalidRequestError: the argument has none of the types in ``What``, the token ids of the answer are not known,
            or the answer was steered.
    """
    if isinstance(what, str):
        return Traced(text={"text": what})
    if isinstance(answer := getattr(what, "_tokens", None), TokenAnswer):
        if recorded_steering(answer.request):
            raise InvalidRequestError(
                "this answer was steered, but a trace does not add steering vectors; to trace it without them, pass "
                "its token ids",
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
    items = _items(what)
    if items and None not in (ids := [integer(item) for item in items]):
        return Traced(text={"tokens": ids})
    if items and all(isinstance(item, Mapping) for item in items):
        return Traced(text={"messages": items})
    raise InvalidRequestError(
        f"{what!r:.80} cannot be traced; pass a text, messages, token ids, a reply or a recorded request", param="what"
    )


async def compute_trace(backend: Backend, what: What, trace: Mapping[str, Any]) -> Trace:
    """Compute a trace of a text, an answer or a recorded request. Has steps.

    Args:
        trace: As in ``Traced.run``.

    Raises:
        LabError: see ``traced`` and ``Traced.run``.
    """
    # In another thread, because a recorded request reads its answer from the recording.
    text = await in_thread(lambda: traced(what))
    return await on_loop(backend.portal, text.run(backend, trace))


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
    names = [hooks] if isinstance(hooks, str) else _items(hooks) or []
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
            f"<ActivationCache of {self.model}: {counted(len(self), 'hook')} at {len(self.positions)} of "
            f"{counted(len(self.tokens), 'position')}, {format_bytes(self.nbytes)}, text {text[:60]!r}>"
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
        return "\n".join([f"<{counted(len(self), 'hook')} of {self.model}>", *rows])

    def _repr_html_(self) -> str:
        return _table(f"{counted(len(self), 'hook')} of {self.model}", self)


def _grouped(shapes: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return the names and shapes, with one row for hooks that differ only in their block."""
    groups: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((BLOCK.sub("blocks.*.", name), shape), []).append(name)
    rows = []
    for (kind, shape), names in groups.items():
        title = names[0] if len(names) == 1 else f"{kind} ({counted(len(names), 'block')})"
        rows.append((title, f"({', '.join(map(str, shape))})"))
    return rows


def _table(title: str, shapes: Mapping[str, Shape]) -> str:
    rows = ((Html(f"<code>{html.escape(name)}</code>"), shape) for name, shape in _grouped(shapes))
    return f"<div>{html.escape(title)}</div>{html_table((), rows)}"


class AttentionPattern(Picture):
    """The attention of all heads of a block. Notebooks display one head large, and the others on demand.

    Attributes:
        layer: Index of the block.
        head: Index of the head that is displayed large.
        tokens, texts: The ids and the texts of the tokens.
        pattern: Attention weights in float32, of shape (heads, queries, keys). The weights of a query sum to 1, or to
            less if the model has attention sinks.
    """

    def __init__(self, trace: Trace, *, head: int) -> None:
        self.model = trace.model
        self.tokens, self.texts = trace.tokens, trace.texts
        ((name, pattern),) = trace.arrays.items()
        self.layer = int(name.split(".")[1])
        self.pattern: NDArray[np.float32] = pattern.swapaxes(0, 1)
        self.head = self._index_of(head)

    def _index_of(self, head: int) -> int:
        heads = len(self.pattern)
        if not -heads <= head < heads:
            raise InvalidRequestError(
                f"head is {head}; block {self.layer} of {self.model} has {counted(heads, 'head')}, 0 to {heads - 1}",
                param="head",
            )
        return head % heads

    def heat_map(self, head: int | None = None) -> HeatMap:
        """Return the heat map of a head, by default ``head``, with one row for each attending token. A negative head
        counts from the last one.

        Raises:
            InvalidRequestError: the head does not exist.
        """
        head = self.head if head is None else self._index_of(head)
        values = self.pattern[head, :SHOWN_TOKENS, :SHOWN_TOKENS]
        labels = [token_label(text) for text in self.texts[:SHOWN_TOKENS]]

        def describe(row: int, column: int) -> str:
            return f"{self.texts[row]!r} attends to {self.texts[column]!r}: {values[row, column]:.2%}"

        return HeatMap(
            title=f"Block {self.layer}, head {head} of {self.model}",
            values=values.tolist(),
            rows=labels,
            columns=labels,
            row_axis="query",
            column_axis="key",
            describe=describe,
            limit=1.0,
            unit="attention weight",
        )

    def __repr__(self) -> str:
        heads, queries, _ = self.pattern.shape
        return (
            f"<AttentionPattern of {self.model}: block {self.layer}, {counted(heads, 'head')}, "
            f"{counted(queries, 'token')}; .pattern>"
        )

    def _repr_html_(self) -> str:
        small = ""
        for head, pattern in enumerate(self.pattern[:, :SHOWN_TOKENS, :SHOWN_TOKENS]):
            names, side = [""] * len(pattern), 110 / max(1, len(pattern))
            cells = {"values": pattern.tolist(), "rows": names, "columns": names, "cell": (side, side)}
            small += HeatMap(title=f"head {head}", limit=1.0, **cells).svg()
        more = len(self.tokens) - SHOWN_TOKENS
        note = (
            f"<div>The first {SHOWN_TOKENS} tokens are shown; .pattern contains {more} more.</div>" if more > 0 else ""
        )
        title = html.escape(f"All heads of block {self.layer}")
        return f"{self.svg()}<details><summary>{title}</summary>{small}</details>{note}"


class LogitLensTable(Picture):
    """The most likely next tokens after each block and each position of a text.

    Attributes:
        tokens, texts: The ids and the texts of the tokens of the whole text.
        positions: The positions that were computed.
        ids: Ids of the predicted tokens, of shape (blocks, positions, top), by descending probability.
        logprobs: The natural log-probabilities of ``ids``.
    """

    def __init__(self, trace: Trace) -> None:
        self.model = trace.model
        self.tokens, self.texts = trace.tokens, trace.texts
        self.positions: tuple[int, ...] = tuple(trace.details["positions"])
        self.ids, self.logprobs = trace.arrays["ids"], trace.arrays["logprobs"]
        self._predicted: dict[str, str] = trace.details["texts"]

    def predicted(self, block: int, position: int) -> tuple[str, ...]:
        """Return the texts of the most likely next tokens after a block and a position, by descending probability.

        Args:
            block: Index of the block; negative ones count from the end.
            position: One of ``positions``; negative ones count from the end of the text.

        Raises:
            InvalidRequestError: the block does not exist, or the position was not computed.
        """
        blocks, at = len(self.ids), position + len(self.texts) if position < 0 else position
        if not -blocks <= block < blocks:
            raise InvalidRequestError(
                f"block is {block}; {self.model} has {counted(blocks, 'block')}, 0 to {blocks - 1}", param="block"
            )
        if at not in self.positions:
            raise InvalidRequestError(
                f"position is {position}, which was not computed; .positions lists the computed ones", param="position"
            )
        return tuple(self._predicted[str(token)] for token in self.ids[block, self.positions.index(at)])

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each block, position and rank (1 is the most likely token).

        Raises:
            MissingPackageError: pandas is not installed.
        """
        blocks, places, ranks = (axis.ravel() for axis in np.indices(self.ids.shape))
        positions = np.array(self.positions)[places]
        columns = (
            blocks,
            positions,
            [self.texts[at] for at in positions],
            ranks + 1,
            [self._predicted[str(token)] for token in self.ids.ravel()],
            self.ids.ravel(),
            self.logprobs.ravel(),
        )
        return make_table(dict(zip(LENS_COLUMNS, columns, strict=True)), LENS_COLUMNS)

    def heat_map(self) -> HeatMap:
        """Return the heat map: the most likely token in each cell, coloured by its probability, with the last block on
        top. It contains the last ``SHOWN_POSITIONS`` positions.
        """
        shown = range(max(0, len(self.positions) - SHOWN_POSITIONS), len(self.positions))
        blocks = range(len(self.ids))[::-1]
        probabilities = np.exp(self.logprobs[..., 0])

        def describe(row: int, column: int) -> str:
            block, at = blocks[row], shown[column]
            pairs = zip(self.predicted(block, self.positions[at]), self.logprobs[block, at], strict=True)
            lines = [f"{np.exp(logprob):7.2%}  {text!r}" for text, logprob in pairs]
            return "\n".join([f"block {block}, after {self.texts[self.positions[at]]!r}", *lines])

        return HeatMap(
            title=f"Logit lens of {self.model}",
            values=[[float(probabilities[block, at]) for at in shown] for block in blocks],
            rows=[str(block) for block in blocks],
            columns=[token_label(self.texts[self.positions[at]]) for at in shown],
            row_axis="block",
            column_axis="token",
            texts=[[token_label(self.predicted(block, self.positions[at])[0]) for at in shown] for block in blocks],
            describe=describe,
            limit=1.0,
            unit="probability of the token",
            cell=(62.0, 17.0),
        )

    def __repr__(self) -> str:
        blocks, positions, top = self.ids.shape
        last = ", ".join(map(repr, self.predicted(-1, max(self.positions))))
        return (
            f"<LogitLensTable of {self.model}: {counted(blocks, 'block')}, {counted(positions, 'position')}, "
            f"{counted(top, 'token')} each; after "
            f"the last block and position: {last}; .df contains all values>"
        )

    def _repr_html_(self) -> str:
        more = len(self.positions) - SHOWN_POSITIONS
        note = (
            f"<div>The last {SHOWN_POSITIONS} positions are shown; .df contains {more} more.</div>" if more > 0 else ""
        )
        return self.svg() + note


class LogitAttribution(Picture):
    """The contributions of the parts of a model to the logit of the next token, or to a difference of two logits.

    Attributes:
        logit: The logit or the difference, without the soft cap that some families apply. It is the sum of
            ``embedding``, ``attention``, ``mlp`` and ``bias``.
        embedding: Contribution of the values before the first block.
        attention, mlp: Contributions of each block, of shape (blocks).
        heads: Contributions of each attention head, of shape (blocks, heads); NaN where attention is not the sum of
            its heads. Their sum differs from ``attention`` by the bias of the output projection, if there is one.
        bias: Contribution of the biases of the final norm and the output head.
    """

    def __init__(self, trace: Trace, *, label: str) -> None:
        details = trace.details
        self.model, self.texts = trace.model, trace.texts
        self.logit: float = details["logit"]
        self.embedding: float = details["embedding"]
        self.bias: float = details["bias"]
        self.attention: NDArray[np.float32] = trace.arrays["attention"]
        self.mlp: NDArray[np.float32] = trace.arrays["mlp"]
        self.heads: NDArray[np.float32] = trace.arrays["heads"]
        self._label = label

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each part: ``embedding``, ``attention``, ``head``, ``mlp`` and ``bias``. The
        rows of heads are the parts of those of attention.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows: list[tuple[int | None, str, int | None, float]] = [(None, "embedding", None, self.embedding)]
        for block, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            rows.append((block, "attention", None, float(attention)))
            rows += [(block, "head", head, float(value)) for head, value in enumerate(self.heads[block])]
            rows.append((block, "mlp", None, float(mlp)))
        rows.append((None, "bias", None, self.bias))
        return make_table(rows, {"block": "Int64", "part": "str", "head": "Int64", "contribution": "float64"})

    def heat_map(self) -> HeatMap:
        """Return the heat map of the contributions, with the last block on top."""
        names = [*(f"head {head}" for head in range(self.heads.shape[1])), "attention", "MLP"]
        values = np.column_stack([self.heads, self.attention, self.mlp])[::-1]
        blocks = range(len(values))[::-1]

        def describe(row: int, column: int) -> str:
            return f"block {blocks[row]}, {names[column]}: {values[row, column]:+.3f}"

        return HeatMap(
            title=f"Contributions to the logit of {self._label}, {self.model}",
            values=values.tolist(),
            rows=[str(block) for block in blocks],
            columns=names,
            row_axis="block",
            describe=describe,
            unit="contribution in logits",
            cell=(30.0, 12.0),
        )

    def __repr__(self) -> str:
        return (
            f"<LogitAttribution of {self.model}: {self._label} {self.logit:.3f} = {self.embedding:.3f} embedding, "
            f"{self.attention.sum():.3f} attention, {self.mlp.sum():.3f} MLPs, {self.bias:.3f} biases; .df has all>"
        )


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
    return ActivationCache(await compute_trace(backend, what, activation_fields(hooks, positions)))


async def logit_lens(
    backend: Backend, what: What, *, top: int = 5, positions: int | Sequence[int] | None = None
) -> LogitLensTable:
    """Return the tokens that the model would predict after each of its blocks, at each position of a text.

    The final norm and the head of the model are applied to the residual stream after each block.

    Args:
        what: As in ``trace``.
        top: Number of tokens for each block and position, up to 100.
        positions: As in ``trace``.

    Raises:
        LabError: see ``trace``.
    """
    fields = {"kind": "logit_lens", "top": whole_number(top, "top", low=1), "positions": position_list(positions)}
    return LogitLensTable(await compute_trace(backend, what, fields))


async def attention(backend: Backend, what: What, layer: int, head: int = 0) -> AttentionPattern:
    """Return how much each token of a text attends to the preceding tokens, in all heads of a block.

    Args:
        what: As in ``trace``.
        layer: Index of the block; negative ones count from the last block.
        head: Index of the head that is displayed large; negative ones count from the last head.

    Raises:
        LabError: see ``trace``.
    """
    block, shown = whole_number(layer, "layer"), whole_number(head, "head")
    fields = activation_fields(f"blocks.{block}.attn.hook_pattern", None)
    return AttentionPattern(await compute_trace(backend, what, fields), head=shown)


async def direct_logit_attribution(
    backend: Backend, what: What, token: Token, *, other: Token | None = None
) -> LogitAttribution:
    """Return the contribution of each block, and each of its attention heads, to the logit of the next token.

    Args:
        what: As in ``trace``.
        token: Id or text of the token, such as ``" Paris"``; a text must be exactly one token.
        other: If set, the logit of ``token`` minus that of ``other`` is decomposed.

    Raises:
        LabError: see ``trace``.
    """
    names = [token_name(token, "token"), *([] if other is None else [token_name(other, "other")])]
    fields = {"kind": "attribution", **dict(zip(("token", "other"), names, strict=False))}
    label = " minus ".join(map(repr, names))
    return LogitAttribution(await compute_trace(backend, what, fields), label=label)
