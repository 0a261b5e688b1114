"""How the text of an answer divides into thoughts, content and tool calls. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CONTENT, REASONING, TOOL = "normal", "reasoning", "tool"
"""States of mlx-lm's ``TextStateMachine``. Text in any other state, such as a header, is not shown."""
ParseCalls = Callable[[str], Any]
"""The text between the markers to one call or a list of them: ``{"name", "arguments"}``, perhaps with an ``id``."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    start: str
    """The marker before a call, or before several."""
    end: str
    """The marker after; empty if the calls go on to the end of the answer (Mistral)."""
    parse: ParseCalls | None = None
    """The model's own format; it may raise anything. None: a grammar makes each text between the markers be
    ``{"name": ..., "arguments": {...}}``, in this order, so that it can be handed on while it comes."""


@dataclass(frozen=True, kw_only=True)
class AnswerShape:
    initial: str = CONTENT
    """The state in which the answer begins: the prompt may have opened the thoughts."""
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """From each state, the markers that end it and the states after them; the markers are not shown."""
    thoughts_first: bool = False
    """Thoughts begin where no content has come before; later their marker is a text like any other."""
    calls: CallFormat | None = None
    literals: Mapping[int, str] = field(default_factory=dict)
    """Special tokens by id, as text, without those that end an answer. They are text where they are in a marker, or
    inside a call in the model's own format; elsewhere they show nothing."""
