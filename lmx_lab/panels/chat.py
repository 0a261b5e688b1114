"""The chat panel: a transcript, an answer as it is generated, and sampling settings."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import traitlets

from lmx_lab.backend import Backend, FinishedAnswer, RunningAnswer
from lmx_lab.errors import HostingError, InvalidRequestError, QueueFullError, counted
from lmx_lab.panels.panel import Panel, integer_field, number_field, text_field
from lmx_lab.panels.workbench import Workbench
from lmx_lab.sanitize import clip, replace_surrogates
from lmx_lab.values.models import ModelEvent
from lmx_lab.values.outputs import Delta, whole_characters
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.errors import validated

MAX_MESSAGES = 200
"""Maximum number of messages in the transcript."""
MAX_CHARACTERS = 200_000
"""Maximum number of characters in the transcript, including thoughts, and in one answer."""
NEXT_STEP = "choose a file that this panel has saved, or a JSON list of chat messages"
TITLES = {"user": "You", "assistant": "Model"}
MAX_MESSAGE_CHARACTERS = 100_000
"""Maximum number of characters in one message of the user, and in the system prompt."""
SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 1, "max_tokens": 512, "seed": None, "system": ""}


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
    names = {"role": "role", "content": "text", "reasoning_content": "reasoning", "stats": "stats", "error": "error"}
    converted = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong_message(number, f"it is {message!r:.40}; it must be an object")
        for name in names:
            if not isinstance(value := message.get(name, ""), str):
                raise _wrong_message(number, f"{name} is {value!r:.40}; it must be a string")
        converted.append({field: replace_surrogates(message.get(name, "")) for name, field in names.items()})
    if converted[0]["role"] == "system":
        settings["system"] = converted.pop(0)["text"]
    for number, message in enumerate(converted):
        if message["role"] not in TITLES:
            raise _wrong_message(number, f"role is {message['role']!r:.40}; it must be user or assistant")
    return converted, settings


def _wrong_message(number: int, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"message {number} of the file (counted from 0): {clip(problem, 200)}; {NEXT_STEP}", param="text"
    )


class LiveAnswer:
    """An answer that is being generated."""

    def __init__(self, number: int, max_tokens: int) -> None:
        self._number = number
        self._max_tokens = max_tokens
        self._tokens = 0
        self._size = 0
        self.running: RunningAnswer | None = None
        """The generation; None before the request was accepted."""
        self.status = "sent"
        """The state of the request, or the progress of the answer."""
        self.ending = ""
        """Why the answer was stopped, if it was."""
        self.error = ""

    def count(self, delta: Delta) -> None:
        """Count the next piece of the answer."""
        self._tokens += delta.tokens
        self._size += len(delta.text) + len(delta.reasoning)
        # Answers of other processes do not report the number of tokens.
        self.status = counted(self._tokens, "token") if self._tokens else "answering"

    @property
    def has_begun(self) -> bool:
        return self._size > 0

    @property
    def is_too_long(self) -> bool:
        return self._size > MAX_CHARACTERS

    def live(self) -> dict[str, Any]:
        """Return the answer so far, as a view shows it."""
        return asdict(self.message()) | {"status": self.status}

    def message(self) -> TranscriptMessage:
        running, stats = self.running, self.ending
        text, cost = ("", None) if running is None else (running.text, running.finished)
        if cost is not None:
            speed = f"{counted(cost.usage.completion_tokens, 'token')} · {cost.timings.predicted_per_second:.1f} tok/s"
            ending = describe_ending(cost, self._max_tokens)
            stats = " · ".join(filter(None, (cost.model, f"{speed} · first token in {cost.ttft_s:.2f} s", ending)))
        is_complete = cost is not None and cost.finish_reason != "length"
        return TranscriptMessage(
            id=self._number,
            role="assistant",
            text=text if is_complete else whole_characters(text),
            reasoning="" if running is None else running.reasoning,
            stats=stats,
            error=self.error,
        )


class ChatPanel(Panel):
    """A chat with the loaded model. ``history`` is the conversation as messages."""

    SCRIPTS = ("elements.js", "panel.js", "markdown.js", "message.js", "chat.js")
    STYLES = ("panel.css", "message.css", "chat.css")
    IN_REPORT = True

    messages: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """The messages (``TranscriptMessage``) as dicts, oldest first."""
    live = traitlets.Dict().tag(sync=True)
    """The answer that is being generated, with its ``status``; empty if there is none."""
    removed = traitlets.Unicode().tag(sync=True)
    """A sentence that states how many messages were removed, and why; empty if none were."""
    sampling = traitlets.Dict(dict(SAMPLING)).tag(sync=True)

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self._messages: tuple[TranscriptMessage, ...] = ()
        self._count = 0
        self._removed = 0
        self._answer_now: LiveAnswer | None = None
        super().__init__(workbench, **traits)

    @property
    def history(self) -> list[dict[str, str]]:
        """The conversation as messages for ``lab.chat``, starting with the system prompt if there is one.

        Questions without an answer are omitted.
        """
        return to_chat_messages(self._messages, self.shown("sampling")["system"])

    # Requests

    async def do_send(self, fields: Mapping[str, Any]) -> None:
        """Start an answer. It is in ``live`` until it ends, and then in ``messages``.

        ``replace`` is the id of an earlier question that the text replaces; the messages after it are removed.
        """
        text = text_field(fields, "text", limit=MAX_MESSAGE_CHARACTERS)
        sampling = sampling_fields(fields)
        if self._answer_now is not None:
            raise QueueFullError("this panel is generating an answer; stop it, or send the message when it has ended")
        if not self.serves:
            raise HostingError(f"the server is {self.shown('server')['state']}; run the launch cell again")
        replaced = fields.get("replace")
        before = self._messages if replaced is None else messages_before(self._messages, replaced)
        question = TranscriptMessage(id=self._next_id(), role="user", text=text)
        fields = {
            "model": ANY_MODEL,
            "messages": to_chat_messages((*before, question), sampling["system"], unanswered=question),
            **{name: value for name, value in sampling.items() if name != "system" and value is not None},
        }
        request = validated(ChatRequest, fields)
        self._answer_now = LiveAnswer(self._next_id(), sampling["max_tokens"])
        self._set_messages((*before, question), sampling=sampling, live=self._answer_now.live())
        self.run_job(self._generate(self.workbench.backend, request, self._answer_now), self._ended)

    async def do_stop(self, fields: Mapping[str, Any]) -> None:
        """Stop the answer that is being generated, and keep its text so far."""
        self._stop("stopped")

    async def do_clear(self, fields: Mapping[str, Any]) -> None:
        """Remove all messages."""
        self._stop("")
        self._answer_now, self._messages, self._removed = None, (), 0
        self.show(messages=[], live={}, removed="")

    async def do_export(self, fields: Mapping[str, Any]) -> str:
        """Return the conversation as a text in ``format``, ``json`` or ``markdown``."""
        form, sampling = fields.get("format"), self.shown("sampling")
        if form not in ("json", "markdown"):
            raise InvalidRequestError(f"format is {form!r:.40}; it must be json or markdown", param="format")
        if not self._messages:
            raise InvalidRequestError("the conversation has no messages yet; ask a question first")
        return to_json(self._messages, sampling) if form == "json" else to_markdown(self._messages, sampling["system"])

    async def do_load(self, fields: Mapping[str, Any]) -> None:
        """Replace the conversation and its settings by those in ``text``, a result of ``export`` as JSON."""
        # JSON needs at most 6 characters for each character of a transcript.
        loaded, sampling = from_json(text_field(fields, "text", limit=4_000_000))
        settings = sampling_fields(sampling)
        if self._answer_now is not None:
            raise QueueFullError("this panel is generating an answer; stop it, or load the file when it has ended")
        messages = tuple(TranscriptMessage(id=self._next_id(), **message) for message in loaded)
        self._messages, self._removed = (), 0
        self._set_messages(messages, sampling=settings)

    # Called by the workbench

    def model_event(self, event: ModelEvent) -> None:
        answer = self._answer_now
        if answer is not None and event.stage == "load" and not answer.has_begun:
            answer.status = f"loading {event.model}"
            self.show(live=answer.live())

    def backend_changed(self) -> None:
        self._stop("ended: another lab is shown now")

    # The answer

    def _stop(self, ending: str) -> None:
        if self._answer_now is not None and self.task is not None:
            self._answer_now.ending = ending
            self.task.cancel()

    async def _generate(self, backend: Backend, request: ChatRequest, answer: LiveAnswer) -> None:
        running = answer.running = await backend.generate(request)
        step: asyncio.Task[Delta | None] | None = None
        try:
            while True:
                step = asyncio.create_task(running.next())
                # Until the answer has begun, show the status that the server reports, twice a second.
                while not (await asyncio.wait({step}, timeout=None if answer.has_begun else 0.5))[0]:
                    answer.status = running.status
                    self._show_live(answer)
                if (delta := step.result()) is None:
                    break
                answer.count(delta)
                if answer.is_too_long:
                    answer.ending = f"cut off after {MAX_CHARACTERS:,} characters, the limit of this panel"
                    return
                self._show_live(answer)
        finally:
            if step is not None and not step.done():
                step.cancel()
                await asyncio.wait({step})
            # Deleting the stream is not enough, because futures of other loops refer to it.
            running.close()

    def _show_live(self, answer: LiveAnswer) -> None:
        if answer is self._answer_now:
            self.show(live=answer.live())

    def _ended(self, error: str | None) -> None:
        answer, self._answer_now = self._answer_now, None
        if answer is not None:
            answer.error = error or ""
            self._set_messages((*self._messages, answer.message()), live={})
            self.workbench.static_views.mark_changed(ended=True)

    def _next_id(self) -> int:
        self._count += 1
        return self._count

    def _set_messages(self, messages: tuple[TranscriptMessage, ...], **values: Any) -> None:
        """Show these messages, without the oldest ones if they exceed the limits."""
        kept = self._messages = trim_transcript(messages)
        self._removed += len(messages) - len(kept)
        removed = (
            f"older messages were removed, also from the prompt: {self._removed:,}; "
            f"at most {MAX_MESSAGES} messages and {MAX_CHARACTERS:,} characters are kept"
        )
        self.show(messages=[asdict(each) for each in kept], removed=removed if self._removed else "", **values)

    # Saved notebooks

    def snapshot_html(self) -> str:
        answer = self._answer_now
        shown = [*self._messages, *([answer.message()] if answer else [])]
        if not shown:
            return "<div><b>LMX Lab</b>: chat without messages</div>"
        removed = self.shown("removed")
        parts = [f"<div>{html.escape(removed)}</div>"] if removed else []
        for message in shown:
            parts.append(f"<div><b>{TITLES[message.role]}</b></div>")
            if message.reasoning:
                parts.append(f"<details><summary>thoughts</summary>{_preformatted(message.reasoning)}</details>")
            parts += [_preformatted(message.text)] if message.text else []
            parts += [f"<div><b>{html.escape(message.error)}</b></div>"] if message.error else []
            parts += [f"<div><small>{html.escape(message.stats)}</small></div>"] if message.stats else []
        return "".join(parts)


def sampling_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings of a request, with defaults for missing ones.

    Raises:
        InvalidRequestError: a setting is out of range.
    """
    system = fields.get("system") or ""
    return {
        "temperature": number_field(fields, "temperature", low=0, high=2, default=SAMPLING["temperature"]),
        "top_p": number_field(fields, "top_p", low=0, high=1, default=SAMPLING["top_p"]),
        "max_tokens": integer_field(fields, "max_tokens", low=1, high=1_000_000, default=SAMPLING["max_tokens"]),
        # The largest integer that JavaScript represents exactly.
        "seed": integer_field(fields, "seed", low=0, high=2**53 - 1, default=SAMPLING["seed"]),
        "system": text_field(fields, "system", limit=MAX_MESSAGE_CHARACTERS) if system else "",
    }


def describe_ending(cost: FinishedAnswer, max_tokens: int) -> str:
    """Describe why an answer has ended. Empty if the model has ended it."""
    if cost.finish_reason == "stop":
        return ""
    if cost.finish_reason == "length":
        return "cut at max_tokens" if cost.usage.completion_tokens >= max_tokens else "cut: the model's context is full"
    return {"tool_calls": "requests a tool", "cancelled": "stopped"}.get(cost.finish_reason, cost.finish_reason)


def _preformatted(text: str) -> str:
    """Return HTML that displays a text with its line breaks and spaces."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
