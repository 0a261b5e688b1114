"""How a model writes thoughts and tool calls: read off its tokenizer by mlx-lm, or the generic way for calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lmx_lab.engine.grammar import Marker, Thoughts, grammar
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, ToolUse
from lmx_lab.engine.shape import CONTENT, REASONING, TOOL, AnswerShape, CallFormat
from lmx_lab.engine.tool_prompt import END, START, template_tools, written_out
from lmx_lab.errors import InvalidRequestError

Thinking = Literal["open", "possible", "closed"]
"""What the end of the prompt says of the thoughts: they have begun, may begin, or are over."""
GENERIC = CallFormat(start=START, end=END)
# The parser of models that write calls as the generic format does, such as Qwen's and Hermes.
GENERIC_PARSER = "mlx_lm.tool_parsers.json_tools"
TAIL_TOKENS = 32
BETWEEN = "between"
"""A state whose text is not shown."""


@dataclass(frozen=True)
class OwnCalls:
    """A way to write calls that is not the generic one."""

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    """The text between the markers, and the tools."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The markers of one model, as text."""

    thoughts: tuple[str, str] | None = None
    end_of_thoughts: tuple[int, ...] = ()
    """Its tokens."""
    takes_tools: bool = False
    """The template writes tools, calls and results by itself."""
    own_calls: OwnCalls | None = None
    """As the template writes them; None for the generic way."""
    initial: str = CONTENT
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Of answers with headers around thoughts and content."""
    literals: Mapping[int, str] = field(default_factory=dict)
    """Special tokens, without those that end an answer."""
    markers: Mapping[str, Marker] = field(default_factory=dict)
    """The markers of thoughts and generic calls as this model's tokens."""

    @property
    def marker_tokens(self) -> set[int]:
        """Tokens that are, or are in, a marker."""
        return {part for marker in self.markers.values() for part in marker if isinstance(part, int)}

    @property
    def headed(self) -> bool:
        """Answers have headers, which no grammar here knows."""
        return bool(self.transitions)

    def calls_in(self, request: GenerationRequest) -> CallFormat | None:
        """How calls are written in the answer to this request; None if it may have none.

        Calls that a grammar makes are written the generic way, by any model.
        """
        tools = _tools(request)
        if tools is None:
            return None
        own = self.own_calls
        if own is None or tools.forced or request.answer_format is not None:
            return GENERIC
        described = template_tools(tools)
        return CallFormat(start=own.start, end=own.end, parse=lambda text: own.parse(text, described))

    def shape(self, request: GenerationRequest, thinking: Thinking) -> AnswerShape | None:
        """How the answer divides; None if it is content and nothing else."""
        if not isinstance(request.prompt, ChatPrompt):
            return None
        calls, tools = self.calls_in(request), _tools(request)
        # Between forced calls a cut answer may have half a marker, which nobody wants to read.
        content = BETWEEN if tools is not None and tools.forced else CONTENT
        transitions: dict[str, list[tuple[str, str]]] = {state: list(to) for state, to in self.transitions.items()}
        if self.thoughts is not None and thinking != "closed":
            start, end = self.thoughts
            transitions.setdefault(content, []).append((start, REASONING))
            transitions.setdefault(REASONING, []).append((end, content))
        if calls is not None:
            # In headed answers the headers may say where calls begin.
            if not any(to == TOOL for ways in transitions.values() for _, to in ways):
                transitions.setdefault(content, []).append((calls.start, TOOL))
            if calls.parse is not None and REASONING in transitions:
                # Some models call without a word about the end of their thoughts.
                transitions[REASONING].append((calls.start, TOOL))
            transitions[TOOL] = [(calls.end, content)] if calls.end else []
        if not transitions:
            return None
        first = content if self.initial == CONTENT else self.initial
        initial = REASONING if thinking == "open" and self.thoughts is not None else first
        return AnswerShape(initial=initial, transitions=transitions, calls=calls, literals=self.literals)

    def template_input(self, request: GenerationRequest, prompt: ChatPrompt) -> dict[str, Any]:
        """Messages and tools for the model's template.

        Tools, calls and results are written into the messages if the template has no way for them, or the answer none
        that goes with its format.
        """
        unlike = self.own_calls is not None and request.answer_format is not None and prompt.tools is not None
        if unlike or not self.takes_tools:
            return {"messages": written_out(prompt.messages, prompt.tools)}
        tools = {"tools": template_tools(prompt.tools)} if prompt.tools is not None else {}
        return {"messages": [dict(message) for message in prompt.messages], **tools}

    def grammar(self, request: GenerationRequest, thinking: Thinking) -> str | None:
        """What llguidance shall enforce; None for an answer that is free.

        Raises:
            InvalidRequestError: this model's answers cannot be made to have the form that is asked for.
        """
        calls = self.calls_in(request)
        tools = _tools(request) if calls is not None and calls.parse is None else None
        thoughts = None
        if self.thoughts is not None and thinking != "closed" and isinstance(request.prompt, ChatPrompt):
            start, end = (self.markers.get(marker, (marker,)) for marker in self.thoughts)
            thoughts = Thoughts(start=start, end=end, open=thinking == "open")
        try:
            found = grammar(request.answer_format, tools, thoughts, markers=self.markers)
        except RecursionError as exc:
            # From a notebook: what comes over HTTP is not nested so deeply.
            raise InvalidRequestError("a schema is nested too deeply to be read; flatten it") from exc
        if found is not None and self.headed:
            raise InvalidRequestError(
                "answers of this model have headers, around which nothing can be enforced: leave out response_format, "
                "and let tool_choice be auto",
                param="response_format" if request.answer_format is not None else "tool_choice",
            )
        if found is not None and request.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos is for answers of any form; leave it out, or response_format and tools", param="ignore_eos"
            )
        return found

    def thinking(self, tail: str) -> Thinking:
        """
        Args:
            tail: The end of the prompt, special tokens shown.
        """
        if self.thoughts is None:
            return "closed"
        start, end = self.thoughts
        tail = tail.rstrip()
        return "open" if tail.endswith(start) else "closed" if tail.endswith(end) else "possible"


def _tools(request: GenerationRequest) -> ToolUse | None:
    return request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None


def dialect_of(tokenizer: Any) -> Dialect:
    """What mlx-lm finds in a tokenizer's vocabulary, template and configuration.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``.
    """
    thoughts = (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None
    transitions = {state: list(ways) for state, ways in tokenizer.response_transitions.items()}
    if tokenizer.structural_markers:
        transitions.setdefault(CONTENT, []).extend((marker, CONTENT) for marker in tokenizer.structural_markers)
    return Dialect(
        thoughts=thoughts,
        end_of_thoughts=tuple(int(token) for token in tokenizer.think_end_tokens or ()),
        takes_tools=tokenizer.has_tool_calling,
        own_calls=_own_calls(tokenizer),
        initial=tokenizer.response_initial_state or CONTENT,
        transitions=transitions,
        literals=_literals(tokenizer),
        markers={marker: _marker(tokenizer, marker) for marker in (*(thoughts or ()), START, END)},
    )


def _own_calls(tokenizer: Any) -> OwnCalls | None:
    parse = tokenizer.tool_parser
    if parse is None or parse.__module__ == GENERIC_PARSER:
        return None
    return OwnCalls(tokenizer.tool_call_start, tokenizer.tool_call_end or "", parse)


def _marker(tokenizer: Any, text: str) -> Marker:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    parts: list[int | str] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token in added:
            parts.append(int(token))
        elif parts and isinstance(parts[-1], int):
            parts.append(tokenizer.decode([token]))
        else:
            # Nothing but text: the same letters may come as other tokens.
            return (text,)
    return tuple(parts)


def _literals(tokenizer: Any) -> dict[int, str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(id_): str(token) for id_, token in added.items() if token.special}
    return {id_: text for id_, text in special.items() if id_ not in tokenizer.eos_token_ids}
