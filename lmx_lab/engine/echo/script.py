"""Read scripts for the echo engine, which are files with answers in order, as JSON lines or as a JSON array.

An answer is a text, or an object with some of the keys in ``KEYS``. It is converted to the text that a model would
generate, so that the same code splits it into reasoning, content and tool calls.
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

from lmx_lab.engine.text.tool_prompt import END, START
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
"""The errors that an answer can end with, by their code."""
MAX_BYTES = 64 * 2**20
MAX_DELAY_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class ScriptAnswer:
    """One answer of a script."""

    location: str
    """Where the answer is in the file, such as ``line 3``."""
    text: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Names and arguments of tool calls."""
    error: str | None = None
    """Message of the error that ends the answer: after its text, or before the first byte if there is no text."""
    code: str = EngineError.code
    """Code of that error."""
    delay_s: float = 0.0
    """Seconds before the first token."""
    tokens_per_s: float | None = None
    """Speed of this answer; None uses the setting."""

    def failure(self) -> LabError:
        """Return the error that the answer ends with."""
        retry_after_s = 1.0 if self.code == QueueFullError.code else None
        return FAILURES[self.code](self.error or "", retry_after_s=retry_after_s)

    @property
    def as_model_text(self) -> str:
        """The text that a model would generate for this answer."""
        calls = []
        for name, arguments in self.calls:
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            calls.append(f"{START}\n{call}\n{END}")
        thoughts = [] if self.reasoning is None else [f"{THINK}{self.reasoning}{END_OF_THOUGHTS}"]
        return "".join(thoughts) + "\n".join([*filter(None, [self.text]), *calls])


class Script:
    """The answers that have not been used yet."""

    def __init__(self, answers: Sequence[ScriptAnswer] = ()) -> None:
        self._answers = deque(answers)

    def take(self) -> ScriptAnswer | None:
        """Remove and return the next answer; None after the last one."""
        return self._answers.popleft() if self._answers else None

    def give_back(self, answer: ScriptAnswer | None) -> None:
        """Put an answer back because the request that took it was refused. The next request gets it."""
        if answer is not None:
            self._answers.appendleft(answer)


def read_script(path: Path) -> Script:
    """Read the answers in a file.

    Raises:
        UnusableModelError: the path is not a regular file, the file cannot be read, or an answer in it is invalid; the
            message names the line.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Opening a FIFO that has no writer blocks.
            raise _script_error(path, "it is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise _script_error(path, f"it cannot be read: {exc.strerror or exc}") from exc
    if len(data) > MAX_BYTES:
        raise _script_error(path, f"it has more than {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise _script_error(path, f"line {line} is not UTF-8") from exc
    try:
        return Script(_answers(text))
    except ValueError as exc:
        raise _script_error(path, str(exc)) from exc


def _script_error(path: Path, what: str) -> UnusableModelError:
    return UnusableModelError(f"echo cannot be loaded with the script {path} (echo_script): {what}", param="model")


def _answers(text: str) -> list[ScriptAnswer]:
    """Return the answers of a script.

    Raises:
        ValueError: an answer is invalid; the message names its line.
    """
    if text.lstrip().startswith("["):
        return [_answer(value, f"answer {at}") for at, value in enumerate(_parse(text, 1), start=1)]
    lines = enumerate(text.split("\n"), start=1)
    return [_answer(_parse(line, at), f"line {at}") for at, line in lines if line.strip()]


def _parse(text: str, line: int) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        location = f"line {line + exc.lineno - 1}, column {exc.colno}"
        raise ValueError(f"{location}: this is not JSON: {exc.msg}") from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"line {line}: this is not JSON: {exc}") from exc


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _answer(value: Any, location: str) -> ScriptAnswer:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise ValueError(f"{location}: an answer must be a string or an object, not {_shorten(value)}")
    unknown = [key for key in value if key not in KEYS]
    if unknown:
        raise ValueError(
            f"{location}: {_shorten(unknown[0])} is not a key of an answer; the keys are {', '.join(KEYS)}"
        )
    if not {"text", "reasoning", "tool_calls", "error"} & set(value):
        raise ValueError(f"{location}: the answer is empty; give it a text, tool_calls or an error")
    code = _text(value, "code", location)
    if code is not None and (code not in FAILURES or "error" not in value):
        raise ValueError(f"{location}: code is {_shorten(code)}; with an error it can be {', '.join(FAILURES)}")
    given = value.get("tool_calls")
    if not isinstance(given, list | None):
        raise ValueError(f"{location}: tool_calls is {_shorten(given)}; it must be a list")
    calls = []
    for at, call in enumerate(given or ()):
        is_call = isinstance(call, dict) and {"name"} <= set(call) <= {"name", "arguments"}
        name, arguments = (call["name"], call.get("arguments", {})) if is_call else (None, None)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            form = '{"name": "...", "arguments": {...}}'
            raise ValueError(f"{location}: tool_calls[{at}] is {_shorten(call)}; it must be {form}")
        calls.append((name, arguments))
    return ScriptAnswer(
        location=location,
        text=_text(value, "text", location) or "",
        reasoning=_text(value, "reasoning", location),
        calls=tuple(calls),
        error=_text(value, "error", location),
        code=code or EngineError.code,
        delay_s=_number(value, "delay_s", location, MAX_DELAY_S) or 0.0,
        tokens_per_s=_number(value, "tokens_per_s", location, 1e6, least=0.001),
    )


def _text(answer: Mapping[str, Any], key: str, location: str) -> str | None:
    value = answer.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{location}: {key} is {_shorten(value)}; it must be a string")
    try:
        (value or "").encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"{location}: {key} has a lone surrogate, which cannot be encoded") from exc
    return value


def _number(answer: Mapping[str, Any], key: str, location: str, most: float, *, least: float = 0.0) -> float | None:
    value = answer.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{location}: {key} is {_shorten(value)}; it must be a number")
    if not least <= value <= most:
        raise ValueError(f"{location}: {key} is {_shorten(value)}; it must be {least:g} to {most:g}")
    return float(value)


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:80]}…"
