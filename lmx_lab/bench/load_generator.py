"""Asking a target what a case wants, and a sample for each request, however it ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from lmx_lab.bench.case import Case, Closed, Poisson
from lmx_lab.bench.figures import Trace
from lmx_lab.bench.prompts import prompt, prompt_hash, words
from lmx_lab.bench.sample import RunClock, Sample, new_run
from lmx_lab.bench.targets import Target, TargetFacts
from lmx_lab.errors import InvalidRequestError, LabError, UnclearModelError, UnreachableError

log = logging.getLogger(__name__)
SILENCE_S = 60.0
DAY_S = 86400
PATIENCE = 10
"""So many times as long one waits for a token of a server that only says that it works."""
DOWN = 3
"""Requests that nobody took or answered, one after the other: then nobody is asked any more in this case."""
ADVICE_S = 5.0
"""A user who is refused waits as long as the server advises, but no longer than this."""
FEW_WORDS = 8
MANY_WORDS = (64, 512)
"""At least, and at most."""
Took = Callable[[Sample], None]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    tokens_per_word: float = 1.0
    template_tokens: float = 0.0
    """What the chat template adds to any prompt, and what its words have more than most."""
    proven: bool = False
    """A whole prompt of this length was counted."""

    def left(self, tokens: int) -> int:
        """Of a prompt of so many tokens, those that its words are to be."""
        return max(1, round(tokens - self.template_tokens))

    def corrected(self, wanted_tokens: int, counted_tokens: int) -> Calibration:
        """By a prompt that was made for ``wanted_tokens`` and had ``counted_tokens``."""
        more = counted_tokens - max(wanted_tokens, self.template_tokens + 1)
        return replace(self, template_tokens=self.template_tokens + more, proven=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What all cases of one run share."""

    id: str = field(default_factory=new_run)
    """Makes its prompts unlike those of any other run, which a server may have kept."""
    silence_s: float = SILENCE_S
    """A target that says nothing for so long has failed that request. Above 0, and up to a day."""
    clock: RunClock = field(default_factory=RunClock)
    calibrations: dict[tuple[int, int], Calibration] = field(default_factory=dict)
    """By target and length of prompt."""

    def __post_init__(self) -> None:
        seconds = self.silence_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= DAY_S:
            raise InvalidRequestError(
                f"silence_s is {seconds!r:.40}; give seconds above 0 and up to {DAY_S:,}", param="silence_s"
            )


async def drive(
    target: Target, case: Case, *, repeat: int = 0, silence_s: float = SILENCE_S
) -> AsyncGenerator[Sample, None]:
    """Measure one case: its warm-up, then its requests; gives each sample as its request ends.

    A request that fails is a sample with its error. After three without an answer in a row the rest of the case is
    not asked, and has rows that say so. Closing the generator ends what is under way.
    """
    session = CaseRun(target, case, repeat=repeat, run=Run(silence_s=silence_s))
    await session.prepare()
    for part in (session.warm_up(), session.measure(range(case.requests))):
        async with aclosing(part) as ended:
            async for sample in ended:
                yield sample


class CaseRun:
    """One target in one repeat of one case. First ``prepare``, then the warm-up, then any parts of the requests."""

    def __init__(self, target: Target, case: Case, *, repeat: int, run: Run) -> None:
        self._target = target
        self._case = case
        self._repeat = repeat
        self._run = run
        self._facts = TargetFacts()
        self._calibration = Calibration()
        self._failures = 0
        """To get any answer, one after the other."""

    async def prepare(self) -> None:
        """Find out what answers, and how many tokens a word has there. What fails here, the requests will tell.

        Raises:
            UnclearModelError: nobody said what is to be measured.
        """
        known, key = self._run.calibrations, (id(self._target), self._case.prompt_tokens)
        try:
            async with asyncio.timeout(self._run.silence_s):
                await self._describe()
                if key not in known:
                    known[key] = await calibrated(self._target, self._case.prompt_tokens)
        except UnclearModelError:
            raise
        except (LabError, OSError, TimeoutError) as exc:
            log.info("%s was not asked before the measurement: %r", self._target.name, exc)
        self._calibration = known.get(key, self._calibration)

    async def _describe(self) -> None:
        try:
            self._facts = await self._target.describe()
        except UnclearModelError:
            raise
        except (LabError, OSError) as exc:
            log.info("%s does not say what it is: %s", self._target.name, exc)

    async def warm_up(self) -> AsyncGenerator[Sample, None]:
        """Requests that are not counted. By what the target counts in them, those after them get their length."""
        numbers = range(self._case.warm_up)
        async with aclosing(_as_they_end(lambda took: self._users(numbers, took, warm_up=True))) as ended:
            async for sample in ended:
                if sample.prompt_tokens and sample.error is None:
                    self._learn(sample.prompt_tokens)
                yield sample

    def _learn(self, counted_tokens: int) -> None:
        known, key = self._run.calibrations, (id(self._target), self._case.prompt_tokens)
        if not self._calibration.proven:
            self._calibration = known[key] = self._calibration.corrected(self._case.prompt_tokens, counted_tokens)

    def measure(self, numbers: Sequence[int]) -> AsyncGenerator[Sample, None]:
        """The requests of these numbers, by the case's arrival."""
        arrival = self._case.arrival
        if isinstance(arrival, Closed):
            return _as_they_end(lambda took: self._users(numbers, took))
        return _as_they_end(lambda took: self._arrivals(arrival, numbers, took))

    async def _users(self, numbers: Iterable[int], took: Took, *, warm_up: bool = False) -> None:
        """Each asks the next request when their last one has ended."""
        left = iter(numbers)

        async def user() -> None:
            advised_s: float | None = None
            for number in left:
                await asyncio.sleep(min(advised_s or 0.0, ADVICE_S))
                sample, advised_s = await self._request(number, warm_up=warm_up)
                took(sample)

        async with asyncio.TaskGroup() as users:
            for _ in range(self._case.concurrency):
                users.create_task(user())

    async def _arrivals(self, arrival: Poisson, numbers: Sequence[int], took: Took) -> None:
        """Each request at its moment, or as soon as fewer than ``concurrency`` are under way."""
        places = asyncio.Semaphore(self._case.concurrency)
        began_s = time.perf_counter()

        async def one(number: int, due_s: float) -> None:
            try:
                took((await self._request(number, due_s=due_s))[0])
            finally:
                places.release()

        times_s = arrival.times_s(len(numbers), self._case.seed + self._repeat)
        async with asyncio.TaskGroup() as requests:
            for number, offset_s in zip(numbers, times_s, strict=True):
                due_s = began_s + offset_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                await places.acquire()
                requests.create_task(one(number, due_s))

    async def _request(
        self, number: int, *, warm_up: bool = False, due_s: float | None = None
    ) -> tuple[Sample, float | None]:
        """Its sample, and how long a refused user is advised to wait."""
        text = self._prompt(number, warm_up=warm_up)
        now_s = time.perf_counter()
        trace = Trace(sent_at_s=now_s, due_at_s=due_s, ended_at_s=now_s)
        error, advised_s = self._gone, None
        if error is None:
            try:
                await self._read(text, trace)
                self._failures = 0
                if not trace.counts:
                    error = f"empty: {self._target.name} ended its answer without a token"
            except (LabError, OSError, TimeoutError) as exc:
                trace.ended_at_s = time.perf_counter()
                error, advised_s = self._failed(exc)
        fields = {
            **self._fields,
            **trace.figures(),
            "started_at": self._run.clock.stamp(trace.sent_at_s),
            "request": number,
            "warm_up": warm_up,
            "late_ms": None if due_s is None else max(0.0, trace.sent_at_s - due_s) * 1e3,
            "error": error,
            "prompt_hash": prompt_hash(text),
        }
        if self._case.cache == "warm" and fields["cached_tokens"] is None:
            # Most of the prompt was cached, and the server has not said how much.
            fields["prefill_tok_s"] = None
        return Sample(**fields), advised_s

    async def _read(self, text: str, trace: Trace) -> None:
        """
        Raises:
            LabError: the target's.
            TimeoutError: it said nothing for ``silence_s``.
        """
        loop, silence_s = asyncio.get_running_loop(), self._run.silence_s
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": self._case.output_tokens}
        sent = False
        # Ten times within it, and not at every token: moving it takes as long as a token does.
        moved_s, step_s = loop.time(), silence_s / 10
        last_s = moved_s
        async with (
            asyncio.timeout_at(moved_s + silence_s + step_s) as limit,
            aclosing(self._target.ask(body)) as chunks,
        ):
            async for chunk in chunks:
                if not sent:
                    trace.sent_at_s, sent = chunk.at_s, True
                trace.add(chunk)
                now_s = loop.time()
                last_s = now_s if chunk.tokens else last_s
                if now_s > moved_s + step_s:
                    moved_s = now_s
                    limit.reschedule(min(now_s + silence_s + step_s, last_s + PATIENCE * silence_s))

    def _failed(self, exc: Exception) -> tuple[str, float | None]:
        # Subclasses of the first say that somebody was there.
        nobody = type(exc) is UnreachableError or isinstance(exc, TimeoutError)
        self._failures = self._failures + 1 if nobody else 0
        if isinstance(exc, LabError):
            return f"{exc.code}: {exc.message}", exc.retry_after_s
        if isinstance(exc, TimeoutError):
            return f"silent: {self._target.name} said nothing for {self._run.silence_s:g} s; is it stuck?", None
        return f"connection-lost: {exc!s:.200}", None

    @property
    def _gone(self) -> str | None:
        """The error of a request that is not sent any more."""
        if self._failures < DOWN:
            return None
        return f"unreachable: not asked, since {self._target.name} did not answer {DOWN} times in a row"

    def _prompt(self, number: int, *, warm_up: bool) -> str:
        return prompt(
            self._case,
            repeat=self._repeat,
            request=number,
            warm_up=warm_up,
            # Of each target its own: two of them may be one server, and what one has asked it keeps for the other.
            run=f"{self._run.id} {self._target.name}",
            tokens=self._calibration.left(self._case.prompt_tokens),
            tokens_per_word=self._calibration.tokens_per_word,
        )

    @property
    def _fields(self) -> dict[str, Any]:
        """What all samples of this session have alike."""
        case = self._case
        return {
            "run": self._run.id,
            "target": self._target.name,
            **vars(self._facts),
            "case": case.name,
            "prompt_tokens_wanted": case.prompt_tokens,
            "output_tokens_wanted": case.output_tokens,
            "concurrency": case.concurrency,
            "arrival": str(case.arrival),
            "cache": case.cache,
            "seed": case.seed,
            "repeat": self._repeat,
        }


async def calibrated(target: Target, tokens: int) -> Calibration:
    """For prompts of about ``tokens`` tokens; without effect where the target counts nothing.

    Raises:
        LabError: the target's.
    """
    least, most = MANY_WORDS
    many = max(least, min(tokens, most))
    few_tokens, many_tokens = await _counted(target, FEW_WORDS), await _counted(target, many)
    if few_tokens is None or many_tokens is None or many_tokens <= few_tokens:
        return Calibration()
    tokens_per_word = (many_tokens - few_tokens) / (many - FEW_WORDS)
    return Calibration(tokens_per_word=tokens_per_word, template_tokens=few_tokens - FEW_WORDS * tokens_per_word)


async def _counted(target: Target, count: int) -> int | None:
    """The tokens of a prompt of so many words."""
    text = words(secrets.randbits(32), 0, count)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    found = None
    async with aclosing(target.ask(body)) as chunks:
        async for chunk in chunks:
            found = chunk.usage.prompt if chunk.usage else found
    return found


async def _as_they_end(work: Callable[[Took], Awaitable[None]]) -> AsyncGenerator[Sample, None]:
    """The samples that ``work`` hands over; leaving early cancels it. At most those of one case wait to be taken."""
    ended: asyncio.Queue[Sample | None] = asyncio.Queue()

    async def worked() -> None:
        try:
            await work(ended.put_nowait)
        finally:
            ended.put_nowait(None)

    task = asyncio.create_task(worked())
    try:
        while (sample := await ended.get()) is not None:
            yield sample
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
