"""Detect how a model writes reasoning and tool calls, and derive what an answer to a request may contain.

mlx-lm reads most of it from the tokenizer of a folder, and ``llama_cpp.tokenizer`` from a GGUF file. Models without a
known format for calls get the generic one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from lmx_lab.engine.grammar.build import Marker, ReasoningSection, build_grammar
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, ToolUse
from lmx_lab.engine.sandbox import shared_pool
from lmx_lab.engine.text.channels import CONTENT, REASONING, TOOL, ChannelFormat
from lmx_lab.engine.text.tool_calls import CallFormat
from lmx_lab.engine.text.tool_prompt import (
    END,
    START,
    alternate,
    template_tools,
    write_tools_as_text,
    write_unmatched_results,
)
from lmx_lab.engine.text.written_calls import CallMarkers, CallMemory, MarkedChat
from lmx_lab.engine.tokenizing.templates import (
    ANSWER,
    CALL,
    CALLING,
    RESULT,
    TOOLS,
    USER,
    TemplateLimitError,
    render_chat,
)
from lmx_lab.errors import InvalidRequestError

ReasoningState = Literal["open", "possible", "closed"]
"""State of the reasoning at the end of the prompt: it has begun, it may begin, or it has ended."""
GENERIC = CallFormat(start=START, end=END)
# Markers that mlx-lm does not detect. It looks for tokens; these are in the template, as one token or several.
MORE_REASONING_MARKERS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
CONTINUED = "[[continued]]"
"""Follows the text of a message that the answer continues. What a template writes after it is dropped."""
PARSED_NAMES = {"function_gemma": r"\w+", "gemma4": r"[\w-]+", "mistral": r"[\w-]+", "pythonic": r"[\w.]+"}
"""Names of tools that mlx-lm's parsers read, by the parser; the others read all names."""
TAIL_TOKENS = 32
"""Number of tokens at the end of the prompt that are searched for a marker of the reasoning."""
BETWEEN = "between"
"""A state whose text is dropped."""
# Harmony is the format of gpt-oss: each message has a header with its channel; a call has its name in the header.
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
class OwnCallFormat:
    """A format for calls that is not the generic one."""

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    """Parses the text between the markers; the second argument is the list of tools."""
    names: str = ".+"
    """A regular expression for the names of tools that the parser reads."""
    header: str = ""
    """The text that the model writes before the start marker. The template writes a space in its place."""

    def written_name(self, name: str) -> str:
        """Return the name of a tool as the model reads and writes it."""
        return name if re.fullmatch(self.names, name) else re.sub(r"\W", "_", name)

    def read(self, text: str, tools: ToolUse) -> Any:
        """Parse the text between the markers, and return calls with the names of the tools."""
        parsed = self.parse(text, template_tools(self.with_written_names(tools)))
        names = {self.written_name(tool.name): tool.name for tool in reversed(tools.tools)}
        calls = parsed if isinstance(parsed, list) else [parsed]
        return [{**call, "name": names.get(call["name"], call["name"])} for call in calls]

    def with_written_names(self, tools: ToolUse) -> ToolUse:
        """Return the tools as the model reads them."""
        return replace(tools, tools=tuple(replace(tool, name=self.written_name(tool.name)) for tool in tools.tools))

    def with_written_calls(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of a history whose calls, or whose name if it is a result, are as the model reads them."""
        written = dict(message)
        if "tool_calls" in written:
            written["tool_calls"] = [
                {**call, "function": {**call["function"], "name": self.written_name(call["function"]["name"])}}
                for call in written["tool_calls"]
            ]
        if written["role"] == "tool" and "name" in written:
            written["name"] = self.written_name(written["name"])
        return written


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How one model writes reasoning and tool calls, and what its chat template supports."""

    reasoning_markers: tuple[str, str] | None = None
    """Start and end marker of the reasoning."""
    reasoning_end: tuple[int, ...] = ()
    """Tokens of the end marker."""
    supports_tools: bool = False
    """Whether the template writes tools, calls and results itself."""
    supports_system: bool = True
    """Whether the template accepts a system message."""
    supports_notes: bool = True
    """Whether the template writes system messages after the first message."""
    supports_unmatched_results: bool = True
    """Whether the template writes results of tools without a call."""
    own_calls: OwnCallFormat | None = None
    """The format of calls that the template writes; None for the generic one."""
    convert_message: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Converts a message to the form that the template accepts."""
    initial: str = CONTENT
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """The state machine of answers with headers around reasoning and content; see ``ChannelFormat``."""
    literals: Mapping[int, str] = field(default_factory=dict)
    """Special tokens, except those that end an answer."""
    markers: Mapping[str, Marker] = field(default_factory=dict)
    """The markers of reasoning and of generic calls as tokens of this model."""
    message_ends: Sequence[str] = ()
    """The texts of the tokens that end an answer."""
    written: CallMemory = field(default_factory=CallMemory, compare=False, repr=False)
    """How the model wrote calls of earlier answers."""
    warning: str = ""
    """Why the template could not be tried; empty if it could."""

    @property
    def marker_tokens(self) -> set[int]:
        """Special tokens that are a marker or a part of one."""
        return {part for marker in self.markers.values() for part in marker if isinstance(part, int)}

    @property
    def has_headers(self) -> bool:
        """Whether answers have headers, which our grammars do not support."""
        return bool(self.transitions)

    def call_format(self, request: GenerationRequest) -> CallFormat | None:
        """Return how calls are written in the answer to this request; None if it cannot contain calls.

        Calls that a grammar enforces are written in the generic format, by any model.
        """
        tools = request.tools
        if tools is None:
            return None
        own = self.own_calls
        # With a requested format, an object is the answer and not a call.
        unmarked = tools if not tools.forced and request.answer_format is None else None
        if own is None or tools.forced or request.answer_format is not None:
            # A small model that is forced to call would repeat its call up to the maximum length.
            return replace(GENERIC, may_repeat=not tools.forced, unmarked=unmarked)
        return CallFormat(start=own.start, end=own.end, parse=lambda text: own.read(text, tools), unmarked=unmarked)

    def channel_format(self, request: GenerationRequest, state: ReasoningState) -> ChannelFormat | None:
        """Return how the answer divides into channels; None if all of it is content."""
        if not isinstance(request.prompt, ChatPrompt):
            return None
        calls, tools = self.call_format(request), request.tools
        reasons = self.reasoning_markers is not None and state != "closed"
        if not (self.transitions or reasons or calls):
            return None
        # Between forced calls, an answer that was cut off may contain half a marker, which should not be visible.
        content = BETWEEN if tools is not None and tools.forced else CONTENT
        transitions: dict[str, list[tuple[str, str]]] = {before: list(to) for before, to in self.transitions.items()}
        if reasons:
            assert self.reasoning_markers is not None
            start, end = self.reasoning_markers
            transitions.setdefault(content, []).append((start, REASONING))
            transitions.setdefault(REASONING, []).append((end, content))
        if calls is not None:
            # In answers with headers, a header may already mark the beginning of calls.
            if not any(to == TOOL for leaving in transitions.values() for _, to in leaving):
                transitions.setdefault(content, []).append((calls.start, TOOL))
                if calls.parse is not None and REASONING in transitions:
                    # Some models begin a call without ending their reasoning.
                    transitions[REASONING].append((calls.start, TOOL))
            transitions.setdefault(TOOL, [(calls.end, content)] if calls.end else [])
        first = content if self.initial == CONTENT else self.initial
        initial = REASONING if state == "open" and self.reasoning_markers is not None else first
        # A call that was forced is not in the format of the template, which a history should not mix with another one.
        is_own = calls is not None and (self.own_calls is None or calls.parse is not None)
        header = "" if self.own_calls is None else self.own_calls.header
        return ChannelFormat(
            initial=initial,
            transitions=transitions,
            reasoning_first=reasons,
            calls=calls,
            remember=partial(self.written.add, request.caller.scope, header) if is_own else None,
            literals=self.literals,
        )

    def template_input(self, request: GenerationRequest, prompt: ChatPrompt, *, strict: bool = False) -> dict[str, Any]:
        """Return messages and tools for the model's template.

        Tools, calls and results are written into the messages as text if the template does not support them, or if the
        answer uses another format for calls than the template. A system message that it does not support becomes a part
        of the user's message after it. If the answer continues the last message, ``CONTINUED`` follows its text.

        Args:
            strict: Whether to write the messages as the strictest templates require it; see ``alternate``.
        """
        given: dict[str, Any] = {}
        if self.reasoning_markers is not None and not {"enable_thinking", "thinking"} & set(prompt.template_options):
            # mlx-lm passes False for models whose reasoning it does not detect.
            given["enable_thinking"] = True
        messages: Sequence[Mapping[str, Any]] = prompt.messages
        if prompt.continues:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{CONTINUED}"}]
        differs = self.own_calls is not None and request.answer_format is not None and prompt.tools is not None
        if differs or not self.supports_tools:
            messages = write_tools_as_text(messages, prompt.tools, system=self.supports_system)
        else:
            own = self.own_calls
            if strict or not self.supports_unmatched_results:
                messages = write_unmatched_results(messages)
            messages = messages if own is None else [own.with_written_calls(message) for message in messages]
            if prompt.tools is not None:
                given["tools"] = template_tools(prompt.tools if own is None else own.with_written_names(prompt.tools))
        has_notes = any(message["role"] == "system" for message in messages[1:])
        if strict or not self.supports_system or (has_notes and not self.supports_notes):
            messages = alternate(messages, system=self.supports_system)
        return {**given, "messages": [self.convert_message(message) for message in messages]}

    def mark_calls(
        self, request: GenerationRequest, chat: ChatPrompt, *, without: Collection[int]
    ) -> MarkedChat | None:
        """Return the chat with marks in the calls of which it is known how the model wrote them; None if there are
        none. Takes long for long arguments.

        Args:
            without: The indices of messages that are not marked.
        """
        if self.own_calls is not None and request.answer_format is not None:
            return None
        scope = request.caller.scope
        found = {at: self.written.find(scope, each) for at, each in enumerate(chat.messages) if at not in without}
        written = {at: calls for at, calls in found.items() if calls is not None}
        return MarkedChat(chat.messages, written) if written else None

    @property
    def call_markers(self) -> CallMarkers:
        """What the template writes around calls."""
        own = self.own_calls
        start = START if own is None else f" {own.start}" if own.header else own.start
        return CallMarkers(start=start, end=END if own is None else own.end, message_ends=self.message_ends)

    def grammar(self, request: GenerationRequest, state: ReasoningState) -> str | None:
        """Return the llguidance grammar of the answer; None if any answer is allowed.

        Raises:
            InvalidRequestError: the requested format cannot be enforced for this model or with these parameters.
        """
        calls = self.call_format(request)
        tools = request.tools if calls is not None and calls.parse is None else None
        if request.answer_format is None and tools is None:
            return None
        reasoning = None
        if self.reasoning_markers is not None and state != "closed" and isinstance(request.prompt, ChatPrompt):
            start, end = (self.markers.get(marker, (marker,)) for marker in self.reasoning_markers)
            reasoning = ReasoningSection(start=start, end=end, open=state == "open")
        try:
            grammar = build_grammar(request.answer_format, tools, reasoning, markers=self.markers)
        except RecursionError as exc:
            # Possible only from a notebook: the depth of JSON over HTTP is limited.
            raise InvalidRequestError("a schema is nested too deeply to be read; flatten it") from exc
        if self.has_headers:
            raise InvalidRequestError(
                "answers of this model have headers, and no format can be enforced around them: leave out "
                "response_format, and set tool_choice to auto",
                param="response_format" if request.answer_format is not None else "tool_choice",
            )
        if request.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos cannot be combined with response_format or enforced tool calls; leave one of them out",
                param="ignore_eos",
            )
        return grammar

    def state_within(self, text: str) -> ReasoningState:
        """Return the state of the reasoning after a part of an answer that is continued."""
        if self.reasoning_markers is None:
            return "closed"
        start, end = (text.rfind(marker) for marker in self.reasoning_markers)
        return "open" if start > end else "closed"

    def reasoning_state(self, tail: str) -> ReasoningState:
        """Read the state of the reasoning from the end of a prompt.

        Args:
            tail: The end of the prompt as text, including special tokens.
        """
        if self.reasoning_markers is None:
            return "closed"
        start, end = self.reasoning_markers
        tail = tail.rstrip()
        return "open" if tail.endswith(start) else "closed" if tail.endswith(end) else "possible"


def detect_chat_format(tokenizer: Any) -> ChatFormat:
    """Detect the chat format from the vocabulary, the template and the configuration of a tokenizer. Blocks.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``, or an object with the same attributes.

    Raises:
        TemplateLimitError: the template, which is rendered as a test, exceeded a limit.
    """
    reasoning_markers: tuple[str, str] | None
    if tokenizer.has_thinking:
        reasoning_markers = tokenizer.think_start, tokenizer.think_end
    else:
        template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        # The prompt may open the reasoning, so the closing marker need not be in the template.
        reasoning_markers = next((pair for pair in MORE_REASONING_MARKERS if pair[0] in template), None)
    # Called once: each call of get_vocab builds a new dictionary of all tokens.
    is_harmony = not tokenizer.response_transitions and set(HARMONY_TOKENS) <= tokenizer.get_vocab().keys()
    transitions = {
        state: list(leaving) for state, leaving in (HARMONY if is_harmony else tokenizer.response_transitions).items()
    }
    if tokenizer.structural_markers:
        transitions.setdefault(CONTENT, []).extend((marker, CONTENT) for marker in tokenizer.structural_markers)
    parse = tokenizer.tool_parser
    parser = getattr(parse, "__module__", "").rpartition(".")[2]
    is_mistral = parser == "mistral"
    if is_harmony:
        own_calls: OwnCallFormat | None = HARMONY_CALLS
    # The parser of models whose call format is the generic one, such as Qwen and Hermes.
    elif parse is None or parser == "json_tools":
        own_calls = None
    else:
        parse = partial(_parse_mistral_calls, parse) if is_mistral else parse
        names = PARSED_NAMES.get(parser, ".+")
        own_calls = OwnCallFormat(tokenizer.tool_call_start, tokenizer.tool_call_end or "", parse, names)
    convert_message: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    # The template of K2 Horizon refuses answers without reasoning, even an empty one.
    answers = (ANSWER, {**ANSWER, "reasoning_content": ""})
    if is_harmony:
        convert_message = _without_clashes
    elif is_mistral:
        convert_message = partial(_for_mistral, has_parts="block['thinking']" in str(tokenizer.chat_template))
    elif [_render(tokenizer, USER, answer, USER) is None for answer in answers] == [True, False]:
        convert_message = _with_reasoning
    ended = tokenizer.encode(reasoning_markers[1], add_special_tokens=False) if reasoning_markers is not None else ()
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    warning = ""
    try:
        shared_pool().portal.run(render_chat(tokenizer, [USER], add_generation_prompt=True))
    except TemplateLimitError:
        raise
    except Exception as exc:
        warning = (
            "the chat template could not be tried with a single message, so tools and reasoning may not be recognized: "
            f"{exc!s:.300}"
        )
    return ChatFormat(
        reasoning_markers=reasoning_markers,
        reasoning_end=tuple(map(int, ended)),
        supports_tools=is_harmony or tokenizer.has_tool_calling or _writes_generic_calls(tokenizer),
        supports_system=_supports_system(tokenizer),
        supports_notes=_supports_system(tokenizer, after=(USER, ANSWER)),
        supports_unmatched_results=RESULT["content"] in (_render(tokenizer, USER, RESULT, USER) or ""),
        own_calls=own_calls,
        convert_message=convert_message,
        initial=BETWEEN if is_harmony else tokenizer.response_initial_state or CONTENT,
        transitions=transitions,
        literals={
            int(id_): str(token)
            for id_, token in added.items()
            if token.special and int(id_) not in tokenizer.eos_token_ids
        },
        message_ends=[str(token) for id_, token in added.items() if int(id_) in tokenizer.eos_token_ids],
        markers={marker: _marker(marker, added) for marker in (*(reasoning_markers or ()), START, END)},
        warning=warning,
    )


def _render(tokenizer: Any, *messages: Mapping[str, Any], **options: Any) -> str | None:
    """Return the text of a chat; None if the template refuses it.

    Raises:
        TemplateLimitError: the template exceeded a limit.
    """
    try:
        return shared_pool().portal.run(render_chat(tokenizer, messages, add_generation_prompt=True, **options))
    except TemplateLimitError:
        raise
    # Templates raise any exception.
    except Exception:
        return None


def _supports_system(tokenizer: Any, *, after: Sequence[Mapping[str, Any]] = ()) -> bool:
    user = {"role": "user", "content": "?"}
    # A template that rejects even these messages without a system message gives no information.
    if _render(tokenizer, *after, user) is None:
        return True
    return "probe" in (_render(tokenizer, *after, {"role": "system", "content": "probe"}, user) or "")


def _writes_generic_calls(tokenizer: Any) -> bool:
    """Return whether the template describes tools, and writes calls in the generic format and their results."""
    call, calling = CALL["function"], {**CALLING, "content": ""}
    described, called = (_render(tokenizer, *chat, tools=TOOLS) or "" for chat in ((USER,), (USER, calling, RESULT)))
    if call["name"] not in described or RESULT["content"] not in called:
        return False
    for section in called.split(START)[1:]:
        with contextlib.suppress(ValueError):
            if json.loads(section.partition(END)[0]) == call:
                return True
    return False


def _for_mistral(message: Mapping[str, Any], *, has_parts: bool) -> dict[str, Any]:
    """Replace call ids by ids of nine letters and digits; Mistral's templates reject all others.

    Args:
        has_parts: Whether the template reads the reasoning of an answer from parts of its content.
    """
    converted = dict(message)
    if has_parts and (reasoning := converted.pop("reasoning_content", None)):
        texts = ("thinking", reasoning), ("text", converted["content"])
        converted["content"] = [{"type": kind, kind: text} for kind, text in texts if text]
    if "tool_calls" in converted:
        converted["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in converted["tool_calls"]]
    if "tool_call_id" in converted:
        converted["tool_call_id"] = _short_id(converted["tool_call_id"])
    return converted


def _short_id(id_: str) -> str:
    return id_ if re.fullmatch("[A-Za-z0-9]{9}", id_) else hashlib.blake2b(id_.encode(), digest_size=5).hexdigest()[:9]


def _parse_mistral_calls(parse: Callable[[str, Any], Any], text: str, tools: Any) -> Any:
    # Mistral Small 3.2 writes name[CALL_ID]id[ARGS]; the parser would take the id for the name.
    return parse(re.sub(r"\[CALL_ID\]\s*\w*\s*(?=\[ARGS\])", "", text), tools)


def _parse_harmony_call(text: str, tools: Any) -> Any:
    """Parse ``name <|constrain|>json<|message|>{...}``; the channel may be there instead of the constraint."""
    header, _, arguments = text.partition("<|message|>")
    return {"name": re.split(r"[\s<]", header, maxsplit=1)[0], "arguments": json.loads(arguments)}


HARMONY_CALLS = OwnCallFormat(HARMONY_CALL[0], "<|call|>", _parse_harmony_call, header="<|channel|>commentary")


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**({"reasoning_content": ""} if message["role"] == "assistant" else {}), **message}


def _without_clashes(message: Mapping[str, Any]) -> dict[str, Any]:
    # Before a call, the template of gpt-oss shows either content or reasoning, and rejects messages with both.
    clash = bool(message.get("tool_calls")) and bool(message["content"])
    return {name: value for name, value in message.items() if not (clash and name == "reasoning_content")}


def _marker(text: str, added: Mapping[int, Any]) -> Marker:
    """Return a marker as added tokens, and the texts after them."""
    ids = {str(token): int(id_) for id_, token in added.items() if str(token) in text}
    longest_first = sorted(ids, key=len, reverse=True)
    parts = [part for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if part] if ids else []
    if not parts or parts[0] not in ids:
        # It begins with ordinary text, which the model can also write with other tokens.
        return (text,)
    return tuple(ids.get(part, part) for part in parts)
