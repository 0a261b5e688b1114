"""Scripts for the echo engine: the answers to give, in order, from a file of JSON lines or a JSON array.

An answer is a text, or an object with any of the keys of ``KEYS``. It is written out as a model would write it, so the
same code divides it into thoughts, content and tool calls.
"""

from __future__ import annotations

import json
import math
import stat
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmx_lab.engine.templates.tool_prompt import END, START
from lmx_lab.errors import (
    ContextLengthError,
    EngineError,
    GenerationTimeoutError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    OutOfMemoryError,
    QueueFullError,
    UnusableModelError,
)

THINK, END_OF_THOUGHTS = "<think>", "</think>"
KEYS = ("text", "reasoning", "tool_calls", "error", "code", "delay_s", "tokens_per_s")
FAILURES: Mapping[str, type[LabError]] = {
    failure.code: failure
    for failure in (
        EngineError,
        InvalidRequestError,
        ContextLengthError,
        NotLoadedError,
        OutOfMemoryError,
        QueueFullError,
        GenerationTimeoutError,
    )
}
"""Errors that an answer can be, by their code."""
RETRY_AFTER_S = 1.0
LARGEST_BYTES = 64 * 2**20
LONGEST_DELAY_S = 3600.0
FASTEST = 1e6


@dataclass(frozen=True, kw_only=True)
class ScriptAnswer:
    """One answer of a script."""

    place: str
    """Where it stands, such as ``line 3``."""
    text: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Names and arguments."""
    error: str | None = None
    """The answer fails with this message, after its text, or before the first byte where it has none."""
    code: str = EngineError.code
    """Of the error."""
    delay_s: float = 0.0
    """Before the first token."""
    tokens_per_s: float | None = None
    """None takes the setting."""

    @property
    def fails_at_once(self) -> bool:
        """Whether the answer is an error and nothing else."""
        return self.error is not None and not self.written

    def failure(self) -> LabError:
        """The error that the answer ends with."""
        retry_after_s = RETRY_AFTER_S if self.code == QueueFullError.code else None
        return FAILURES[self.code](self.error or "", retry_after_s=retry_after_s)

    @property
    def written(self) -> str:
        """The answer as a model would write it."""
        calls = [written_call(name, arguments) for name, arguments in self.calls]
        thoughts = [] if self.reasoning is None else [f"{THINK}{self.reasoning}{END_OF_THOUGHTS}"]
        return "".join(thoughts) + "\n".join([*filter(None, [self.text]), *calls])


def written_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call in the generic format."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{START}\n{call}\n{END}"


class Script:
    """The answers that were not given yet. After the last one there are none."""

    def __init__(self, answers: Sequence[ScriptAnswer] = ()) -> None:
        self._answers = deque(answers)

    def take(self) -> ScriptAnswer | None:
        """The next answer; None after the last."""
        return self._answers.popleft() if self._answers else None

    def give_back(self, answer: ScriptAnswer | None) -> None:
        """The request that took it was refused: the next one gets it."""
        if answer is not None:
            self._answers.appendleft(answer)


def read_script(path: Path) -> Script:
    """The answers in a file.

    Raises:
        UnusableModelError: it is no regular file, it cannot be read, or an answer in it is wrong; the message names the
            line.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # To open a FIFO without a writer would block the loop of the caller.
            raise _wrong(path, "it is no regular file")
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except OSError as exc:
        raise _wrong(path, f"it cannot be read: {exc.strerror or exc}") from exc
    if len(data) > LARGEST_BYTES:
        raise _wrong(path, f"it has more than {LARGEST_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise _wrong(path, f"line {line} is not UTF-8") from exc
    try:
        return Script(_answers(text))
    except ValueError as exc:
        raise _wrong(path, str(exc)) from exc


def _wrong(path: Path, what: str) -> UnusableModelError:
    return UnusableModelError(f"echo cannot be loaded with the script {path} (echo_script): {what}", param="model")


def _answers(text: str) -> list[ScriptAnswer]:
    """
    Raises:
        ValueError: one is wrong; the message names its line.
    """
    if text.lstrip().startswith("["):
        return [_answer(given, f"answer {at}") for at, given in enumerate(_parsed(text, 1), start=1)]
    lines = enumerate(text.split("\n"), start=1)
    return [_answer(_parsed(line, at), f"line {at}") for at, line in lines if line.strip()]


def _parsed(text: str, line: int) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as exc:
        place = f"line {line + exc.lineno - 1}, column {exc.colno}"
        raise ValueError(f"{place}: this is not JSON: {exc.msg}") from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"line {line}: this is not JSON: {exc}") from exc


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _answer(given: Any, place: str) -> ScriptAnswer:
    if isinstance(given, str):
        given = {"text": given}
    if not isinstance(given, dict):
        raise ValueError(f"{place}: an answer is a text or an object, not {_shown(given)}")
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ValueError(f"{place}: {_shown(unknown[0])} is no key of an answer; there are {', '.join(KEYS)}")
    if not {"text", "reasoning", "tool_calls", "error"} & set(given):
        raise ValueError(f"{place}: the answer says nothing; give it a text, tool_calls or an error")
    code = _text(given, "code", place)
    if code is not None and (code not in FAILURES or "error" not in given):
        raise ValueError(f"{place}: code is {_shown(code)}; beside an error it can be {', '.join(FAILURES)}")
    return ScriptAnswer(
        place=place,
        text=_text(given, "text", place) or "",
        reasoning=_text(given, "reasoning", place),
        calls=_calls(given.get("tool_calls"), place),
        error=_text(given, "error", place),
        code=code or EngineError.code,
        delay_s=_number(given, "delay_s", place, LONGEST_DELAY_S) or 0.0,
        tokens_per_s=_number(given, "tokens_per_s", place, FASTEST, least=0.001),
    )


def _text(given: Mapping[str, Any], key: str, place: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place}: {key} is {_shown(value)}; it must be a text")
    try:
        (value or "").encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"{place}: {key} has a lone surrogate, which is no character") from exc
    return value


def _number(given: Mapping[str, Any], key: str, place: str, most: float, *, least: float = 0.0) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{place}: {key} is {_shown(value)}; it must be a number")
    if not least <= value <= most:
        raise ValueError(f"{place}: {key} is {_shown(value)}; it must be {least:g} to {most:g}")
    return float(value)


def _calls(given: Any, place: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise ValueError(f"{place}: tool_calls is {_shown(given)}; it must be a list")
    return tuple(_call(call, f"{place}: tool_calls[{at}]") for at, call in enumerate(given))


def _call(given: Any, place: str) -> tuple[str, Mapping[str, Any]]:
    form = '{"name": "...", "arguments": {...}}'
    if not isinstance(given, dict) or not {"name"} <= set(given) <= {"name", "arguments"}:
        raise ValueError(f"{place} is {_shown(given)}; it must be {form}")
    name, arguments = given["name"], given.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(f"{place} is {_shown(given)}; it must be {form}")
    return name, arguments


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:80]}…"
