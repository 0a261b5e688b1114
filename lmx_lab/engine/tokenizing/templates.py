"""Render chat templates in a sandboxed process, with limits on time, memory and size, and try them before a load.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from Python's internals, but
not from running forever or from taking all memory, and one long multiplication would stop every thread of this process.
Messages of several shapes are rendered before a load, because a template may never end for some of them. llama.cpp
renders the template while it loads a model, so an endless template would block the load until its time limit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from lmx_lab.engine.cancellation import Cancellation
from lmx_lab.engine.sandbox_process import (
    SandboxDiedError,
    SandboxProcess,
    SandboxSendError,
    SandboxStartError,
    SandboxTimeoutError,
)
from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.tokenizer_files import folder_templates

WORKER = Path(__file__).with_name("template_worker.py")
START_S = 60.0
"""Generous, because the machine may be busy."""
LIMIT_S = 5.0
SHARE_S = 0.25
"""Time for which one template may delay others. If it takes longer, it is rendered again in another process."""
QUEUE_S = 30.0
"""Time that a slow template may wait for other slow ones."""
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""The only environment variables that the process gets; others may contain keys."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TRIAL_S = 2.0
"""Time limit for rendering one chat. Usual templates take a millisecond; the first rendering compiles the template."""
TOOL: Mapping[str, Any] = {"name": "look", "description": "?", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
CALL: Mapping[str, Any] = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"place": "sea"}}}
USER = {"role": "user", "content": "What is the weather like?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What is the weather like?"}]}
ANSWER = {"role": "assistant", "content": "It is sunny."}
SYSTEM = {"role": "system", "content": "Be kind."}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
SHAPES: tuple[Mapping[str, Any], ...] = (
    {"messages": [USER], "bos_token": "", "eos_token": ""},
    {"messages": [USER], "tools": TOOLS},
    {"messages": [SYSTEM, USER]},
    {"messages": [USER, ANSWER], "add_generation_prompt": False},
    {"messages": [USER, ANSWER, USER]},
    {"messages": [PARTS]},
    {"messages": [USER, CALLING, RESULT], "tools": TOOLS},
    {"messages": [SYSTEM, USER, CALLING, RESULT], "tools": TOOLS},
    {"messages": [SYSTEM, USER, ANSWER, USER, CALLING, RESULT, ANSWER, USER], "tools": TOOLS},
)
"""Variables of a template: short chats, including those that llama.cpp renders while it loads a model."""
USUAL = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
_tried: dict[str, None] = {}
"""Templates that were accepted. They are not tried again, so that a second load starts no process."""


_prepared: list[TemplateSandbox] = []
"""A sandbox for the next trial, or none."""


class TemplateRefusalError(Exception):
    """The template rejected its input, or failed; the message contains the reason."""


class TemplateLimitError(Exception):
    """The template exceeded a limit; the message names it, as in "runs longer than the limit of 5 s"."""


class TemplateSandbox:
    """Renders templates in a process that is started at the first one, and again after it had to be ended.

    Any thread may use it. Templates are rendered one at a time; those that take longer than ``share_s`` are rendered
    in a second process, so that they do not delay the others.

    Args:
        limit_s: Time limit of one template.
        share_s: Time for which one template may delay others.
    """

    def __init__(self, limit_s: float = LIMIT_S, *, share_s: float = SHARE_S) -> None:
        self._writing = threading.Lock()
        self._limit_s = limit_s
        self._share_s = share_s
        self._usual = _Lane()
        self._slow = _Lane()

    def start(self) -> None:
        """Start the process for the first template, and return before it is ready."""

        def start() -> None:
            with self._usual.lock, contextlib.suppress(SandboxStartError, SandboxDiedError):
                self._usual.process.start()

        threading.Thread(target=start, name="lmx-lab-template", daemon=True).start()

    def render(
        self,
        template: str,
        variables: Mapping[str, Any],
        *,
        while_waiting: Callable[[float], None] | None = None,
    ) -> str:
        """Render a template.

        Args:
            variables: Values by name. A value that has no JSON form is passed as its ``str``.
            while_waiting: Called about every 50 ms; an exception from it ends the process and the rendering.

        Raises:
            TemplateRefusalError: the template failed or rejected its input, or no process could be started.
            TemplateLimitError: the template exceeded a limit.
        """
        try:
            # One at a time, because it holds the interpreter's lock: several threads with texts of 8 MB would delay the
            # event loop. json.dumps would hold it several times as long.
            with self._writing:
                request = to_json({"template": template, "variables": variables}, fallback=str)
        except (TypeError, ValueError, RecursionError) as exc:
            raise TemplateRefusalError(f"its variables cannot be written as JSON: {exc}") from exc
        answer = self._answer(request, while_waiting)
        if "text" in answer:
            return answer["text"]
        if "limit" in answer:
            raise TemplateLimitError(answer["limit"])
        raise TemplateRefusalError(answer["error"])

    def stop(self) -> None:
        """End the processes. The next template starts another one."""
        for lane in (self._usual, self._slow):
            with lane.lock:
                lane.process.stop()

    def close(self) -> None:
        """End the processes permanently."""
        for lane in (self._usual, self._slow):
            lane.process.close()

    def _answer(self, request: bytes, while_waiting: Callable[[float], None] | None) -> dict[str, str]:
        try:
            with self._usual.lock:
                try:
                    limit_s = min(self._share_s, self._limit_s)
                    return _request(self._usual.process, request, limit_s, while_waiting)
                except SandboxTimeoutError:
                    if self._share_s >= self._limit_s:
                        raise
            if not self._slow.lock.acquire(timeout=QUEUE_S):
                raise TemplateRefusalError(f"other slow templates were rendered for {QUEUE_S:g} s; try again")
            try:
                return _request(self._slow.process, request, self._limit_s, while_waiting)
            finally:
                self._slow.process.stop()
                self._slow.lock.release()
        except SandboxStartError as exc:
            raise TemplateRefusalError(f"no process could be started for it: {exc}; try again") from exc
        except SandboxTimeoutError as exc:
            raise TemplateLimitError(f"runs longer than the limit of {self._limit_s:g} s") from exc
        except SandboxDiedError as exc:
            # The system refused memory in a way that Python could not report.
            raise TemplateLimitError("has ended the process in which it ran") from exc


def _request(
    process: SandboxProcess, request: bytes, limit_s: float, while_waiting: Callable[[float], None] | None
) -> dict[str, str]:
    try:
        reply = process.request(request, limit_s, while_waiting=while_waiting)
    except SandboxSendError:
        # The process was killed from outside since the last template.
        reply = process.request(request, limit_s, while_waiting=while_waiting)
    answer: dict[str, str] = from_json(reply)
    return answer


class _Lane:
    """A process, and the lock that is held while it renders."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process = SandboxProcess(
            WORKER, lambda: {name: os.environ[name] for name in INHERITED if name in os.environ}, start_s=START_S
        )


@functools.cache
def default_sandbox() -> TemplateSandbox:
    """Return the sandbox that all models of this process share: it takes 20 MB and 0.1 s to start."""
    sandbox = TemplateSandbox()
    atexit.register(sandbox.stop)
    return sandbox


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **options: Any,
) -> str:
    """Render a conversation with the chat template of a model, with the same variables as transformers.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``.
        options: More variables of the template.

    Raises:
        TemplateRefusalError, TemplateLimitError: as ``TemplateSandbox.render``.
        Exception: whatever mlx-lm or transformers raise, for models whose chat format is written in Python there.
    """
    # The same default as in mlx-lm: templates with optional reasoning get True.
    options.setdefault("enable_thinking", tokenizer.has_thinking)
    if _is_written_in_python(tokenizer):
        given = {**options, **({} if tools is None else {"tools": tools})}
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **given
        )
        return str(text)
    if not messages:
        raise TemplateRefusalError("there are no messages")
    try:
        template = str(tokenizer.get_chat_template(tools=tools))
    except ValueError as exc:
        raise TemplateRefusalError(str(exc)) from exc
    variables = {
        **tokenizer.special_tokens_map,
        **options,
        "messages": [_template_message(message) for message in messages],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return default_sandbox().render(template, variables)


def _is_written_in_python(tokenizer: Any) -> bool:
    """Whether code of mlx-lm or transformers writes the prompt, and no template of the model."""
    # Slow to import: a second, unless the tokenizer has imported it already.
    from mlx_lm.tokenizer_utils import PreTrainedTokenizerBase  # type: ignore[attr-defined]

    own: Any = type(tokenizer._tokenizer).apply_chat_template
    return tokenizer._chat_template is not None or own is not PreTrainedTokenizerBase.apply_chat_template


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that are None, and pass the reasoning under both names that templates use."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING_FIELDS if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _new_sandbox() -> TemplateSandbox:
    return TemplateSandbox(TRIAL_S, share_s=TRIAL_S)


@contextlib.contextmanager
def prepared_trial() -> Iterator[None]:
    """Start the process for the next trial in the background. At the end of the block, end it if it was not used.

    A program that loads its first model while it imports other modules then need not wait for the start.
    """
    sandbox = _new_sandbox()
    sandbox.start()
    _prepared.append(sandbox)
    try:
        yield
    finally:
        if sandbox in _prepared:
            _prepared.remove(sandbox)
            sandbox.close()


def try_template(template: str, path: Path, cancellation: Cancellation) -> None:
    """Render a chat template for each of ``SHAPES``, in a separate process.

    Args:
        path: The model, for messages.

    Raises:
        UnusableModelError: the template exceeds a limit. Other errors are ignored, and reported for each request.
        NotLoadedError: the trial was cancelled.
    """
    if template in _tried:
        return
    sandbox = _prepared.pop() if _prepared else _new_sandbox()
    try:
        for shape in SHAPES:
            with contextlib.suppress(TemplateRefusalError):
                sandbox.render(template, {**USUAL, **shape}, while_waiting=cancellation.check)
    except TemplateLimitError as exc:
        raise UnusableModelError(f"{path} cannot be loaded: its chat template {exc}", param="model") from exc
    finally:
        sandbox.close()
    _tried[template] = None
    for old in list(itertools.islice(_tried, max(0, len(_tried) - 64))):
        _tried.pop(old, None)


def try_templates_of(folder: Path, cancellation: Cancellation) -> None:
    """Try the chat templates of a model folder. Raises the same errors as ``try_template``."""
    for template in folder_templates(folder):
        try_template(template, folder, cancellation)
