"""Define the replies that ``chat`` of a lab returns, whole or as a stream, and their display in a notebook."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

from pydantic import BaseModel

from lmx_lab.arguments import Prompt, chat_request, completion_request
from lmx_lab.backend import Backend, FinishedAnswer, RunningAnswer, TokenAnswer
from lmx_lab.blocking import END, End, Stream, on_loop
from lmx_lab.errors import counted
from lmx_lab.instrument.branches import HasTokens
from lmx_lab.instrument.lens import TokenTable
from lmx_lab.results.pages import Displayed
from lmx_lab.values.outputs import whole_characters

_CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})[^`\n]*\n(?P<block>.*?)(?:^ *(?P=fence)[`~]* *$|\Z)"
    r"|(?P<ticks>`+)(?P<inline>[^`\n]+)(?P=ticks)(?!`)",
    re.MULTILINE | re.DOTALL,
)


def safe_markdown(text: str) -> str:
    """Return Markdown that displays this text, and that no parser converts to HTML, a link or an image.

    A model's text is untrusted, notebooks run scripts in trusted outputs, and an image would be fetched from another
    host. Parsers differ in what they treat as code, so the characters of code are also escaped.
    """
    pieces, end = [], 0
    for match in _CODE.finditer(text):
        if match["block"] is None:
            code = f"<code>{_references(match['inline'])}</code>"
        else:
            # On one line, because an HTML block in a list ends where the indentation of the list ends.
            code = f"{match['indent']}<pre><code>{_references(match['block'])}</code></pre>\n"
        pieces += [_safe_prose(text[end : match.start()]), code]
        end = match.end()
    return "".join([*pieces, _safe_prose(text[end:])])


def _safe_prose(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    # "](" and "]:" belong to links, images and link definitions, "][" to references.
    return re.sub(r"\](?=[(:\[])", "&#93;", text)


def _references(text: str) -> str:
    """Replace all characters except letters, digits and spaces by character references."""
    return "".join(char if char.isalnum() or char == " " else f"&#{ord(char)};" for char in text)


JsonShape = type[BaseModel] | Literal["json"] | None
"""The expected content of an answer: JSON for a class, any JSON, or other text (None)."""


def json_shape(response_format: Any) -> JsonShape:
    """Return the expected content of an answer with this ``response_format``."""
    if isinstance(response_format, type):
        return response_format if issubclass(response_format, BaseModel) else None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    return "json" if kind in ("json_object", "json_schema") else None


@dataclass(frozen=True, kw_only=True, repr=False)
class Reply(Displayed, FinishedAnswer, HasTokens):
    """A complete answer and its cost."""

    shape: JsonShape = None
    """The expected content of the text."""

    @classmethod
    def of_answer(cls, answer: FinishedAnswer, shape: JsonShape = None, *, backend: Backend | None = None) -> Self:
        """Return the reply for a complete answer.

        Args:
            backend: The lab that can score the answer.
        """
        reply = cls(**vars(answer), shape=shape)
        # Not a field: ``dataclasses.asdict`` and tables copy the values of all fields.
        object.__setattr__(reply, "_backend", backend)
        return reply

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process cannot use the lab.
        return {name: value for name, value in self.__dict__.items() if name not in ("_tree", "_backend")}

    def to_dict(self) -> dict[str, Any]:
        """Return the answer and its cost as a flat dictionary of JSON values, such as a row of a table."""
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": [{"id": it.id, "name": it.name, "arguments": it.arguments} for it in self.tool_calls],
            "model": self.model,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.prompt_tokens_details.cached_tokens,
            "output_tokens": self.usage.completion_tokens,
            "ttft_s": self.ttft_s,
            "tokens_per_second": self.tokens_per_second,
            "request_id": self.request_id,
        }

    @property
    def _tokens(self) -> TokenAnswer:
        return self

    @property
    def logprobs(self) -> TokenTable | None:
        """The tokens with their log-probabilities, if the request has ``logprobs``."""
        return TokenTable(self.tokens) if self.tokens else None

    @property
    def parsed(self) -> Any:
        """The value of a JSON answer: an instance of the class that was passed as ``response_format``, or a value of
        built-in types. None if the request did not ask for JSON, or if the answer was cut off.

        Raises:
            pydantic.ValidationError: the value violates a check of the class that its JSON schema does not contain.
        """
        if (value := self._json()) is None:
            return None
        return self.shape.model_validate_json(self.text) if isinstance(self.shape, type) else value[0]

    def _json(self) -> tuple[Any] | None:
        """Return a tuple with the value of a complete JSON answer, which may be ``null``; None if there is none."""
        try:
            return (json.loads(self.text),) if self.shape is not None else None
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the next prompt; the results of its calls follow it."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}

    @property
    def tokens_per_second(self) -> float:
        """The decode speed."""
        return self.timings.predicted_per_second

    @property
    def reasoning_tokens(self) -> int:
        """Number of the completion's tokens that are thoughts."""
        return self.usage.completion_tokens_details.reasoning_tokens

    def __str__(self) -> str:
        return whole_characters(self.text) if self.finish_reason == "length" else self.text

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        thoughts = [f"[{self._thoughts()}: see .reasoning]"] if self.reasoning else []
        text = [self._indented() or str(self)] if self.text or not self.tool_calls else []
        calls = ["\n".join(f"→ {call}" for call in self.tool_calls)] if self.tool_calls else []
        return "\n\n".join([*thoughts, *text, *self._notes(), *calls, f"{self.model} · {self._cost()}"])

    def _indented(self) -> str | None:
        """Return a JSON answer with indentation; None if the text is not JSON."""
        value = self._json()
        return None if value is None else json.dumps(value[0], indent=2, ensure_ascii=False)

    def _notes(self) -> list[str]:
        if self.shape is None or not self.text or self._json() is not None:
            return []
        return ["[The JSON is not complete, and .parsed is None; raise max_tokens.]"]

    def _repr_markdown_(self) -> str:
        thoughts = []
        if self.reasoning:
            # On one line, because an HTML block in a list ends where the indentation of the list ends.
            lines = "<br>".join(map(_references, self.reasoning.strip().splitlines()))
            title = _references(self._thoughts())
            thoughts = [f"<details><summary>{title}</summary><small>{lines}</small></details>"]
        indented = self._indented()
        shown = safe_markdown(str(self)) if indented is None else f"<pre><code>{_references(indented)}</code></pre>"
        text = [shown] if self.text or not self.tool_calls else []
        text += self._notes()
        calls = [f"→ <code>{_references(str(call))}</code>" for call in self.tool_calls]
        return "\n\n".join([*thoughts, *text, *calls, f"<small>{_references(self.model)} · {self._cost()}</small>"])

    def _thoughts(self) -> str:
        return f"thoughts, {counted(self.reasoning_tokens, 'token')}"

    def _cost(self) -> str:
        speed = f"{counted(self.usage.completion_tokens, 'token')}, {self.tokens_per_second:.1f} tok/s"
        return f"{speed} · first token in {self.ttft_s:.2f} s"


async def ask(backend: Backend, /, prompt: Prompt, **parameters: Any) -> Reply:
    """Ask the loaded model, and return the complete reply. The parameters are those of ``chat``."""
    shape, request = json_shape(parameters.get("response_format")), chat_request(prompt, parameters)

    async def read() -> Reply:
        return Reply.of_answer(await (await backend.generate(request)).read(), shape, backend=backend)

    return await on_loop(backend.portal, read())


async def complete(backend: Backend, /, prompt: str | Sequence[int], **parameters: Any) -> Reply:
    """Continue a text as it is, without a chat template, and return the complete reply.

    Args:
        prompt: A text, or token ids.
        parameters: Those of ``POST /v1/completions``: ``max_tokens`` (16 by default), ``temperature``, ``stop``,
            ``seed``, ``logprobs``, ``echo``, ``suffix`` and so on. Several prompts and ``n`` are not supported.

    Raises:
        NotLoadedError: no model is loaded.
        ContextLengthError: the prompt is too long.
        InvalidRequestError: a parameter does not exist or is out of range.
    """
    request = completion_request(prompt, parameters)

    async def read() -> Reply:
        return Reply.of_answer(await backend.complete(request), backend=backend)

    return await on_loop(backend.portal, read())


async def tokenize(backend: Backend, /, prompt: Prompt, *, special: bool = False, **parameters: Any) -> list[int]:
    """Return the token ids of a text, or of messages as the model reads them.

    Args:
        special: Whether to include special tokens that the tokenizer adds to each text.
        parameters: For messages: ``tools``, ``system`` and other parameters of ``chat`` that change the prompt.

    Raises:
        NotLoadedError: no model is loaded.
        InvalidRequestError: a parameter does not exist or is out of range.
    """
    wanted = prompt if isinstance(prompt, str) and not parameters else chat_request(prompt, parameters)
    return list(await on_loop(backend.portal, backend.encode(wanted, special=special)))


async def stream(backend: Backend, /, prompt: Prompt, **parameters: Any) -> ReplyStream:
    """Stream a reply. The parameters are those of ``chat``."""
    running = await on_loop(backend.portal, backend.generate(chat_request(prompt, parameters)))
    return ReplyStream(running, backend, json_shape(parameters.get("response_format")))


class ReplyStream:
    """A stream of text as it is generated: ``for piece in stream`` or ``async for``.

    After the last piece, ``reply`` is the complete reply. Leaving the loop early stops the generation, as does
    ``close()``. ``show()``, or the stream as the last line of a cell, displays the text while it is generated.
    """

    def __init__(self, running: RunningAnswer, backend: Backend, shape: JsonShape = None) -> None:
        self._running = running
        self._backend = backend
        self._shape: JsonShape = shape
        self.reply: Reply | None = None
        """The reply, once the generation has ended; stays None if it was stopped."""

    @property
    def text(self) -> str:
        """The text so far."""
        return self._running.text

    @property
    def reasoning(self) -> str:
        """The thoughts so far; they precede the text, and iterating skips them."""
        return self._running.reasoning

    def __repr__(self) -> str:
        state = "ended" if self._running.has_ended else "running: iterate it for its text, or close() it"
        return f"<ReplyStream, {state}>"

    def __iter__(self) -> Iterator[str]:
        return _Pieces(self)

    def __aiter__(self) -> AsyncIterator[str]:
        return _Pieces(self)

    def show(self) -> Reply | None:
        """Display the text while it is generated, with line breaks between words. Then display and return the reply.

        In a terminal, the text is printed. Returns None if the stream was stopped before its end.
        """
        with LiveText() as view:
            for _ in _Pieces(self, with_empty=True):
                view.update(self.reasoning, self.text)
            view.end(self.reply or self.text)
        return self.reply

    def _ipython_display_(self) -> None:
        self.show()

    def close(self) -> None:
        """Stop the generation. Returns immediately; can be called from any thread and in a finalizer. Idempotent."""
        # Deleting the answer is not enough, because the traceback of an interrupted cell refers to it.
        self._running.close()

    async def aclose(self) -> None:
        self.close()


class _Pieces(Stream[str]):
    """One iteration over the text of a stream; its end, and deleting it, stop the generation.

    Args:
        with_empty: Whether pieces without text, such as those of thoughts, are included.
    """

    def __init__(self, stream: ReplyStream, *, with_empty: bool = False) -> None:
        self.stream = stream
        self._with_empty = with_empty

    async def _next(self) -> str | End:
        stream, running = self.stream, self.stream._running
        while not running.has_ended and (delta := await on_loop(stream._backend.portal, running.next())) is not None:
            if delta.text or self._with_empty:
                return delta.text
        if running.finished is not None:
            stream.reply = Reply.of_answer(running.finished, stream._shape, backend=stream._backend)
        return END

    def close(self) -> None:
        self.stream.close()


class PendingStream(Coroutine[Any, Any, ReplyStream]):
    """An answer that has not started. ``async for`` starts it and yields its text; ``await`` starts it and returns its
    ``ReplyStream``. It is a coroutine, so that ``asyncio.create_task`` accepts it.
    """

    def __init__(self, starting: Coroutine[Any, Any, ReplyStream]) -> None:
        self._starting: Coroutine[Any, Any, ReplyStream] | None = starting
        self._stream: ReplyStream | None = None
        self._pieces: _Pieces | None = None
        self._steps: Generator[Any, Any, ReplyStream] | None = None
        """The steps of a task that was created with this object."""

    def __await__(self) -> Generator[Any, Any, ReplyStream]:
        # As a generator, which keeps this object: deleting it would close the coroutine.
        return (yield from self._start().__await__())

    def send(self, value: Any) -> Any:
        self._steps = self._steps or self._start().__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        self._steps = self._steps or self._start().__await__()
        return self._steps.throw(*error)

    @property
    def reply(self) -> Reply | None:
        """The reply, once an iteration has reached the end."""
        return None if self._stream is None else self._stream.reply

    def __repr__(self) -> str:
        return "<PendingStream: iterate over it with `async for`, or await it>"

    async def _start(self) -> ReplyStream:
        if self._stream is None:
            starting, self._starting = self._starting, None
            if starting is None:
                raise RuntimeError("this stream was closed, or another task is starting it; call astream again")
            self._stream = await starting
        return self._stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._pieces is None:
            self._pieces = _Pieces(await self._start())
        return await anext(self._pieces)

    def close(self) -> None:
        # A stream that was only awaited belongs to the caller.
        if self._pieces is not None:
            self._pieces.close()
        elif self._starting is not None:
            self._starting.close()
            self._starting = None

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LiveText:
    """The display of one answer, as a context manager. The last text is always displayed when the block ends."""

    def __init__(self) -> None:
        # Imported here, because IPython is optional, and not needed in a script.
        from IPython.core.getipython import get_ipython

        self._shell: Any = get_ipython()
        self._in_kernel = getattr(self._shell, "kernel", None) is not None
        self._display_id: str | None = None
        self._latest = ("", "")
        self._shown = ("", "")
        self._next_at = 0.0

    def update(self, reasoning: str, text: str) -> None:
        """Show the current text. Updates within a short time are combined."""
        self._latest = reasoning, text
        if time.monotonic() >= self._next_at:
            self._show()

    def end(self, result: Any) -> None:
        """Replace the text with the complete reply, or with the incomplete text if the stream was stopped."""
        if not self._in_kernel:
            self._show()
            print("" if isinstance(result, str) else f"\n\n{repr(result).rsplit(chr(10), 1)[-1]}")
        elif isinstance(result, str):
            self._send(_bundle("", result))
        else:
            self._send(*self._shell.display_formatter.format(result))
        self._shown = self._latest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown != self._latest:
            self._show()

    def _show(self) -> None:
        reasoning, text = self._latest
        if self._in_kernel:
            self._send(_bundle(reasoning, text))
        else:
            print(text[len(self._shown[1]) :], end="", flush=True)
        self._shown = self._latest
        # Each update contains the whole text, and the browser gets at most 500,000 characters per second.
        self._next_at = time.monotonic() + max(0.1, (len(reasoning) + len(text)) / 500_000)

    def _send(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        from IPython.display import publish_display_data  # IPython is optional.

        is_update = self._display_id is not None
        self._display_id = self._display_id or uuid4().hex
        publish_display_data(data, metadata, transient={"display_id": self._display_id}, update=is_update)  # type: ignore[no-untyped-call]


def _bundle(reasoning: str, text: str) -> dict[str, str]:
    thoughts = f"<small>{html.escape(reasoning)}</small>\n" if reasoning and not text else ""
    # Lines are broken between words. Notebooks also break lines of printed text within words.
    style = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
    return {"text/plain": text, "text/html": f'<div style="{style}">{thoughts}{html.escape(text)}</div>'}
