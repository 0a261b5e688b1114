"""Pydantic models of POST /admin/trace. The response is a safetensors document; see ``values.tracing.Trace``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Discriminator, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from lmx_lab.wire.base import ANY_MODEL, WHOLE, AnyModel, NonEmpty, RequestModel
from lmx_lab.wire.tokens import TOKEN_LIMIT, ChatMessages, TokenList

Hooks = Annotated[list[NonEmpty], FailFast(), Field(min_length=1, max_length=10_000)]
# A named type, because members of a union must be hashable, and FailFast is not.
Positions = TypeAliasType("Positions", Annotated[list[int], FailFast(), Field(min_length=1, max_length=TOKEN_LIMIT)])
TokenName = Annotated[Annotated[int, Field(ge=0)] | NonEmpty, WHOLE]
"""A token: its id, or its text, which must be exactly one token."""


class TracedText(RequestModel):
    """The text to trace; exactly one of the fields."""

    text: str | None = None
    messages: ChatMessages | None = None
    tokens: TokenList | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in ("text", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no text'}; send exactly one of text, messages and tokens")
        return self


class HookNamesBody(RequestModel):
    """Lists the names of the model's hooks."""

    kind: Literal["hooks"]


class ActivationsBody(RequestModel):
    """Returns the values of hooks."""

    kind: Literal["activations"]
    input: TracedText
    hooks: Hooks
    positions: Positions | None = None


class LogitLensBody(RequestModel):
    """Returns the tokens that the model would predict after each block."""

    kind: Literal["logit_lens"]
    input: TracedText
    top: Annotated[int, Field(ge=1, le=100), WHOLE] = 5
    positions: Positions | None = None


class PatchingBody(RequestModel):
    """Returns the logits of two tokens after a text in which single values are replaced by those of a clean text."""

    kind: Literal["patching"]
    input: TracedText
    clean: TracedText
    answer: TokenName
    other: TokenName
    hooks: Hooks
    positions: Positions | None = None
    together: bool = False


class AttributionBody(RequestModel):
    """Attributes the logit of the token after a text to the parts of the model."""

    kind: Literal["attribution"]
    input: TracedText
    token: TokenName
    other: TokenName | None = None


AnyTrace = Annotated[
    HookNamesBody | ActivationsBody | LogitLensBody | PatchingBody | AttributionBody, Discriminator("kind")
]


class TraceBody(RequestModel):
    """The body of POST /admin/trace."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "trace": {
                        "kind": "activations",
                        "input": {"text": "The sea is"},
                        "hooks": ["blocks.*.hook_resid_post"],
                    }
                }
            ]
        }
    )

    model: AnyModel = ANY_MODEL
    trace: AnyTrace
