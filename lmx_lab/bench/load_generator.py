"""Send the requests of a case to a target, and return a sample for each of them, failed ones included."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from lmx_lab.bench.case import Case, Closed, Poisson, prompt, prompt_hash, words
from lmx_lab.bench.sample import RequestSample, RunClock, Trace, new_run
from lmx_lab.bench.targets import Target, TargetFacts
from lmx_lab.errors import InvalidRequestError, LabError, UnclearModelError, UnreachableError

log = logging.getLogger(__name__)
SILENCE_S = 60.0
"""Default time without data after which a request fails."""
MAX_FAILURES = 3
"""Number of consecutive requests without any reply after which no further request of the case is sent."""
SampleCallback = Callable[[RequestSample], None]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How many words a prompt needs for a number of tokens. The number of tokens is linear in the number of words."""

    tokens_per_word: float = 1.0
    template_tokens: float = 0.0
    """Number of tokens that are added to each prompt, such as those of the chat template."""
    confirmed: bool = False
    """Whether the target has counted the tokens of a prompt of the final length."""

    def word_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt its words have to provide."""
        return max(1, round(prompt_tokens - self.template_tokens))

    def corrected(self, wanted_tokens: int, counted_tokens: int) -> Calibration:
        """Return the calibration corrected by a prompt of ``counted_tokens`` that was generated for
        ``wanted_tokens``."""
        difference = counted_tokens - max(wanted_tokens, self.template_tokens + 1)
        return replace(self, template_tokens=self.template_tokens + difference, confirmed=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The state that all cases of a run share."""

    id: str = field(default_factory=new_run)
    """Part of the prompts, so that they differ from those of other runs, which the server may have in its cache."""
    silence_s: float = SILENCE_S
    """Time in seconds without data after which a request fails, above 0 and up to one day."""
    clock: RunClock = field(default_factory=RunClock)
    calibrations: dict[tuple[int, int], Calibration] = field(default_factory=dict)
    """Calibrations by target (its ``id``) and prompt length."""

    def __post_init__(self) -> None:
        seconds = self.silence_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 86_400:
            raise InvalidRequestError(
                f"silence_s is {seconds!r:.40}; give a number of seconds above 0 and up to 86,400", param="silence_s"
            )


class CaseRun:
    """One repeat of a case on a target. Call ``prepare``, ``warm_up``, and ``measure`` for parts of the requests."""

    def __init__(self, target: Target, case: Case, *, repeat: int, run: Run) -> None:
        self._target = target
        self._case = case
        self._repeat = repeat
        self._run = run
        self._facts = TargetFacts()
        self._calibration = Calibration()
        self._failures = 0
        """Consecutive requests without any reply."""

    async def prepare(self) -> None:
        """Get the facts about the target, and calibrate the length of prompts.

        Errors other than the one below are logged; they will occur again with the requests.

        Raises:
            UnclearModelError: it is not clear which model is to be measured.
        """
        known, key = self._run.calibrations, (id(self._target), self._case.prompt_tokens)
        try:
            async with asyncio.timeout(self._run.silence_s):
                try:
                    self._facts = await self._target.describe()
                except UnclearModelError:
                    raise
                except (LabError, OSError) as exc:
                    log.info("%s could not be described: %s", self._target.name, exc)
                if key not in known:
                    known[key] = await calibrate(self._target, self._case.prompt_tokens)
        except UnclearModelError:
            raise
        except (LabError, OSError, TimeoutError) as exc:
            log.info("%s could not be described or calibrated: %r", self._target.name, exc)
        self._calibration = known.get(key, self._calibration)

    async def warm_up(self) -> AsyncGenerator[RequestSample, None]:
        """Send the warm-up requests. Their prompt tokens correct the length of the following prompts."""
        numbers = range(self._case.warm_up)
        async with aclosing(_samples_of(lambda on_sample: self._users(numbers, on_sample, warm_up=True))) as ended:
            async for sample in ended:
                if sample.prompt_tokens and sample.error is None and not self._calibration.confirmed:
                    wanted = self._case.prompt_tokens
                    self._calibration = self._calibration.corrected(wanted, sample.prompt_tokens)
                    self._run.calibrations[id(self._target), wanted] = self._calibration
                yield sample

    def measure(self, numbers: Sequence[int]) -> AsyncGenerator[RequestSample, None]:
        """Send the requests with these numbers, at the times given by the case's arrival."""
        arrival = self._case.arrival
        if isinstance(arrival, Closed):
            return _samples_of(lambda on_sample: self._users(numbers, on_sample))
        return _samples_of(lambda on_sample: self._arrivals(arrival, numbers, on_sample))

    async def _users(self, numbers: Iterable[int], on_sample: SampleCallback, *, warm_up: bool = False) -> None:
        """Run ``concurrency`` users, each of which sends its next request when its previous one has ended."""
        remaining = iter(numbers)

        async def user() -> None:
            advised_s: float | None = None
            for number in remaining:
                # After a refusal, a user waits as the server advises, but at most 5 s.
                await asyncio.sleep(min(advised_s or 0.0, 5.0))
                sample, advised_s = await self._request(number, warm_up=warm_up)
                on_sample(sample)

        async with asyncio.TaskGroup() as users:
            for _ in range(self._case.concurrency):
                users.create_task(user())

    async def _arrivals(self, arrival: Poisson, numbers: Sequence[int], on_sample: SampleCallback) -> None:
        """Send each request when it is due, or later while ``concurrency`` requests are running."""
        slots = asyncio.Semaphore(self._case.concurrency)
        began_s = time.perf_counter()

        async def one(number: int, due_s: float) -> None:
            try:
                on_sample((await self._request(number, due_s=due_s))[0])
            finally:
                slots.release()

        times_s = arrival.times_s(len(numbers), self._case.seed + self._repeat)
        async with asyncio.TaskGroup() as requests:
            for number, offset_s in zip(numbers, times_s, strict=True):
                due_s = began_s + offset_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                await slots.acquire()
                requests.create_task(one(number, due_s))

    async def _request(
        self, number: int, *, warm_up: bool = False, due_s: float | None = None
    ) -> tuple[RequestSample, float | None]:
        """Send a request. Return its sample, and the time in seconds that the server advises to wait after a
        refusal."""
        case, target, calibration = self._case, self._target, self._calibration
        text = prompt(
            case,
            repeat=self._repeat,
            request=number,
            warm_up=warm_up,
            # Different for each target: two targets may be the same server, which would have the prompts in its cache.
            run=f"{self._run.id} {target.name}",
            tokens=calibration.word_tokens(case.prompt_tokens),
            tokens_per_word=calibration.tokens_per_word,
        )
        now_s = time.perf_counter()
        trace = Trace(sent_at_s=now_s, due_at_s=due_s, ended_at_s=now_s)
        error: str | None = None
        advised_s: float | None = None
        if self._failures >= MAX_FAILURES:
            error = f"unreachable: not sent, because {target.name} did not reply to {MAX_FAILURES} requests in a row"
        if error is None:
            try:
                await self._read(text, trace)
                self._failures = 0
                if not trace.counts:
                    error = f"empty: {target.name} ended its answer without a token"
            except (LabError, OSError, TimeoutError) as exc:
                trace.ended_at_s = time.perf_counter()
                # Subclasses of UnreachableError mean that there was a reply.
                no_reply = type(exc) is UnreachableError or isinstance(exc, TimeoutError)
                self._failures = self._failures + 1 if no_reply else 0
                if isinstance(exc, LabError):
                    error, advised_s = f"{exc.code}: {exc.message}", exc.retry_after_s
                elif isinstance(exc, TimeoutError):
                    error = f"silent: {target.name} sent nothing for {self._run.silence_s:g} s; check whether it hangs"
                else:
                    error = f"connection-lost: {exc!s:.200}"
        metrics = trace.metrics()
        if case.cache == "warm" and metrics["cached_tokens"] is None:
            # Most of the prompt was cached, but the server does not report how many tokens.
            metrics["prefill_tok_s"] = None
        sample = RequestSample(
            run=self._run.id,
            target=target.name,
            **vars(self._facts),
            case=case.name,
            prompt_tokens_wanted=case.prompt_tokens,
            output_tokens_wanted=case.output_tokens,
            concurrency=case.concurrency,
            arrival=str(case.arrival),
            cache=case.cache,
            seed=case.seed,
            repeat=self._repeat,
            request=number,
            warm_up=warm_up,
            started_at=self._run.clock.stamp(trace.sent_at_s),
            late_ms=None if due_s is None else max(0.0, trace.sent_at_s - due_s) * 1e3,
            error=error,
            prompt_hash=prompt_hash(text),
            **metrics,
        )
        return sample, advised_s

    async def _read(self, text: str, trace: Trace) -> None:
        """Send a prompt, and add the chunks of the answer to the trace.

        Raises:
            LabError: the target's error.
            TimeoutError: the target has sent nothing for ``silence_s``.
        """
        loop, silence_s = asyncio.get_running_loop(), self._run.silence_s
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": self._case.output_tokens}
        sent = False
        # The deadline is moved ten times per silence_s, because moving it for each token would be too slow.
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
                    # A server that sends only keep-alives has ten times ``silence_s`` to send a token.
                    limit.reschedule(min(now_s + silence_s + step_s, last_s + 10 * silence_s))


async def calibrate(target: Target, tokens: int) -> Calibration:
    """Measure how many tokens the words of prompts have, with two requests.

    Returns:
        A calibration for prompts of about ``tokens`` tokens; the default one if the target does not count tokens.

    Raises:
        LabError: the target's error.
    """
    few, many = 8, max(64, min(tokens, 512))
    few_tokens, many_tokens = await _prompt_tokens(target, few), await _prompt_tokens(target, many)
    if few_tokens is None or many_tokens is None or many_tokens <= few_tokens:
        return Calibration()
    tokens_per_word = (many_tokens - few_tokens) / (many - few)
    return Calibration(tokens_per_word=tokens_per_word, template_tokens=few_tokens - few * tokens_per_word)


async def _prompt_tokens(target: Target, count: int) -> int | None:
    """Return how many tokens a prompt of ``count`` words has, as counted by the target."""
    text = words(secrets.randbits(32), 0, count)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    tokens = None
    async with aclosing(target.ask(body)) as chunks:
        async for chunk in chunks:
            tokens = chunk.usage.prompt if chunk.usage else tokens
    return tokens


async def _samples_of(work: Callable[[SampleCallback], Awaitable[None]]) -> AsyncGenerator[RequestSample, None]:
    """Yield the samples that ``work`` passes to its callback. Closing the generator cancels ``work``.

    The length of the queue is limited by the number of requests of the case.
    """
    ended: asyncio.Queue[RequestSample | None] = asyncio.Queue()

    async def run_work() -> None:
        try:
            await work(ended.put_nowait)
        finally:
            ended.put_nowait(None)

    task = asyncio.create_task(run_work())
    try:
        while (sample := await ended.get()) is not None:
            yield sample
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
