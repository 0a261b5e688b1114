"""How a model writes thoughts and tool calls: read off its tokenizer by mlx-lm, or the generic way for calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lmx_lab.engine.grammar.build import Marker, ReasoningSection, build_grammar
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, ToolUse
from lmx_lab.engine.templates.renderer import TemplateLimitError, render_chat
from lmx_lab.engine.templates.tool_prompt import END, START, template_tools, write_tools_as_text
from lmx_lab.engine.text.channels import CONTENT, REASONING, TOOL, AnswerShape
from lmx_lab.engine.text.tool_calls import CallFormat
from lmx_lab.errors import InvalidRequestError

Thinking = Literal["open", "possible", "closed"]
"""What the end of the prompt says of the thoughts: they have begun, may begin, or are over."""
GENERIC = CallFormat(start=START, end=END)
# The parser of models that write calls as the generic format does, such as Qwen's and Hermes.
GENERIC_PARSER = "mlx_lm.tool_parsers.json_tools"
MISTRAL_PARSER = "mlx_lm.tool_parsers.mistral"
# Thoughts that mlx-lm does not look for: its own are tokens, these are in the template, one token or several.
MORE_THOUGHTS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
TAIL_TOKENS = 32
BETWEEN = "between"
"""A state whose text is not shown."""
# Harmony, the format of gpt-oss: each message has a header with its channel, and a call the name in the header.
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
HARMONY_CALL = ("to=functions.", TOOL)
HARMONY: Mapping[str, Sequence[tuple[str, str]]] = {
    BETWEEN: [
        ("<|channel|>analysis", "analysis"),
        ("<|channel|>commentary", "commentary"),
        ("<|channel|>final", "final"),
        HARMONY_CALL,
    ],
    "analysis": [("<|message|>", REASONING), HARMONY_CALL],
    "commentary": [("<|message|>", CONTENT), HARMONY_CALL],
    "final": [("<|message|>", CONTENT)],
    REASONING: [("<|end|>", BETWEEN)],
    CONTENT: [("<|end|>", BETWEEN)],
    TOOL: [("<|call|>", BETWEEN)],
}


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
    takes_system: bool = True
    """The template has a place for the system's message."""
    own_calls: OwnCalls | None = None
    """As the template writes them; None for the generic way."""
    shown: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """A message as the template takes it."""
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
        thinks = self.thoughts is not None and thinking != "closed"
        if thinks:
            assert self.thoughts is not None
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
            transitions.setdefault(TOOL, [(calls.end, content)] if calls.end else [])
        if not transitions:
            return None
        first = content if self.initial == CONTENT else self.initial
        initial = REASONING if thinking == "open" and self.thoughts is not None else first
        return AnswerShape(
            initial=initial, transitions=transitions, thoughts_first=thinks, calls=calls, literals=self.literals
        )

    def template_input(self, request: GenerationRequest, prompt: ChatPrompt) -> dict[str, Any]:
        """Messages and tools for the model's template.

        Tools, calls and results are written into the messages if the template has no way for them, or the answer none
        that goes with its format.
        """
        given: dict[str, Any] = {}
        if self.thoughts is not None and not {"enable_thinking", "thinking"} & set(prompt.template_options):
            # mlx-lm says no for models whose thoughts it does not know.
            given["enable_thinking"] = True
        unlike = self.own_calls is not None and request.answer_format is not None and prompt.tools is not None
        if unlike or not self.takes_tools:
            return {**given, "messages": write_tools_as_text(prompt.messages, prompt.tools, system=self.takes_system)}
        if prompt.tools is not None:
            given["tools"] = template_tools(prompt.tools)
        return {**given, "messages": [self.shown(message) for message in prompt.messages]}

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
            thoughts = ReasoningSection(start=start, end=end, open=thinking == "open")
        try:
            found = build_grammar(request.answer_format, tools, thoughts, markers=self.markers)
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
    """What mlx-lm finds in a tokenizer's vocabulary, template and configuration, and what it overlooks.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``.

    Raises:
        TemplateLimitError: of the template, which is tried out.
    """
    thoughts = _thoughts(tokenizer)
    # Asked once: the vocabulary is a new dictionary of all tokens at each call.
    harmony = not tokenizer.response_transitions and set(HARMONY_TOKENS) <= tokenizer.get_vocab().keys()
    transitions = {
        state: list(ways) for state, ways in (HARMONY if harmony else tokenizer.response_transitions).items()
    }
    if tokenizer.structural_markers:
        transitions.setdefault(CONTENT, []).extend((marker, CONTENT) for marker in tokenizer.structural_markers)
    return Dialect(
        thoughts=thoughts,
        end_of_thoughts=_tokens(tokenizer, thoughts[1]) if thoughts is not None else (),
        takes_tools=harmony or tokenizer.has_tool_calling,
        takes_system=_takes_system(tokenizer),
        own_calls=HARMONY_CALLS if harmony else _own_calls(tokenizer),
        shown=_without_clashes if harmony else _with_short_ids if _is_mistral(tokenizer) else dict,
        initial=BETWEEN if harmony else tokenizer.response_initial_state or CONTENT,
        transitions=transitions,
        literals=_literals(tokenizer),
        markers={marker: _marker(tokenizer, marker) for marker in (*(thoughts or ()), START, END)},
    )


def _thoughts(tokenizer: Any) -> tuple[str, str] | None:
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end
    template = tokenizer.chat_template
    written = template if isinstance(template, str) else ""
    return next((pair for pair in MORE_THOUGHTS if all(marker in written for marker in pair)), None)


def _takes_system(tokenizer: Any) -> bool:
    def shown(*messages: dict[str, str]) -> str:
        return render_chat(tokenizer, messages, add_generation_prompt=True)

    user = {"role": "user", "content": "?"}
    try:
        shown(user)
    except TemplateLimitError:
        raise
    # Templates raise anything; one that refuses even this says nothing of the system's message.
    except Exception:
        return True
    try:
        return "probe" in shown({"role": "system", "content": "probe"}, user)
    except TemplateLimitError:
        raise
    except Exception:
        return False


def _own_calls(tokenizer: Any) -> OwnCalls | None:
    parse = tokenizer.tool_parser
    if parse is None or parse.__module__ == GENERIC_PARSER:
        return None
    if _is_mistral(tokenizer):
        parse = partial(_mistral_calls, parse)
    return OwnCalls(tokenizer.tool_call_start, tokenizer.tool_call_end or "", parse)


def _is_mistral(tokenizer: Any) -> bool:
    return getattr(tokenizer.tool_parser, "__module__", "") == MISTRAL_PARSER


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """With ids of nine letters and digits, whoever gave them: Mistral's templates refuse others."""
    shown = dict(message)
    if "tool_calls" in shown:
        shown["tool_calls"] = [{**call, "id": _short(call["id"])} for call in shown["tool_calls"]]
    if "tool_call_id" in shown:
        shown["tool_call_id"] = _short(shown["tool_call_id"])
    return shown


def _short(id_: str) -> str:
    return id_ if re.fullmatch("[A-Za-z0-9]{9}", id_) else hashlib.blake2b(id_.encode(), digest_size=5).hexdigest()[:9]


def _mistral_calls(parse: Callable[[str, Any], Any], text: str, tools: Any) -> Any:
    # Mistral Small 3.2 writes name[CALL_ID]id[ARGS], of which the parser would take the id for the name.
    return parse(re.sub(r"\[CALL_ID\]\s*\w*\s*(?=\[ARGS\])", "", text), tools)


def _harmony_call(text: str, tools: Any) -> Any:
    """``name <|constrain|>json<|message|>{...}``, or with the channel in the place of the constraint."""
    header, _, arguments = text.partition("<|message|>")
    return {"name": re.split(r"[\s<]", header, maxsplit=1)[0], "arguments": json.loads(arguments)}


HARMONY_CALLS = OwnCalls(HARMONY_CALL[0], "<|call|>", _harmony_call)


def _without_clashes(message: Mapping[str, Any]) -> dict[str, Any]:
    # The template of gpt-oss shows either of these before a call, and refuses both.
    clash = bool(message.get("tool_calls")) and bool(message["content"])
    return {name: value for name, value in message.items() if not (clash and name == "reasoning_content")}


def _tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def _marker(tokenizer: Any, text: str) -> Marker:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    parts: list[int | str] = []
    for token in _tokens(tokenizer, text):
        if token in added:
            parts.append(token)
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
