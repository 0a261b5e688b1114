"""Define the requests for traces of a model's internal values, and their result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Self

from lmx_lab.values.bodies import TOKEN_LIMIT, Body, Limits, listed, whole
from lmx_lab.values.tensors import decode_tensors, encode_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

PATCHABLE = ("hook_resid_pre", "hook_z", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
"""Last parts of the names of values that ``Patching`` can restore."""


Hooks = Annotated[
    tuple[Annotated[str, Limits(min_length=1)], ...], Limits(listed, min_length=1, max_length=10_000, fail_fast=True)
]
Positions = Annotated[tuple[int, ...], Limits(listed, min_length=1, max_length=TOKEN_LIMIT, fail_fast=True)]
TokenName = Annotated[Annotated[int, Limits(ge=0)] | Annotated[str, Limits(min_length=1)], Limits(whole)]
"""A token: its id, or its text, which must be exactly one token."""


@dataclass(frozen=True, kw_only=True)
class HookNames(Body):
    """List the names of the values that a model has, with their shapes."""


@dataclass(frozen=True, kw_only=True)
class Activations(Body):
    """Return the values of hooks."""

    hooks: Hooks
    """Names, in which ``*`` stands for any characters, and the number of a block may count from the last one (-1)."""
    positions: Positions | None = None
    """Positions of the tokens whose values are returned, in this order; negative ones count from the end. None returns
    all."""


@dataclass(frozen=True, kw_only=True)
class LogitLens(Body):
    """Return the tokens that the final norm and the head predict from the residual stream after each block."""

    top: Annotated[int, Limits(whole, ge=1, le=100)] = 5
    """Number of tokens for each block and position."""
    positions: Positions | None = None
    """As in ``Activations``."""


@dataclass(frozen=True, kw_only=True)
class Patching(Body):
    """Return the logits of two tokens after a text in which single values are replaced by those of a clean text."""

    answer: TokenName
    other: TokenName
    hooks: Hooks
    """Names of the values that are replaced, as in ``Activations``."""
    positions: Positions | None = None
    """Positions at which values are replaced; None selects all."""
    together: bool = False
    """Whether a value is replaced at all positions at the same time, instead of at one position after the other."""


@dataclass(frozen=True, kw_only=True)
class Attribution(Body):
    """Return the contribution of each block, and each of its attention heads, to the logit of the next token."""

    token: TokenName
    other: TokenName | None = None
    """If set, the difference between the logits of both tokens is attributed to the parts."""


TraceWork = HookNames | Activations | LogitLens | Patching | Attribution


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The result of a trace."""

    model: str
    """Id of the model."""
    tokens: tuple[int, ...]
    """Token ids of the text."""
    texts: tuple[str, ...]
    """Text of each token."""
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Results in float32, or int32 for token ids and positions."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Other results, as JSON values."""

    def encode(self) -> bytes:
        """Return the trace as a safetensors document."""
        fields = {"model": self.model, "tokens": self.tokens, "texts": self.texts, "details": self.details}
        return encode_tensors(self.arrays, {name: json.dumps(value) for name, value in fields.items()})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the trace in a document of ``encode``.

        Raises:
            ValueError: the document is damaged.
        """
        arrays, metadata = decode_tensors(data)
        try:
            fields = {name: json.loads(metadata[name]) for name in ("model", "tokens", "texts", "details")}
        except KeyError as exc:
            raise ValueError(f"it has no {exc}") from exc
        return cls(
            model=fields["model"],
            tokens=tuple(fields["tokens"]),
            texts=tuple(fields["texts"]),
            arrays=arrays,
            details=fields["details"],
        )
