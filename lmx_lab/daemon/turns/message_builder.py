"""A message that the model is writing, and what a turn has cost so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmx_lab.client.chat_chunks import CompleteToolCall, Piece, ToolCallAssembler
from lmx_lab.wire.sessions import CONTENT_CHARACTERS, TurnStats

Kind = Literal["turn.token", "turn.thinking"]


class Draft:
    """What has come of one message; what of it is not in the log yet is ``take``n from time to time."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.closed = False
        """Nothing is added any more."""
        self.first_s: float | None = None
        """When it began, by the clock of ``add``."""
        self.last_s = 0.0
        self.prompt_tokens = 0
        self._counted: int | None = None
        self._reason: str | None = None
        self._pieces = 0
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._left = {"turn.token": CONTENT_CHARACTERS, "turn.thinking": CONTENT_CHARACTERS}
        self._waiting: list[tuple[Kind, list[str]]] = []
        self._calls = ToolCallAssembler()

    def add(self, piece: Piece, now_s: float) -> bool:
        """Whether there is text for the log now.

        Raises:
            EngineError: more calls than an answer may have.
        """
        if self.closed:
            return False
        if piece.usage is not None:
            self.prompt_tokens = piece.usage.prompt or 0
            self._counted = piece.usage.completion
        self._reason = piece.finish_reason or self._reason
        for call in piece.calls:
            self._calls.add(call)
        if piece.has_output:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
            self._pieces += 1
        self._write("turn.thinking", piece.thinking, self._thinking)
        self._write("turn.token", piece.text, self._text)
        return bool(self._waiting)

    def _write(self, kind: Kind, text: str, whole: list[str]) -> None:
        text = text[: self._left[kind]]
        if not text:
            return
        self._left[kind] -= len(text)
        whole.append(text)
        if not self._waiting or self._waiting[-1][0] != kind:
            self._waiting.append((kind, []))
        self._waiting[-1][1].append(text)

    def take(self) -> list[tuple[Kind, str]]:
        """What came since the last time, in its order."""
        taken = [(kind, "".join(texts)) for kind, texts in self._waiting]
        self._waiting.clear()
        return taken

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking)

    @property
    def calls(self) -> tuple[CompleteToolCall, ...]:
        return self._calls.calls()

    @property
    def full(self) -> bool:
        """No message may be longer."""
        return 0 in self._left.values()

    @property
    def cut(self) -> bool:
        """It was cut off by its length."""
        return self.full or self._reason == "length"

    @property
    def completion_tokens(self) -> int:
        """By the server's count; where it has none, of pieces, which most servers send for each token."""
        return self._pieces if self._counted is None else self._counted


@dataclass(kw_only=True)
class Tally:
    """Of all messages of a turn that are done."""

    started_s: float
    steps: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    writing_s: float = 0.0
    first_s: float | None = None

    def add(self, draft: Draft) -> None:
        self.prompt_tokens += draft.prompt_tokens
        self.completion_tokens += draft.completion_tokens
        if draft.first_s is not None:
            self.writing_s += draft.last_s - draft.first_s
            self.first_s = draft.first_s if self.first_s is None else self.first_s

    def stats(self, now_s: float) -> TurnStats:
        speed = self.completion_tokens / self.writing_s if self.writing_s > 0 else 0.0
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
