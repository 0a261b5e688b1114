"""Convert a request of another format to the chat format: build its messages, and rename the fields in errors.

Errors of a converted request name the fields of the chat format, so they are renamed to those that the client has sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lmx_lab.errors import CallerError, InvalidRequestError
from lmx_lab.sanitize import finite
from lmx_lab.values.outputs import ToolCallDelta
from lmx_lab.wire.base import OtherModel
from lmx_lab.wire.chat import ChatMessage, Contents, Role, TextContent, result_text
from lmx_lab.wire.tools import CALL_LIMIT, CalledFunction, FunctionDefinition, FunctionTool, MessageToolCall

JOINED = "\n\n"
"""Separates the parts of a message, and consecutive messages with the same role."""
FILES: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
"""The kind of a part that is a file, by its type."""
UNREAD_PARTS = frozenset({"thinking", "redacted_thinking", "tool_addition", "tool_removal", "tool_use", "tool_result"})
"""Types of parts that are left out of the text."""


def newest_question(roles: Iterable[str]) -> int:
    """Return the index of the newest message of the user, whose files cannot be replaced by a placeholder.

    Clients that send only text in results of tools send the files of a result in a message of the user after it.

    Returns:
        The index, or -1 if there is no such message or it follows results of tools.
    """
    newest, before = -1, ""
    for number, role in enumerate(roles):
        if role == "user":
            newest = -1 if before == "tool" else number
        if role not in ("system", "developer"):
            before = role
    return newest


def content_texts(content: str | Contents, *, asked_at: str | None = None) -> list[str]:
    """Return the texts of a message, of the result of a tool or of reasoning. See ``part_text``.

    Args:
        asked_at: Path of the content if it is the newest message of the user.
    """
    if isinstance(content, str):
        return [content]
    return [
        part.text
        if isinstance(part, TextContent)
        else part_text(part, asked_at=None if asked_at is None else f"{asked_at}.{number}")
        for number, part in enumerate(content)
    ]


def part_text(part: OtherModel, *, asked_at: str | None = None) -> str:
    """Return the text that the model reads in place of a part that is not a text: its own text, or a placeholder.

    A conversation remains usable if one of its tools returns an image, or if an image was sent to another model.

    Args:
        asked_at: Path of the part if it belongs to the newest message of the user.

    Raises:
        InvalidRequestError: the part belongs to the newest message of the user, whose answer could depend on it.
    """
    fields = part.model_extra or {}
    source, refusal = fields.get("source"), fields.get("refusal")
    if part.type in UNREAD_PARTS:
        return ""
    if isinstance(refusal, str):
        return refusal
    if isinstance(source, dict) and source.get("type") == "text":
        return str(source.get("data") or "")
    if part.type == "search_result":
        return plain_text(fields.get("content"))
    kind = FILES.get(part.type)
    if asked_at is not None:
        what = "images and other files" if kind else f"parts of the type {part.type!r:.80}"
        raise InvalidRequestError(f"{asked_at}: {what} cannot be read by this server; send text", param=asked_at)
    return placeholder(kind or part.type[:80])


def plain_text(content: Any) -> str:
    """Return the text of content that was not validated: a text, parts, or data that is written as JSON."""
    given = result_text(content)
    if not isinstance(given, list):
        return "" if given is None else str(given)
    texts = [each.get("text") if isinstance(each, dict) else None for each in given]
    kinds = [FILES.get(kind := str(each.get("type"))[:80], kind) for each in given]
    return JOINED.join(
        text if isinstance(text, str) else placeholder(kind) for text, kind in zip(texts, kinds, strict=True)
    )


def placeholder(what: str) -> str:
    """Return the text that stands for something that the model cannot read."""
    return f"[{what}, not shown to this model]"


@dataclass(kw_only=True)
class _Message:
    role: Role
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[MessageToolCall] = field(default_factory=list)
    answered: str | None = None
    """Id of the call whose result this is."""

    def converted(self) -> ChatMessage:
        """Return the message of the chat format. It is not validated again, because all of its parts are valid."""
        others: dict[str, Any] = {
            "tool_call_id": self.answered,
            "reasoning_content": JOINED.join(self.thoughts),
            "tool_calls": self.calls,
        }
        present = {name: value for name, value in others.items() if value}
        content = JOINED.join([text for text in self.texts if text])
        return ChatMessage.model_construct(role=self.role, content=content, **present)


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None = None
) -> FunctionTool:
    """Return a tool of the chat format. It is not validated again, because all of its parts are valid."""
    definition = FunctionDefinition.model_construct(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return FunctionTool.model_construct(type="function", function=definition)


def call_arguments(call: ToolCallDelta) -> Any:
    """Return the arguments of a call in an answer as a JSON value; an empty object if the answer was cut off."""
    try:
        # A number such as 1e999 is read as infinity.
        return finite(json.loads(call.arguments or "{}"))
    except ValueError:
        return {}


class ChatHistory:
    """Messages of a chat request. Consecutive messages with the same role are joined."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._calls = 0

    def add(self, role: Role, texts: Sequence[str] = (), *, thoughts: Iterable[str] = ()) -> None:
        """Add a message, or a part of the last one if it has the same role."""
        message = self._last(role)
        message.texts += texts
        message.thoughts += thoughts

    def add_call(self, call_id: str | None, name: str, arguments: Any, *, place: str) -> None:
        """Add a tool call of the assistant.

        Args:
            place: Path of the call in the request, for errors.

        Raises:
            InvalidRequestError: there are too many calls.
        """
        self._calls += 1
        if self._calls > CALL_LIMIT:
            raise InvalidRequestError(
                f"{place}: the conversation has more than {CALL_LIMIT:,} tool calls, the limit; leave the oldest out",
                param=place,
            )
        function = CalledFunction.model_construct(name=name, arguments=arguments)
        call = MessageToolCall.model_construct(id=call_id, type="function", function=function)
        self._last("assistant").calls.append(call)

    def add_result(self, call_id: str | None, texts: list[str]) -> None:
        """Add the result of a tool call."""
        self._messages.append(_Message(role="tool", texts=texts, answered=call_id))

    def messages(self) -> list[ChatMessage]:
        """Return the messages in the chat format."""
        return [message.converted() for message in self._messages]

    def _last(self, role: Role) -> _Message:
        if not self._messages or self._messages[-1].role != role:
            self._messages.append(_Message(role=role))
        return self._messages[-1]


# Names of fields in errors


class FieldNames:
    """Maps the fields of the chat format to those of another format.

    Args:
        names: Maps the path of a field in the chat format to its path in the other format. ``*`` stands for an index. A
            path that is a prefix of another one must come after it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._rules = [
            (
                re.compile(rf"(?<![\w.]){re.escape(name).replace(re.escape('*'), r'([0-9]+)')}(?!\w)"),
                path.replace("*", r"\1"),
                # Names without these characters are also English words.
                any(sign in name for sign in "_."),
            )
            for name, path in names.items()
        ]

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the fields in errors that the block raises about the request."""
        try:
            yield
        except CallerError as exc:
            if exc.param is not None:
                exc.param = self.renamed(exc.param)
            exc.message = self.renamed(exc.message)
            exc.args = (exc.message,)
            raise

    def renamed(self, text: str) -> str:
        """Return the path of a field, or a message that begins with one, in the other format."""
        # The rest of the message quotes the request.
        head, quote, rest = text.partition(" (given: ")
        for pattern, path, is_distinct in self._rules:
            if is_distinct:
                head = pattern.sub(path, head)
            elif (found := pattern.match(head)) is not None and head[found.end() :][:1] in ("", ":", "."):
                head = found.expand(path) + head[found.end() :]
        return head + quote + rest
