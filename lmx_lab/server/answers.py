"""Answer a request in any format: start its generations, and send the output of the format's writer.

A format consists of a parser, which returns an ``AnswerRequest``, and an ``AnswerWriter``. ``respond`` does the rest
for all formats: clients that disconnect or accept no data, keep-alives, ignored fields, and errors before and after the
first byte.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from fastapi import Request, Response

from lmx_lab.engine import Answer, Caller, GenerationRequest
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import LabError
from lmx_lab.http.errors import detail_for
from lmx_lab.http.streaming import EventStream, comment, data_line, while_connected
from lmx_lab.server.convert import FieldNames
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.translate import fields_without_effect
from lmx_lab.values.outputs import Delta, GenerationReport, merge_deltas
from lmx_lab.wire.errors import ErrorBody, ErrorDetail

log = logging.getLogger(__name__)
T = TypeVar("T")
Part = tuple[Answer, Delta | GenerationReport | None]
"""A part of an answer: None at its beginning, its deltas, and its report."""
Describe = Callable[[LabError], ErrorDetail]
"""Returns the form of an error that the caller may see."""
IGNORED_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")
CHAT_NAMES = FieldNames({})
"""Errors already name the fields of the chat format."""


class StreamWriter(Protocol):
    """Writes one answer as a stream of framed texts. Implementations do no I/O.

    ``begin``, ``delta`` and ``end`` are called for each choice, with those of other choices in between, and ``finish``
    after all of them. ``error`` replaces everything that has not been written.
    """

    def begin(self, index: int, prompt_tokens: int) -> Iterable[str]:
        """Return what comes before the first delta of a choice; by default nothing."""
        return ()

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        """Yield the texts of a delta. The state of the writer changes only when the first text is read."""

    def end(self, index: int, report: GenerationReport) -> Iterable[str]:
        """Return what comes after the last delta of a choice."""

    def finish(self, reports: Sequence[Sequence[GenerationReport]]) -> Iterable[str]:
        """Return the end of the stream; by default nothing.

        Args:
            reports: The reports of the choices of each prompt.
        """
        return ()

    def error(self, error: LabError, detail: ErrorDetail) -> Iterable[str]:
        """Return the end of a stream that has failed after its first byte."""


class AnswerWriter(StreamWriter, Protocol):
    """Writes one answer as the response to an HTTP request."""

    media_type: str = "text/event-stream"
    """Type of the stream."""

    def error(self, error: LabError, detail: ErrorDetail) -> Iterable[str]:
        return [data_line(ErrorBody(error=detail).model_dump_json())]

    def keep_alive(self, status: str) -> str:
        """Return what is sent while there is nothing to write; by default a comment.

        Args:
            status: The state of the request, such as ``queued`` or ``prompt 512/7000 tokens``.
        """
        return comment(status)

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        """Return the body of a complete answer.

        Args:
            parts: The content and the report of each choice of each prompt.
        """


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """The result of parsing a request in any format."""

    prompts: Sequence[GenerationRequest]
    """One request to the engine for each prompt, without the caller. Only the completions format has several."""
    writer: Callable[[str, str], AnswerWriter]
    """Creates the writer. Its arguments are the id of the model that answers, as the caller may see it, and the
    fingerprint of its engine (``Origin``)."""
    choices: int = 1
    """Number of answers to each prompt."""
    stream: bool = False
    ignored: Iterable[str] = ()
    """Names of the fields that have no effect."""
    names: FieldNames = CHAT_NAMES
    """Fields of the format, for errors."""
    streamed_errors: tuple[type[LabError], ...] = ()
    """Errors before the first byte that a stream reports by itself, with status 200."""
    read: Callable[[Answer], AsyncIterator[Delta]] = aiter
    """Returns the deltas of an answer."""


async def respond(service: InferenceService, request: Request, wanted: AnswerRequest) -> Response:
    """Answer a request completely or as a stream.

    Raises:
        LabError: the request was refused, or its answer failed before the first byte.
    """
    caller = service.caller_of(request)
    choices = Choices(service, wanted.prompts, caller, choices=wanted.choices, read=wanted.read)
    headers = answer_headers(service, caller, wanted)

    def describe(error: LabError) -> ErrorDetail:
        return detail_for(request, error)

    try:
        with wanted.names.in_errors():
            await while_connected(request, choices.start())
    except wanted.streamed_errors as exc:
        if not wanted.stream:
            raise
        writer = wanted.writer(wanted.prompts[0].model or "", service.manager.fingerprint)
        return EventStream(_refused(writer, exc, describe), headers=headers, media_type=writer.media_type)
    writer = wanted.writer(choices.model, choices.fingerprint)
    if wanted.stream:
        stream = EventStream(
            choices.texts(writer, describe),
            headers=headers,
            media_type=writer.media_type,
            keep_alive=lambda: writer.keep_alive(choices.status),
            blocked_limit_s=lambda: service.blocked_limit_s(choices.running),
        )
        choices.pass_on = lambda answer, delta: stream.write(writer.delta(answer.index, delta))
        return stream
    text = await while_connected(request, choices.whole(writer))
    return Response(text, media_type="application/json", headers=headers)


def answer_headers(service: InferenceService, caller: Caller, wanted: AnswerRequest) -> dict[str, str]:
    """Return the headers that describe how a request is treated."""
    found = map(wanted.names.renamed, fields_without_effect(wanted.prompts[0]))
    return {**ignored_header([*wanted.ignored, *found]), **service.recording.answer_headers(own=bool(caller.own))}


def json_response(content: str | bytes, ignored: Iterable[str] = ()) -> Response:
    """Return a response with JSON, and with a header that names the ignored fields of the request."""
    return Response(content, media_type="application/json", headers=ignored_header(ignored))


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header with the names of ignored fields. Names that a header cannot contain are left out."""
    shown = list(filter(IGNORED_NAME.fullmatch, dict.fromkeys(names)))[:48]
    return {"x-lmx-ignored": ", ".join(shown)} if shown else {}


async def _refused(writer: StreamWriter, error: LabError, describe: Describe) -> AsyncGenerator[str, None]:
    for text in (*writer.begin(0, 0), *writer.error(error, describe(error))):
        yield text


class Choices:
    """The answers to one request: all choices of all of its prompts.

    See ``AnswerRequest`` for the arguments. The caller is the one that sent all prompts.

    At most as many prompts run at the same time as fill the engine's slots, so that a request does not fill the queue
    by itself. If an answer fails, the others are cancelled.
    """

    def __init__(
        self,
        service: InferenceService,
        prompts: Sequence[GenerationRequest],
        caller: Caller,
        *,
        choices: int = 1,
        read: Callable[[Answer], AsyncIterator[Delta]] = aiter,
    ) -> None:
        self._service = service
        self._prompts = prompts
        self._caller = caller
        self._choices = choices
        self._read = read
        self._concurrency = max(1, service.manager.settings.slots // choices)
        self._free = asyncio.Semaphore(self._concurrency)
        self._answers: dict[int, list[Answer]] = {}
        """The answers that were submitted and have not been closed, by the number of their prompt."""
        self._latest: Answer | None = None
        self.model = ""
        """Id of the model that answers, as the caller may see it; set by ``start``."""
        self.fingerprint = ""
        """The fingerprint of its engine; set by ``start``."""
        self.pass_on: Callable[[Answer, Delta], bool] | None = None
        """``Answer.pass_on``, which is used after the first delta of a single answer."""

    @property
    def status(self) -> str:
        """The state of the prompt that was submitted last, for a client that waits for the first token."""
        return self._latest.status if self._latest is not None else "queued"

    @property
    def running(self) -> list[Answer]:
        """The answers that were submitted and have not been closed."""
        return [answer for answers in self._answers.values() for answer in answers]

    async def start(self) -> None:
        """Submit the first prompts, or none, so that their errors are known before the response begins.

        Raises:
            LabError: see ``InferenceService.submit``.
        """
        try:
            for number in range(len(self._prompts))[: self._concurrency]:
                await self._submit(number)
        except BaseException:
            self._close()
            raise
        first = self._answers[0][0]
        self.model, self.fingerprint = public_id(first.model, local=self._caller.local), first.origin.fingerprint

    async def texts(self, writer: StreamWriter, describe: Describe) -> AsyncGenerator[str, None]:
        """Yield the output of the writer while the answers are generated. An exception is logged, and ends it with an
        error.
        """
        reports: dict[int, GenerationReport] = {}
        try:
            async with aclosing(merge(map(self._prompt_parts, range(len(self._prompts))))) as parts:
                async for answer, part in parts:
                    index = answer.index
                    if isinstance(part, Delta):
                        texts: Iterable[str] = writer.delta(index, part)
                    elif part is None:
                        texts = writer.begin(index, len(answer.prompt))
                    else:
                        reports[index] = part
                        texts = writer.end(index, part)
                    for text in texts:
                        yield text
            for text in writer.finish(self._by_prompt(reports)):
                yield text
        except Exception as exc:
            error = LabError(f"internal error; the log contains the details for {self._caller.request_id}")
            if isinstance(exc, LabError):
                error = exc
                log.warning("%s: the stream failed: %s", self._caller.request_id, exc)
            else:
                log.error("%s: the stream failed", self._caller.request_id, exc_info=exc)
            for text in writer.error(error, describe(error)):
                yield text
        finally:
            self._close()

    async def whole(self, writer: AnswerWriter) -> str:
        """Return the body of the complete answer.

        Raises:
            LabError: an answer failed.
        """
        deltas: dict[int, list[Delta]] = defaultdict(list)
        ends: dict[int, tuple[Delta, GenerationReport]] = {}

        def pass_on(answer: Answer, delta: Delta) -> bool:
            deltas[answer.index].append(delta)
            return True

        self.pass_on = pass_on
        try:
            async with aclosing(merge(map(self._prompt_parts, range(len(self._prompts))))) as parts:
                async for answer, part in parts:
                    if isinstance(part, Delta):
                        deltas[answer.index].append(part)
                    elif part is not None:
                        ends[answer.index] = merge_deltas(deltas.pop(answer.index, ())), part
        finally:
            self._close()
        return writer.whole(self._by_prompt(ends))

    def _by_prompt(self, choices: Mapping[int, T]) -> list[list[T]]:
        """Return what belongs to all choices, by their index, as a list for each prompt."""
        groups = defaultdict[int, list[T]](list)
        for index in sorted(choices):
            groups[index // self._choices].append(choices[index])
        return list(groups.values())

    async def _submit(self, number: int, *, patient: bool = False) -> list[Answer]:
        answers = self._answers[number] = await self._service.submit(
            replace(self._prompts[number], caller=replace(self._caller, patient=patient)),
            choices=self._choices,
            first=number * self._choices,
        )
        self._latest = answers[0]
        return answers

    async def _prompt_parts(self, number: int) -> AsyncGenerator[Part, None]:
        """Yield the parts of the answers to a prompt once it may run, and close the answers at the end."""
        async with self._free:
            answers = self._answers.get(number) or await self._submit(number, patient=True)
            try:
                async with aclosing(merge(map(self._answer_parts, answers))) as parts:
                    async for part in parts:
                        yield part
            finally:
                for answer in answers:
                    await answer.aclose()
                self._answers.pop(number, None)

    async def _answer_parts(self, answer: Answer) -> AsyncGenerator[Part, None]:
        yield answer, None
        async for delta in self._read(answer):
            yield answer, delta
            # Set after the first delta was used. Before, and if there are several answers, deltas may wait in a queue.
            if self.pass_on is not None and self._choices == len(self._prompts) == 1:
                answer.pass_on = partial(self.pass_on, answer)
        yield answer, answer.final_report()

    def _close(self) -> None:
        """Cancel the answers that are not read any further."""
        for answers in self._answers.values():
            for answer in answers:
                answer.close()


# Several streams at the same time

End = tuple[BaseException | None]
"""The end of a source in the queue: its error, or None."""


def merge(sources: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they arrive. The items of each source stay in order.

    If the reader is slow, the sources wait: at most one item of each is buffered. The first error is raised and closes
    the other sources. Closing this generator closes all of them.
    """
    first, *others = sources
    return _merge([first, *others]) if others else first


async def _merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[list[T] | End] = asyncio.Queue(len(sources))

    async def pump(source: AsyncGenerator[T, None]) -> None:
        # An item is put as a list with one element, and the end as a tuple, to distinguish them.
        failure: BaseException | None = None
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put([item])
        except Exception as exc:
            failure = exc
        await queue.put((failure,))

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(pumps)
        while running:
            entry = await queue.get()
            if isinstance(entry, list):
                yield entry[0]
            elif entry[0] is not None:
                raise entry[0]
            else:
                running -= 1
    finally:
        for task in pumps:
            task.cancel()
        # All of them have to end before this does.
        await asyncio.gather(*pumps, return_exceptions=True)
