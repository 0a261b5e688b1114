"""Build a message from the pieces that the model streams, and count the cost of a turn. Does no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmx_lab.client.chat_format import Piece
from lmx_lab.values.outputs import ToolCallDelta, merge_tool_calls
from lmx_lab.wire.sessions import CONTENT_CHARACTERS, TurnStats

TextEvent = Literal["turn.token", "turn.thinking"]
"""The event that text belongs to: the answer or the thoughts."""


class MessageBuilder:
    """Collects the pieces of one message. ``take`` returns the text that was not written to the log yet."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.is_closed = False
        """Whether further pieces are ignored."""
        self.first_s: float | None = None
        """Time of the first piece with output, by the clock of ``add``."""
        self.last_s = 0.0
        """Time of the last piece with output."""
        self.prompt_tokens = 0
        self._reported_tokens: int | None = None
        self._finish_reason: str | None = None
        self._pieces = 0
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._characters_left = {"turn.token": CONTENT_CHARACTERS, "turn.thinking": CONTENT_CHARACTERS}
        self._pending: list[tuple[TextEvent, list[str]]] = []
        self._calls: list[ToolCallDelta] = []

    def add(self, piece: Piece, now_s: float) -> bool:
        """Add a piece. Returns whether there is text that was not taken yet.

        Args:
            now_s: The current time in seconds, on any clock.
        """
        if self.is_closed:
            return False
        if piece.usage is not None:
            self.prompt_tokens = piece.usage.prompt or 0
            self._reported_tokens = piece.usage.completion
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._calls += piece.calls
        if piece.has_output:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
            self._pieces += 1
        self._add_text("turn.thinking", piece.thinking, self._thinking)
        self._add_text("turn.token", piece.text, self._text)
        return bool(self._pending)

    def _add_text(self, event: TextEvent, text: str, texts: list[str]) -> None:
        text = text[: self._characters_left[event]]
        if not text:
            return
        self._characters_left[event] -= len(text)
        texts.append(text)
        if not self._pending or self._pending[-1][0] != event:
            self._pending.append((event, []))
        self._pending[-1][1].append(text)

    def take(self) -> list[tuple[TextEvent, str]]:
        """Return the text that was added since the last call, in order, by event."""
        taken = [(event, "".join(texts)) for event, texts in self._pending]
        self._pending.clear()
        return taken

    @property
    def text(self) -> str:
        """The text of the answer so far."""
        return "".join(self._text)

    @property
    def thinking(self) -> str:
        """The thoughts so far."""
        return "".join(self._thinking)

    @property
    def calls(self) -> tuple[ToolCallDelta, ...]:
        """The calls so far. They are complete when the answer is."""
        return merge_tool_calls(self._calls)

    @property
    def is_full(self) -> bool:
        """Whether the message has the maximum length."""
        return 0 in self._characters_left.values()

    @property
    def is_truncated(self) -> bool:
        """Whether the message ended at a length limit, the server's or the daemon's."""
        return self.is_full or self._finish_reason == "length"

    @property
    def completion_tokens(self) -> int:
        """Number of tokens as reported by the server. Without a report it is the number of pieces, since most servers
        send one piece for each token."""
        return self._pieces if self._reported_tokens is None else self._reported_tokens


@dataclass(kw_only=True)
class TurnUsage:
    """The cost of the complete messages of a turn."""

    started_s: float
    """Time at which the turn started, by the clock of ``MessageBuilder.add``."""
    steps: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    generation_s: float = 0.0
    """Time between the first and the last output of each message, in total."""
    first_s: float | None = None
    """Time of the first output of the turn."""

    def add(self, message: MessageBuilder) -> None:
        """Add the cost of a message."""
        self.prompt_tokens += message.prompt_tokens
        self.completion_tokens += message.completion_tokens
        if message.first_s is not None:
            self.generation_s += message.last_s - message.first_s
            self.first_s = message.first_s if self.first_s is None else self.first_s

    def stats(self, now_s: float) -> TurnStats:
        """Return the statistics of a turn that ends now."""
        speed = self.completion_tokens / self.generation_s if self.generation_s > 0 else 0.0
        return TurnStats(
            tokens=self.completion_tokens,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            tool_calls=self.tool_calls,
            steps=self.steps,
            elapsed_s=round(now_s - self.started_s, 6),
            tokens_per_second=round(speed, 3),
            ttft_ms=None if self.first_s is None else round((self.first_s - self.started_s) * 1e3, 3),
        )
