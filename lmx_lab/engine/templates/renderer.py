"""Chat templates, rendered in a process of their own, within limits of time, memory and size.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from Python's inside, but not
from running for ever or from taking all memory, and one long multiplication would stop every thread of this process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lmx_lab.engine import sandbox_process

SCRIPT = Path(__file__).with_name("sandbox.py")
START_S = 60.0
"""A machine may be busy with other things."""
LIMIT_S = 5.0
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""All that the process gets of our environment, where keys may be."""
REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateRefusalError(Exception):
    """What the template says is wrong with its input."""


class TemplateLimitError(Exception):
    """The limit that the template has gone over, as in "runs longer than 5 s"."""


class TemplateProcess:
    """Starts the process when it is first needed, and again after it had to be ended. For any thread, one at a time."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """
        Args:
            variables: By name; what JSON cannot say is there as its text.

        Raises:
            TemplateRefusalError: the template fails, or refuses this; or no process could be started.
            TemplateLimitError: it has gone over a limit.
        """
        try:
            question = json.dumps({"template": template, "variables": variables}, default=str).encode()
        except (TypeError, ValueError, RecursionError) as exc:
            raise TemplateRefusalError(f"they cannot be written as JSON: {exc}") from exc
        with self._turn:
            answer = self._ask(question)
        if "text" in answer:
            return answer["text"]
        if "limit" in answer:
            raise TemplateLimitError(answer["limit"])
        raise TemplateRefusalError(answer["error"])

    def end(self) -> None:
        """End the process; the next who asks gets another one."""
        with self._turn:
            self._stop()

    def _ask(self, question: bytes) -> dict[str, str]:
        try:
            channel = self._sent(question)
        except OSError as exc:
            self._stop()
            raise TemplateRefusalError(f"no process could be started for it: {exc}; try again") from exc
        try:
            if channel.poll(self._limit_s):
                answer: dict[str, str] = json.loads(channel.recv_bytes())
                return answer
            reason = f"runs longer than {self._limit_s:g} s"
        except (EOFError, OSError):
            # Where the system refuses memory so that Python cannot say it.
            reason = "has ended the process in which it ran"
        except BaseException:
            # An interrupt: whose answer comes next, nobody would know.
            self._stop()
            raise
        self._stop()
        raise TemplateLimitError(reason)

    def _sent(self, question: bytes) -> Connection:
        if self._channel is not None:
            try:
                self._channel.send_bytes(question)
            except OSError:
                # Somebody has killed it meanwhile.
                self._stop()
            else:
                return self._channel
        channel = self._start()
        channel.send_bytes(question)
        return channel

    def _start(self) -> Connection:
        environ = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self._process, self._channel = sandbox_process.start(SCRIPT, environ)
        try:
            if not self._channel.poll(START_S):
                raise TimeoutError(f"it was not ready within {START_S:g} s")
            self._channel.recv_bytes()
        except EOFError as exc:
            raise OSError("it ended at once") from exc
        return self._channel

    def _stop(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()


@functools.cache
def shared() -> TemplateProcess:
    """The process for all models of this one: it takes 20 MB and 0.1 s to start."""
    process = TemplateProcess()
    atexit.register(process.end)
    return process


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **options: Any,
) -> str:
    """A conversation through the model's chat template; what goes in is what transformers would put in.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``.
        options: Variables of the template.

    Raises:
        TemplateRefusalError, TemplateLimitError: as ``TemplateProcess.render``.
        Exception: where the form is written in Python, by mlx-lm or transformers: whatever that raises.
    """
    # mlx-lm's rule: a template that may think is told so.
    options.setdefault("enable_thinking", tokenizer.has_thinking)
    if _is_code(tokenizer):
        given = {**options, **({} if tools is None else {"tools": tools})}
        shown = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **given
        )
        return str(shown)
    if not messages:
        raise TemplateRefusalError("there are none")
    variables = {
        **tokenizer.special_tokens_map,
        **options,
        "messages": [_plain(message) for message in messages],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return shared().render(_template(tokenizer, tools), variables)


def _is_code(tokenizer: Any) -> bool:
    """Whether a function of mlx-lm's or a class of transformers' writes the prompt: no template of the model's does."""
    # Imported with the tokenizer already; by itself it takes a second.
    from mlx_lm.tokenizer_utils import PreTrainedTokenizerBase  # type: ignore[attr-defined]

    own: Any = type(tokenizer._tokenizer).apply_chat_template
    return tokenizer._chat_template is not None or own is not PreTrainedTokenizerBase.apply_chat_template


def _template(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as exc:
        raise TemplateRefusalError(str(exc)) from exc


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not there; thoughts under either name that templates have for them."""
    given = {name: value for name, value in message.items() if value is not None}
    thoughts = next((given[name] for name in REASONING if name in given), None)
    return given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}
