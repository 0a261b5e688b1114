"""Render chat templates in a sandboxed process, with limits on time, memory and size, and try them before a load.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from Python's internals, but
not from running forever or from taking all memory, and one long multiplication would stop every thread of this process.
Messages of several shapes are rendered before a load, because a template may never end for some of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from lmx_lab.engine.sandbox import (
    SandboxBusyError,
    SandboxDiedError,
    SandboxPool,
    SandboxStartError,
    SandboxTimeoutError,
    shared_pool,
)
from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.tokenizer_files import folder_templates

WORKER = Path(__file__).with_name("template_worker.py")
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
"""Variables of a template: short chats."""
USUAL = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
_tried: dict[str, None] = {}
"""Templates that were accepted. They are not tried again, so that a second load starts no process."""


class TemplateRefusalError(Exception):
    """The template rejected its input, or failed; the message contains the reason."""


class TemplateBusyError(TemplateRefusalError):
    """The template was not rendered, because other slow templates were being rendered."""


class TemplateLimitError(Exception):
    """The template exceeded a limit; the message names it, as in "runs longer than the limit of 5 s"."""


def prepare_rendering() -> None:
    """Start the process for the first template in the background. If no template is rendered, it ends by itself.

    A program that loads its first model while it imports other modules then need not wait for the start.
    """
    shared_pool().start(WORKER)


async def render(
    template: str, variables: Mapping[str, Any], *, limit_s: float = 5.0, pool: SandboxPool | None = None
) -> str:
    """Render a template.

    Args:
        variables: Values by name. A value that has no JSON form is passed as its ``str``.

    Raises:
        TemplateRefusalError: the template failed or rejected its input, or no process could be started.
        TemplateLimitError: the template exceeded a limit.
    """
    return await render_request(write_request(template, variables), limit_s=limit_s, pool=pool)


def write_request(template: str, variables: Mapping[str, Any]) -> bytes:
    """Return the message that renders a template.

    Raises:
        TemplateRefusalError: the variables cannot be written as JSON.
    """
    try:
        # json.dumps would hold the interpreter's lock several times as long.
        return to_json({"template": template, "variables": variables}, fallback=str)
    except (TypeError, ValueError, RecursionError) as exc:
        raise TemplateRefusalError(f"its variables cannot be written as JSON: {exc}") from exc


async def render_request(request: bytes | str, *, limit_s: float = 5.0, pool: SandboxPool | None = None) -> str:
    """Return the text of a message of ``write_request``. A text is returned unchanged.

    Raises:
        TemplateRefusalError, TemplateLimitError: as ``render``.
    """
    if isinstance(request, str):
        return request
    pool = pool or shared_pool()
    try:
        answer: dict[str, str] = from_json(await pool.run(WORKER, request, limit_s=limit_s))
    except SandboxStartError as exc:
        raise TemplateRefusalError(f"no process could be started for it: {exc}; try again") from exc
    except SandboxBusyError as exc:
        raise TemplateBusyError(f"other slow templates were rendered for {pool.wait_s:g} s; try again") from exc
    except SandboxTimeoutError as exc:
        raise TemplateLimitError(f"runs longer than the limit of {limit_s:g} s") from exc
    except SandboxDiedError as exc:
        # The system refused memory in a way that Python could not report.
        raise TemplateLimitError("has ended the process in which it ran") from exc
    if "text" in answer:
        return answer["text"]
    if "limit" in answer:
        raise TemplateLimitError(answer["limit"])
    raise TemplateRefusalError(answer["error"])


async def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """Render a conversation with the chat template of a model. See ``write_chat``.

    Raises:
        TemplateRefusalError, TemplateLimitError: as ``render``.
        Exception: as ``write_chat``.
    """
    return await render_request(await in_thread(partial(write_chat, tokenizer, messages, **options)))


def write_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **options: Any,
) -> bytes | str:
    """Return the message for ``render_request`` that renders a conversation with the same variables as transformers.

    If code of mlx-lm or transformers writes the prompt, its text is returned. Both may take long for many messages.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``, or the tokenizer of a GGUF file.
        options: More variables of the template.

    Raises:
        TemplateRefusalError: there are no messages, or no template for them.
        Exception: whatever mlx-lm or transformers raise, for models whose chat format is written in Python there.
    """
    # The same default as in mlx-lm: templates with optional reasoning get True.
    options.setdefault("enable_thinking", tokenizer.has_thinking)
    is_written_in_python = False
    if tokenizer._tokenizer is not None:  # None for a GGUF file
        # Slow to import: a second, unless the tokenizer has imported it already.
        from mlx_lm.tokenizer_utils import PreTrainedTokenizerBase  # type: ignore[attr-defined]

        own: Any = type(tokenizer._tokenizer).apply_chat_template
        has_own = own is not PreTrainedTokenizerBase.apply_chat_template
        is_written_in_python = tokenizer._chat_template is not None or has_own
    if is_written_in_python:
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
    written = []
    for message in messages:
        # Without fields that are None, and with the reasoning under both names that templates use.
        given = {name: value for name, value in message.items() if value is not None}
        names = [name for name in ("reasoning_content", "thinking", "reasoning") if name in given]
        both = {"thinking": given[names[0]], **given, "reasoning_content": given[names[0]]} if names else given
        written.append(both)
    variables = {
        **tokenizer.special_tokens_map,
        **options,
        "messages": written,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return write_request(template, variables)


async def try_template(template: str, path: Path, *, limit_s: float = 2.0, pool: SandboxPool | None = None) -> None:
    """Render a chat template for each of ``SHAPES``.

    Args:
        path: The model, for messages.
        limit_s: Time limit for one chat. Usual templates take a millisecond; the first chat compiles the template.

    Raises:
        UnusableModelError: the template exceeds a limit, or could not be tried because of other slow ones. Other
            errors are ignored, and reported for each request.
    """
    if template in _tried:
        return
    for shape in SHAPES:
        try:
            await render(template, {**USUAL, **shape}, limit_s=limit_s, pool=pool)
        except TemplateLimitError as exc:
            raise UnusableModelError(f"{path} cannot be loaded: its chat template {exc}", param="model") from exc
        except TemplateBusyError as exc:
            raise UnusableModelError(f"{path} cannot be loaded now: {exc}", param="model") from exc
        except TemplateRefusalError:
            pass
    _tried[template] = None
    for old in list(itertools.islice(_tried, max(0, len(_tried) - 64))):
        _tried.pop(old, None)


async def try_templates_of(folder: Path, *, limit_s: float = 2.0) -> None:
    """Try the chat templates of a model folder. Raises the same error as ``try_template``."""
    for template in await in_thread(partial(folder_templates, folder)):
        await try_template(template, folder, limit_s=limit_s)
