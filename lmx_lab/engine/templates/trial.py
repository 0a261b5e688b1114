"""Try the chat template of a model before the model is loaded: render it for messages of several shapes, within limits.

A template is a program, which may never end for some messages. llama.cpp renders the template while it loads a model,
so an endless template would block the load until its time limit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmx_lab.engine.cancellation import Cancellation
from lmx_lab.engine.templates.renderer import TemplateLimitError, TemplateRefusalError, TemplateSandbox
from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.tokenizer_files import folder_templates

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
MAX_TRIED = 64
_tried: dict[str, None] = {}
"""Templates that were accepted. They are not tried again, so that a second load starts no process."""


_prepared: list[TemplateSandbox] = []
"""A sandbox for the next trial, or none."""


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
    for old in list(itertools.islice(_tried, max(0, len(_tried) - MAX_TRIED))):
        _tried.pop(old, None)


def try_templates_of(folder: Path, cancellation: Cancellation) -> None:
    """Try the chat templates of a model folder. Raises the same errors as ``try_template``."""
    for template in folder_templates(folder):
        try_template(template, folder, cancellation)
