"""The messages of the chat panel: their limits, and their conversion to prompts, to files and from files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmx_lab.errors import InvalidRequestError
from lmx_lab.panels.text import clip
from lmx_lab.sanitize import replace_surrogates

MAX_MESSAGES = 200
"""Maximum number of messages in the transcript."""
MAX_CHARACTERS = 200_000
"""Maximum number of characters in the transcript, including thoughts, and in one answer."""
MAX_FILE_CHARACTERS = 4_000_000
"""Maximum size of a file to load. JSON needs at most 6 characters for each character of a transcript."""
NEXT_STEP = "choose a file that this panel has saved, or a JSON list of chat messages"
TITLES = {"user": "You", "assistant": "Model"}


@dataclass(frozen=True, kw_only=True)
class TranscriptMessage:
    """A message of the transcript, as a view shows it."""

    id: int
    role: str
    text: str
    reasoning: str = ""
    stats: str = ""
    """The cost of the answer and how it ended, for display."""
    error: str = ""

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.text) + len(self.reasoning) + len(self.error)


def to_chat_messages(
    transcript: Sequence[TranscriptMessage], system: str, *, unanswered: TranscriptMessage | None = None
) -> list[dict[str, str]]:
    """Convert a transcript to messages of the chat format, without questions that have no answer.

    Args:
        unanswered: A question to include although it has no answer.
    """
    converted = [{"role": "system", "content": system}] if system.strip() else []
    for message, following in zip(transcript, [*transcript[1:], None], strict=True):
        answered = following is not None and following.role == "assistant" and bool(following.text)
        is_kept = answered or message is unanswered if message.role == "user" else bool(message.text)
        if is_kept:
            converted.append({"role": message.role, "content": message.text})
    return converted


def trim_transcript(transcript: tuple[TranscriptMessage, ...]) -> tuple[TranscriptMessage, ...]:
    """Return the latest messages within the limits of a transcript, starting with a question. The last two are kept,
    regardless of their size."""
    first = 0
    size = sum(message.size for message in transcript)
    while len(transcript) - first > 2 and (
        len(transcript) - first > MAX_MESSAGES or size > MAX_CHARACTERS or transcript[first].role != "user"
    ):
        size -= transcript[first].size
        first += 1
    return transcript[first:]


def messages_before(transcript: tuple[TranscriptMessage, ...], question: object) -> tuple[TranscriptMessage, ...]:
    """Return the messages before the question with this id.

    Raises:
        InvalidRequestError: there is no such question.
    """
    for at, message in enumerate(transcript):
        if message.role == "user" and message.id == question:
            return transcript[:at]
    raise InvalidRequestError(
        f"there is no question {question!r:.40} in this conversation any more; send the text as a new question",
        param="replace",
    )


def to_json(transcript: Sequence[TranscriptMessage], sampling: Mapping[str, Any]) -> str:
    """Return a conversation as JSON, which ``from_json`` reads.

    ``messages`` are messages of the chat format, with ``stats`` and ``error`` of answers in addition.
    """
    settings = dict(sampling)
    system = settings.pop("system", "")
    messages = [{"role": "system", "content": system}] if system.strip() else []
    for message in transcript:
        more = {"reasoning_content": message.reasoning, "stats": message.stats, "error": message.error}
        messages.append(
            {"role": message.role, "content": message.text} | {name: value for name, value in more.items() if value}
        )
    return json.dumps({"sampling": settings, "messages": messages}, ensure_ascii=False, indent=2) + "\n"


def to_markdown(transcript: Sequence[TranscriptMessage], system: str) -> str:
    """Return a conversation as Markdown, with a heading for each message."""
    parts = [f"## System prompt\n\n{system}"] if system.strip() else []
    for message in transcript:
        lines = [f"## {TITLES[message.role]}"]
        lines += ["> " + message.reasoning.strip().replace("\n", "\n> ")] if message.reasoning.strip() else []
        lines += [message.text] if message.text else []
        lines += [f"**{message.error}**"] if message.error else []
        lines += [f"*{message.stats}*"] if message.stats else []
        parts.append("\n\n".join(lines))
    return "\n\n".join(parts) + "\n"


def from_json(text: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Read a conversation from the result of ``to_json``, or from a JSON list of messages of the chat format.

    Returns:
        The fields of a ``TranscriptMessage`` except for ``id`` of each message, and the fields of ``sampling`` that
        the file has, with ``system``.

    Raises:
        InvalidRequestError: the text is not such a conversation.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"the file is not JSON: {exc}; {NEXT_STEP}", param="text") from exc
    sampling = data.get("sampling") if isinstance(data, dict) else None
    messages = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"the file has no list of messages; {NEXT_STEP}", param="text")
    if sampling is not None and not isinstance(sampling, dict):
        raise InvalidRequestError(f"sampling is {sampling!r:.40}; it must be an object", param="text")
    settings = dict(sampling or {})
    converted = [_converted(message, number) for number, message in enumerate(messages)]
    if converted[0]["role"] == "system":
        settings["system"] = converted.pop(0)["text"]
    for number, message in enumerate(converted):
        if message["role"] not in TITLES:
            raise _wrong_message(number, f"role is {message['role']!r:.40}; it must be user or assistant")
    return converted, settings


def _converted(message: object, number: int) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong_message(number, f"it is {message!r:.40}; it must be an object")
    names = {
        "role": "role",
        "content": "text",
        "reasoning_content": "reasoning",
        "stats": "stats",
        "error": "error",
    }
    values = {field: message.get(name, "") for name, field in names.items()}
    for name, field in names.items():
        if not isinstance(values[field], str):
            raise _wrong_message(number, f"{name} is {values[field]!r:.40}; it must be a string")
    return {field: replace_surrogates(value) for field, value in values.items()}


def _wrong_message(number: int, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"message {number} of the file (counted from 0): {clip(problem, 200)}; {NEXT_STEP}", param="text"
    )
