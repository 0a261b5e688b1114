"""Answer rows, or score choices, with as many concurrent requests as the engines of one or several servers have slots.

Rows are read in the caller's thread, up to a limit ahead of the answers. Requests are sent on the lab's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from lmx_lab.backend import Backend
from lmx_lab.batch.answers import LOGPROBS, RowAnswer, TypedColumns, answer_row
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.batch.prompts import Prompt, Row, RowPrompts
from lmx_lab.batch.servers import LoadedModel, RowServer, ServerRun, loaded_model
from lmx_lab.errors import ERROR_CLASSES, EngineDeadError, EngineError, InvalidRequestError, LabError
from lmx_lab.results.database import digest
from lmx_lab.results.frames import RowSource
from lmx_lab.values.outputs import TokenLogprob
from lmx_lab.wire.chat import ChatRequest

AHEAD = 256
"""Maximum number of requests that were read and are not finished or, for an iterator, whose answers were not taken."""
UNFINISHED = RowAnswer(error="was not computed, because the run ended earlier")
CUT_OFF = "the answer is not complete JSON, because it was cut off at max_tokens; increase max_tokens"

ReadChoices = Callable[[Row], Sequence[str]]
"""Returns the choices of a row. Raises ``InvalidRequestError`` if they are invalid."""
MakeRequest = Callable[[Prompt], ChatRequest]
"""Creates the request for a prompt. Raises ``InvalidRequestError`` if it is invalid."""
Errors = Literal["row", "raise"]
Retry = Literal["errors"]
MAX_NAMED_TOKENS = 64
"""Maximum length of ``logprob_tokens``."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How the rows of a run are answered."""

    prompts: RowPrompts
    make_request: MakeRequest
    parameters: frozenset[str]
    """Names of the parameters that all requests have. If the server refuses a value of one of them, the run ends."""
    columns: TypedColumns | None = None
    choices: ReadChoices | None = None
    """If set, the choices of each row are scored after its prompt, and no answer is generated."""
    chat_template: bool = True
    """Whether the choices are answers to a chat; otherwise, they continue the plain text of the prompt."""
    n: int = 1
    """Number of answers for each row."""
    seed: int | None = None
    errors: Errors = "row"
    retry: Retry | None = None


@dataclass(kw_only=True)
class _Item:
    """One request for a row."""

    position: int
    label: Any
    request: ChatRequest | None
    choices: tuple[str, ...] = ()
    key: str = ""
    error: InvalidRequestError | None = None
    """The reason why there is no request."""


class BatchRun(ServerRun[_Item]):
    """Answers the rows of a source.

    ``read`` and ``take`` must be called in one thread; the coroutines run on the lab's event loop.

    Args:
        source: The rows. If it has no index, the caller takes the answers one by one during the run, which limits the
            number of answers that were not taken.
        others: Other servers with the same model, which also answer rows.
    """

    def __init__(
        self,
        backend: Backend,
        model: LoadedModel,
        source: RowSource,
        options: BatchOptions,
        *,
        cache: AnswerCache | None = None,
        others: Sequence[RowServer] = (),
    ) -> None:
        servers = [RowServer(backend, model.slots), *others]
        super().__init__(model, servers, partial(loaded_model, hashed=False), cache=cache)
        self._source, self.options, self._in_order = source, options, source.index is None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._new: deque[_Item] = deque()
        self._answers: dict[int, tuple[RowAnswer, dict[str, Any]]] = {}
        """The answers that were not taken, with the values of their other columns, by position."""
        self._repeats: Counter[int] = Counter()
        """Number of requests so far for each prompt, by the first eight bytes of its digest to save memory."""
        self._exhausted = False
        self._probed = options.columns is None
        self._labels = 0
        self._taken = 0
        self.read_items = 0
        """Number of requests whose rows were read."""
        self.errors = 0
        self.output_tokens = 0
        """Tokens of answers that this run has computed."""

    # In the caller's thread

    def read(self) -> bool:
        """Read rows up to the limit. Returns whether there are rows that were not read or not finished.

        Warns about servers that failed and whose rows the others answer.

        Raises:
            InvalidRequestError: the first row of an iterable does not have a column of the prompt.
        """
        self.warn()
        while not self._exhausted and not self._stopped and self._has_room:
            found = next(self._source.rows, None)
            if found is None:
                self._exhausted = True
                break
            label, row = found
            if not self._labels and self._source.columns is None:
                self.options.prompts.check(row)
            self._labels += 1
            for _ in range(self.options.n):
                self._new.append(self._item(label, row))
                self.read_items += 1
        return not self._stopped and (not self._exhausted or self.done < self.read_items)

    @property
    def _has_room(self) -> bool:
        return self.read_items - self.done < AHEAD and not (self._in_order and self.read_items - self._taken >= AHEAD)

    def _item(self, label: Any, row: Mapping[str, Any]) -> _Item:
        item = _Item(position=self.read_items, label=label, request=None)
        options = self.options
        try:
            request = options.make_request(options.prompts.prompt(row))
            item.choices = () if options.choices is None else tuple(options.choices(row))
        except InvalidRequestError as exc:
            item.error = exc
            return item
        if self._cache is not None or options.seed is not None:
            excluded = {"model", "seed", "response_format"}
            content = request.model_dump(mode="json", exclude=excluded, exclude_defaults=True)
            schema = options.columns and dict(options.columns.json_schema)
            scored = [options.chat_template, *item.choices] if item.choices else []
            key = digest(self._model.key, content, schema, *scored)
            # Requests with equal prompts are numbered, so that each has its own key.
            prompt = int(key[:16], 16)
            item.key = digest(key, self._repeats[prompt])
            self._repeats[prompt] += 1
        if options.seed is not None:
            seed = hashlib.sha256(f"{options.seed} {item.key}".encode()).digest()
            request = request.model_copy(update={"seed": int.from_bytes(seed[:6])})
            item.key = digest(item.key, request.seed)
        item.request = request
        return item

    def take(self) -> dict[str, Any] | None:
        """Return the next answer in the order of the rows; None if it is not finished, or the run was stopped."""
        if self._stopped or self._taken not in self._answers:
            return None
        self._taken += 1
        return self._row(self._taken - 1, *self._answers.pop(self._taken - 1))

    def answers(self) -> list[tuple[RowAnswer, dict[str, Any]]]:
        """Return all answers that were not taken, with the values of their other columns. Rows that were not computed
        have an error.
        """
        total = len(self._source.index) * self.options.n
        return [self._answers.get(at) or self._read_values(UNFINISHED) for at in range(self._taken, total)]

    def rows(self) -> list[dict[str, Any]]:
        """Return ``answers`` as rows of a table."""
        return [self._row(at, *found) for at, found in enumerate(self.answers(), self._taken)]

    def _row(self, at: int, answer: RowAnswer, values: Mapping[str, Any]) -> dict[str, Any]:
        return answer_row(answer, values, sample=at % self.options.n if self.options.n > 1 else None)

    def figures(self) -> list[dict[str, Any]]:
        """Return the statistics of each server as rows of a table. Answers from the cache are not counted."""
        return [server.figures() for server in self._servers]

    # On the event loop

    async def step(self) -> None:
        """Compute answers until rows can be read, the next answer can be taken, or ``STEP_S`` has passed.

        Raises:
            BatchStoppedError: no further row can be answered, for example because the model was unloaded.
            LabError: no row could be answered, or a row failed and ``errors`` is ``raise``.
        """
        self._loop = asyncio.get_running_loop()
        new = [self._new.popleft() for _ in range(len(self._new))]
        keys = [item.key for item in new if item.request is not None]
        found = await self._cache.find(keys) if self._cache is not None and keys else {}
        for item in new:
            answer = found.get(item.key)
            if item.error is not None:
                self._finish(item, _failed(item.error))
            elif answer is None or (self.options.retry == "errors" and self._read_values(answer)[0].error is not None):
                self._ready.append(item)
            else:
                self._finish(item, answer)
        if self._ready and not self._probed:
            # Fails if the schema cannot be enforced, before the first row is sent.
            request = self.options.make_request("x").model_copy(update={"max_tokens": 1})
            await self._answer(request, self._servers[0], waits=True)
            self._probed = True
        await self._work()

    def _must_return(self) -> bool:
        if self._failure is not None or self.done >= self.read_items:
            return True
        if self._in_order and self._taken in self._answers:
            return True
        return not self._exhausted and self._has_room and self.read_items - self.done <= AHEAD // 2

    def close(self) -> None:
        """Cancel all running requests. Returns immediately; can be called from any thread. Idempotent."""
        self._stopped = True
        if self._tasks and self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.stop(), self._loop)

    async def _compute(self, item: _Item, server: RowServer) -> None:
        assert item.request is not None
        try:
            answer = await self._answer(item.request, server, choices=item.choices)
        except LabError as exc:
            concerns_row = isinstance(exc, InvalidRequestError | EngineError) and not isinstance(exc, EngineDeadError)
            if not concerns_row:
                await self._give_back(item, server, exc)
                return
            if (exc.param or "").partition(".")[0] in self.options.parameters:
                raise
            answer = _failed(exc)
        server.count(output_tokens=answer.output_tokens or 0)
        await self._store(self._add(item, answer))

    async def _add(self, item: _Item, answer: RowAnswer) -> None:
        """Store an answer in the cache, and finish its row."""
        if self._cache is not None:
            await self._cache.add({item.key: answer}, self._model.id)
        self.output_tokens += answer.output_tokens or 0
        self._finish(item, answer)

    @property
    def _kept(self) -> str:
        if self._in_order and self._cache is None:
            return "pass cache=path to keep all computed answers"
        return super()._kept

    async def _answer(
        self, request: ChatRequest, server: RowServer, *, choices: Sequence[str] = (), waits: bool = False
    ) -> RowAnswer:
        """Return the answer to a request.

        Args:
            choices: Texts that are scored after the prompt; empty if an answer is generated.
            waits: As for ``_send``.

        Raises:
            LabError: there is no answer.
        """

        async def send() -> RowAnswer:
            if choices:
                return await score_choices(server.backend, request, choices, chat_template=self.options.chat_template)
            started_at = time.monotonic()
            answer = await (await server.backend.generate(request, batch=True)).read()
            return RowAnswer(
                text=answer.text,
                reasoning=answer.reasoning,
                finish_reason=answer.finish_reason,
                prompt_tokens=answer.usage.prompt_tokens,
                cached_tokens=answer.usage.prompt_tokens_details.cached_tokens,
                output_tokens=answer.usage.completion_tokens,
                ttft_s=answer.ttft_s,
                total_s=time.monotonic() - started_at,
                request_id=answer.request_id,
            )

        return await self._send(send, server, waits=waits)

    def _finish(self, item: _Item, answer: RowAnswer) -> None:
        answer, values = self._read_values(answer)
        self._answers[item.position] = answer, values
        self._progress_at = time.monotonic()
        self.done += 1
        if answer.error is None:
            return
        self.errors += 1
        if self.options.errors == "raise":
            kind = ERROR_CLASSES.get(answer.code, LabError)
            self._fail(kind(f"row {item.label!r:.80}: {answer.error}"), concerns_row=True)

    def _read_values(self, answer: RowAnswer) -> tuple[RowAnswer, dict[str, Any]]:
        """Return the answer, and the values of its other columns. Values that do not match the schema are an error."""
        if (columns := self.options.columns) is None:
            return answer, {} if self.options.choices is None else {LOGPROBS: answer.logprobs}
        missing: dict[str, Any] = dict.fromkeys(columns.dtypes)
        if answer.text is None or answer.error is not None:
            return answer, missing
        try:
            return answer, columns.values(answer.text)
        except (ValueError, RecursionError) as exc:
            error = CUT_OFF if answer.finish_reason == "length" else str(exc)
            return replace(answer, error=error, code=InvalidRequestError.code), missing


def _failed(error: LabError) -> RowAnswer:
    return RowAnswer(error=error.message, code=error.code)


async def score_choices(
    backend: Backend, request: ChatRequest, choices: Sequence[str], *, chat_template: bool
) -> RowAnswer:
    """Return the log-probability of each choice after a prompt.

    Args:
        chat_template: Whether the choices are answers to the chat. If False, they continue the text of its message.

    Raises:
        LabError: the prompt or a choice cannot be scored.
    """
    started_at = time.monotonic()
    if not chat_template:
        prompt, tokens = await text_tokens(backend, plain_text(request), choices)
    else:
        # The answer to a chat begins after tokens of its template, so each choice is tokenized separately.
        tokens = [list(await backend.encode(choice, special=False)) for choice in choices]
        if all(len(each) == 1 for each in tokens) and len(tokens) <= MAX_NAMED_TOKENS:
            # One request, which generates one token after the prompt.
            named = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 0}
            update = {**named, "logprob_tokens": [each[0] for each in tokens]}
            answer = await (await backend.generate(request.model_copy(update=update), batch=True)).read()
            if not answer.tokens or len(answer.tokens[0].named) != len(tokens):
                raise LabError("the server did not report the log-probabilities of the choices")
            return RowAnswer(
                logprobs=[_sum([each]) for each in answer.tokens[0].named],
                prompt_tokens=answer.usage.prompt_tokens,
                cached_tokens=answer.usage.prompt_tokens_details.cached_tokens,
                total_s=time.monotonic() - started_at,
                request_id=answer.request_id,
            )
        prompt = list(await backend.encode(request))
    if not all(tokens):
        raise InvalidRequestError("a choice has no tokens; remove it")
    logprobs = []
    for each in tokens:
        scores = await backend.score([*prompt, *each], model=request.model, top=0, start=len(prompt))
        logprobs.append(_sum(scores))
    return RowAnswer(logprobs=logprobs, prompt_tokens=len(prompt), total_s=time.monotonic() - started_at)


def plain_text(request: ChatRequest) -> str:
    """Return the prompt of a request without a chat template.

    Raises:
        InvalidRequestError: the request has several messages, or its content is not a text.
    """
    content = request.messages[0].content
    if len(request.messages) != 1 or not isinstance(content, str) or not content.strip():
        raise InvalidRequestError(
            "without chat_template, the prompt of each row must be a text, and there is no system prompt",
            param="prompt",
        )
    return content


async def text_tokens(backend: Backend, text: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a text, and those with which each choice continues it.

    They are divided as in lm-evaluation-harness: spaces at the end of the text belong to the choices, and the tokens of
    a choice are those of the whole text from the position at which the text alone ends.
    """
    prompt = text.rstrip()
    spaces = text[len(prompt) :]
    first = list(await backend.encode(prompt))
    whole = [list(await backend.encode(prompt + spaces + choice)) for choice in choices]
    return first, [tokens[len(first) :] for tokens in whole]


def _sum(scores: Sequence[TokenLogprob]) -> float:
    return math.fsum(score.logprob for score in scores if score.logprob is not None)
