"""The chat panel: a transcript, an answer as it is generated, and the knobs of sampling."""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import traitlets

from lmx_lab.backend import ChatPiece, ChatStats, Source
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, QueueFullError
from lmx_lab.panels.panel import Panel, number_field, text_field
from lmx_lab.panels.workbench import Workbench
from lmx_lab.wire.admin import ModelEvent

log = logging.getLogger(__name__)
MOST_TURNS = 200
MOST_CHARACTERS = 200_000
"""Of the transcript, thoughts included, and of one answer."""
MOST_TEXT = 100_000
"""Characters of one message, and of the system prompt."""
SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 1, "max_tokens": 512, "seed": None, "system": ""}
LARGEST_SEED = 2**53 - 1
"""The largest whole number that JavaScript can count to."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message of the transcript, as a view shows it."""

    id: int
    role: str
    text: str
    reasoning: str = ""
    stats: str = ""
    """What the answer has cost and how it ended, in words."""
    error: str = ""

    @property
    def size(self) -> int:
        return len(self.text) + len(self.reasoning) + len(self.error)


class Answer:
    """An answer that is being generated."""

    def __init__(self, number: int, max_tokens: int) -> None:
        self._number = number
        self._max_tokens = max_tokens
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._remark = "sent"
        self._tokens = 0
        self._size = 0
        self.stats: ChatStats | None = None
        self.ending = ""
        """Why it was left early, if it was."""
        self.error = ""

    def take(self, piece: ChatPiece) -> None:
        self._text.append(piece.text)
        self._reasoning.append(piece.reasoning)
        self._tokens += piece.tokens
        self._size += len(piece.text) + len(piece.reasoning)
        self._remark = piece.remark or f"{self._tokens} tokens"
        self.stats = piece.stats

    def wait_for(self, model: str) -> None:
        """A model is being loaded; an answer that has begun does not wait for one."""
        if not self._size:
            self._remark = f"loading {model}"

    @property
    def is_too_long(self) -> bool:
        return self._size > MOST_CHARACTERS

    def live(self) -> dict[str, Any]:
        return asdict(self.turn()) | {"remark": self._remark}

    def turn(self) -> Turn:
        return Turn(
            id=self._number,
            role="assistant",
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            stats=self._words(),
            error=self.error,
        )

    def _words(self) -> str:
        if self.stats is None:
            return self.ending
        it = self.stats
        cost = f"{it.output_tokens} tokens · {it.tokens_per_second:.1f} tokens/s · first after {it.ttft_ms / 1e3:.2f} s"
        return " · ".join(filter(None, (it.model, cost, end_in_words(it, self._max_tokens))))


class ChatPanel(Panel):
    """Talk to the model that is loaded. ``history`` has what was said, as messages."""

    SCRIPTS = ("panel.js", "keyed.js", "chat.js")
    STYLES = ("panel.css", "chat.css")
    REQUESTS: ClassVar[frozenset[str]] = frozenset({"send", "stop", "clear"})

    turns: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """``Turn`` as dicts, the oldest first."""
    live = traitlets.Dict().tag(sync=True)
    """The answer so far, with a remark on its state; empty while there is none."""
    forgotten = traitlets.Unicode().tag(sync=True)
    """What has happened to older turns."""
    sampling = traitlets.Dict(dict(SAMPLING)).tag(sync=True)

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self._turns: tuple[Turn, ...] = ()
        self._count = 0
        self._dropped = 0
        self._current: Answer | None = None
        self._task: asyncio.Task[None] | None = None
        super().__init__(workbench, **traits)

    @property
    def history(self) -> list[dict[str, str]]:
        """What was said, as messages for ``lab.chat``: the system prompt first, if there is one.

        Questions that got no answer at all are not in it.
        """
        return messages(self._turns, self.shown("sampling")["system"])

    # Requests

    async def do_send(self, fields: Mapping[str, Any]) -> None:
        """Begin an answer; it comes in ``live``, and when it has ended in ``turns``."""
        text = text_field(fields, "text", most=MOST_TEXT)
        sampling = sampling_fields(fields)
        if self._current is not None:
            raise QueueFullError("an answer is being written in this panel; stop it, or send this when it has ended")
        if self.shown("server")["state"] not in ("running", "lagging"):
            raise HostingError(f"the server is {self.shown('server')['state']}; run the launch cell again")
        question = Turn(id=self._next_id(), role="user", text=text)
        request = {name: value for name, value in sampling.items() if name != "system" and value is not None}
        request["messages"] = messages((*self._turns, question), sampling["system"], unanswered=question)
        self._current = Answer(self._next_id(), sampling["max_tokens"])
        self._keep(question, sampling=sampling, live=self._current.live())
        self._task = asyncio.create_task(self._generate(self.workbench.source, request, self._current), name="chat")
        self._task.add_done_callback(self._ended)

    async def do_stop(self, fields: Mapping[str, Any]) -> None:
        """End the answer that is being written; what there is of it stays."""
        self._leave("stopped")

    async def do_clear(self, fields: Mapping[str, Any]) -> None:
        """Forget everything that was said."""
        self._leave("")
        self._current, self._turns, self._dropped = None, (), 0
        self.show(turns=[], live={}, forgotten="")

    def model_event(self, event: ModelEvent) -> None:
        if self._current is not None and event.stage == "load":
            self._current.wait_for(event.model)
            self.show(live=self._current.live())

    def changed_source(self) -> None:
        self._leave("ended: another lab is shown now")

    def close(self) -> None:
        task = self._task
        if task is not None and not task.done():
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the generation has ended
                task.get_loop().call_soon_threadsafe(task.cancel)
        super().close()

    # The answer

    def _leave(self, ending: str) -> None:
        if self._current is not None and self._task is not None:
            self._current.ending = ending
            self._task.cancel()

    async def _generate(self, source: Source, request: Mapping[str, Any], answer: Answer) -> None:
        try:
            async with aclosing(source.chat(request)) as pieces:
                async for piece in pieces:
                    answer.take(piece)
                    if answer.is_too_long:
                        answer.ending = f"cut at {MOST_CHARACTERS:,} characters, the most that this panel keeps"
                        return
                    if answer is self._current:
                        self.show(live=answer.live())
        except LabError as exc:
            answer.error = exc.message

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Here, because a task that was cancelled before its first step has run no line of its own.
        answer = self._current
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a panel's generation failed", exc_info=error)
            if answer is not None:
                answer.error = "a bug in the panel; the kernel's log has the details"
        if answer is not None and task is self._task:
            self._current = self._task = None
            self._keep(answer.turn(), live={})

    def _next_id(self) -> int:
        self._count += 1
        return self._count

    def _keep(self, turn: Turn, **values: Any) -> None:
        kept = within_bounds((*self._turns, turn))
        self._dropped += len(self._turns) + 1 - len(kept)
        self._turns = kept
        if self._dropped:
            values["forgotten"] = (
                f"{self._dropped} older turns are no longer here, nor in the prompt: "
                f"{MOST_TURNS} turns and {MOST_CHARACTERS:,} characters are kept"
            )
        self.show(turns=[asdict(each) for each in kept], **values)

    # Without a kernel

    def snapshot_html(self) -> str:
        answer = self._current
        turns = [*self._turns, *([answer.turn()] if answer else [])]
        if not turns:
            return "<div><b>LMX Lab</b>: chat, nothing was said yet</div>"
        forgotten = self.shown("forgotten")
        return (f"<div>{html.escape(forgotten)}</div>" if forgotten else "") + "".join(map(_turn_html, turns))


def sampling_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a request, each with its default where it is left out.

    Raises:
        InvalidRequestError: one of them is outside of its bounds.
    """
    system = fields.get("system") or ""
    return {
        "temperature": number_field(fields, "temperature", low=0, high=2, default=SAMPLING["temperature"]),
        "top_p": number_field(fields, "top_p", low=0, high=1, default=SAMPLING["top_p"]),
        "max_tokens": _whole(fields, "max_tokens", low=1, high=1_000_000),
        "seed": _whole(fields, "seed", low=0, high=LARGEST_SEED),
        "system": text_field(fields, "system", most=MOST_TEXT) if system else "",
    }


def _whole(fields: Mapping[str, Any], name: str, *, low: int, high: int) -> int | None:
    if fields.get(name) is None:
        default: int | None = SAMPLING[name]
        return default
    value = number_field(fields, name, low=low, high=high, default=low)
    if value != int(value):
        raise InvalidRequestError(f"{name} is {value:g}; it must be a whole number", param=name)
    return int(value)


def messages(turns: Sequence[Turn], system: str, *, unanswered: Turn | None = None) -> list[dict[str, str]]:
    """Turns as messages of the chat format, without questions to which there is no answer, but for this one."""
    said = [{"role": "system", "content": system}] if system.strip() else []
    for turn, follower in zip(turns, [*turns[1:], None], strict=True):
        answered = follower is not None and follower.role == "assistant" and bool(follower.text)
        if (turn.role == "assistant" and turn.text) or (turn.role == "user" and (answered or turn is unanswered)):
            said.append({"role": turn.role, "content": turn.text})
    return said


def within_bounds(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The latest turns, beginning with a question; the last exchange stays, whatever its size."""
    first = 0
    size = sum(turn.size for turn in turns)
    while len(turns) - first > 2 and (
        len(turns) - first > MOST_TURNS or size > MOST_CHARACTERS or turns[first].role != "user"
    ):
        size -= turns[first].size
        first += 1
    return turns[first:]


def end_in_words(stats: ChatStats, max_tokens: int) -> str:
    """How an answer has ended; nothing where the model came to its end."""
    if stats.finish_reason == "stop":
        return ""
    if stats.finish_reason == "length":
        return "cut at max_tokens" if stats.output_tokens >= max_tokens else "cut: the model's context is full"
    return {"tool_calls": "asks for a tool", "cancelled": "stopped"}.get(stats.finish_reason, stats.finish_reason)


def _turn_html(turn: Turn) -> str:
    parts = [f"<div><b>{'You' if turn.role == 'user' else 'Model'}</b></div>"]
    if turn.reasoning:
        parts.append(f"<details><summary>thoughts</summary>{_pre(turn.reasoning)}</details>")
    parts += [_pre(turn.text)] if turn.text else []
    parts += [f"<div><b>{html.escape(turn.error)}</b></div>"] if turn.error else []
    parts += [f"<div><small>{html.escape(turn.stats)}</small></div>"] if turn.stats else []
    return "".join(parts)


def _pre(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
