"""Every request of a case gives a sample, also with servers that fail in various ways."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest

from lmx_lab.bench import runner
from lmx_lab.bench.case import Case, Poisson, prompt_hash
from lmx_lab.bench.load_generator import MAX_FAILURES, CaseRun, Run
from lmx_lab.bench.targets import ChatTarget
from lmx_lab.errors import InvalidRequestError, UnreachableError
from tests.support.model_server import (
    DROP,
    STALL,
    WORDS,
    Gate,
    Scripted,
    after_calibration,
    chunk,
    ending,
    json_answer,
    refuses,
    token,
)
from tests.support.samples import collect
from tests.support.sockets import free_port

pytestmark = pytest.mark.anyio
CASE = {"prompt_tokens": 16, "output_tokens": 4, "requests": 3, "warm_up": 0}


def case(**changes):
    return Case(**{**CASE, **changes})


async def run_case(server, *, silence_s=60.0, **changes):
    return await collect(runner.samples(ChatTarget(server.url), case(**changes), silence_s=silence_s))


def codes(samples):
    return [sample.error.partition(":")[0] if sample.error else None for sample in samples]


async def test_a_case_sends_its_warm_up_and_then_its_requests_with_standard_fields():
    with Scripted(WORDS) as server:
        samples = await run_case(server, warm_up=2)
    assert [(sample.warm_up, sample.request) for sample in samples] == [
        *[(True, n) for n in range(2)],
        *[(False, n) for n in range(3)],
    ]
    for sample in samples:
        assert (sample.error, sample.model, sample.target) == (None, "scripted", server.url.removeprefix("http://"))
        assert (sample.output_tokens, sample.counted_by, sample.finish_reason) == (4, "usage", "length")
        assert 0 < sample.ttft_ms <= sample.e2e_ms
        assert sample.late_ms is None, "only arrivals have a due time"
    assert [sample.started_at for sample in samples] == sorted(sample.started_at for sample in samples)
    fields = ("max_tokens", "messages", "model", "stream", "stream_options")
    assert {tuple(sorted(body)) for body in server.bodies} == {fields}
    assert [body["max_tokens"] for body in server.bodies] == [1, 1, 4, 4, 4, 4, 4]


async def test_cold_prompts_begin_differently_in_all_runs():
    with Scripted(WORDS) as server:
        for _ in range(2):
            await run_case(server, prompt_tokens=40, warm_up=1)
        texts = [body["messages"][0]["content"] for body in server.bodies if body["max_tokens"] > 1]
    assert len(texts) == 8
    assert len({" ".join(text.split()[:4]) for text in texts}) == 8


@pytest.mark.parametrize("tokens_per_word", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("prompt_tokens", [60, 300])
async def test_prompts_have_the_requested_length_as_counted_by_the_target(tokens_per_word, prompt_tokens):
    """The server counts 30 tokens for the template, and a token for each comma and full stop."""

    def counting(body):
        text = body["messages"][0]["content"]
        count = 30 + round(tokens_per_word * len(text.split())) + text.count(",") + text.count(".")
        return [token("a"), *ending("length", usage=(count, body["max_tokens"]))]

    # With and without a list of models.
    models = ("scripted",) if prompt_tokens == 60 else json_answer({"error": "no cache"}, status=500)
    with Scripted(counting, models=models) as server:
        samples = await run_case(server, prompt_tokens=prompt_tokens, warm_up=1)
    found = [sample.prompt_tokens for sample in samples if not sample.warm_up]
    assert all(count is not None and abs(count - prompt_tokens) <= 0.03 * prompt_tokens for count in found), found


async def test_an_unreachable_target_has_samples_and_gets_no_more_requests_after_some():
    samples = await collect(runner.samples(ChatTarget(f"http://127.0.0.1:{free_port()}"), case(requests=8, warm_up=1)))
    assert codes(samples) == ["unreachable"] * 9
    skipped = Counter("not sent" in (sample.error or "") for sample in samples)
    assert skipped == {False: MAX_FAILURES, True: 9 - MAX_FAILURES}
    assert all(sample.ttft_ms is None and sample.output_tokens == 0 for sample in samples)


async def test_only_consecutive_connection_failures_end_a_case():
    with Scripted(WORDS) as server:
        target = Flickering(server.url)
        samples = await collect(runner.samples(target, case(requests=12)))
    assert codes(samples) == ["unreachable", "unreachable", None] * 4


class Flickering(ChatTarget):
    """Accepts every third connection."""

    requests = 0

    async def ask(self, body):
        self.requests += body["max_tokens"] > 1
        if self.requests % 3:
            raise UnreachableError("nothing answers")
        async for piece in super().ask(body):
            yield piece


async def test_a_lost_connection_gives_a_sample_with_the_tokens_so_far():
    broken = [token("a"), token("b"), DROP]
    with Scripted(after_calibration(WORDS, broken, WORDS)) as server:
        samples = await run_case(server)
    assert codes(samples) == [None, "connection-lost", None]
    assert (samples[1].output_tokens, samples[1].counted_by, samples[1].finish_reason) == (2, "chunks", None)


async def test_errors_of_the_server_do_not_end_a_case():
    refusals = [refuses(500, "internal-error", "it broke")] * (MAX_FAILURES + 1)
    with Scripted(after_calibration(*refusals, WORDS)) as server:
        samples = await run_case(server, requests=len(refusals) + 1)
    assert codes(samples) == ["internal-error"] * len(refusals) + [None]
    assert "it broke" in samples[0].error


@pytest.mark.slow
@pytest.mark.parametrize("begun", [[], [token("a")]])
async def test_a_request_fails_if_the_target_sends_nothing_for_a_while(begun):
    with Scripted(after_calibration([*begun, STALL], WORDS)) as server:
        samples = await run_case(server, silence_s=2.0)
        await server.until(lambda: server.left == 1)
    assert codes(samples) == ["silent", None, None]
    assert samples[0].output_tokens == len(begun)


@pytest.mark.slow
async def test_a_request_with_keep_alives_only_fails_in_the_end():
    forever = [step for _ in range(600) for step in (b": prompt 1/2\n\n", 0.05)]
    with Scripted(after_calibration(forever)) as server:
        assert codes(await run_case(server, requests=1, silence_s=0.3)) == ["silent"]


async def test_an_answer_without_a_token_is_a_failure():
    with Scripted(after_calibration([chunk({"role": "assistant"}), *ending("stop")])) as server:
        assert codes(await run_case(server, requests=2)) == ["empty", "empty"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [after_calibration([STALL]), [STALL]], ids=["after the calibration", "always"])
async def test_a_stuck_target_gets_no_more_requests_after_some(script):
    with Scripted(script) as server:
        samples = await run_case(server, requests=MAX_FAILURES + 3, silence_s=0.3)
    assert codes(samples) == ["silent"] * MAX_FAILURES + ["unreachable"] * 3


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 10**6, "1", True])
async def test_an_invalid_time_limit_is_refused(seconds):
    with pytest.raises(InvalidRequestError, match=r"silence_s is .*up to 86,400"):
        Run(silence_s=seconds)


@pytest.mark.slow
async def test_keep_alives_prevent_the_time_limit():
    """Comments arrive more often than the limit, for longer than the limit."""
    waits = [step for _ in range(25) for step in (b": prompt 1/2\n\n", 0.1)]
    with Scripted(after_calibration([*waits, *WORDS])) as server:
        samples = await run_case(server, requests=1, silence_s=2.0)
    assert codes(samples) == [None]
    assert samples[0].ttft_ms > 2200


async def test_concurrency_is_the_number_of_running_requests():
    gates = [Gate() for _ in range(6)]
    answers = [[token("a"), gate, *ending("stop")] for gate in gates]
    with Scripted(after_calibration(*answers)) as server:
        measured = asyncio.create_task(run_case(server, requests=6, concurrency=3))
        for gate in gates[:3]:
            await gate.reached()
        assert not measured.done()
        assert len(server.bodies) == 2 + 3
        gates[1].open()
        await gates[3].reached()
        assert len(server.bodies) == 2 + 4
        for gate in gates:
            gate.open()
        samples = await measured
    assert codes(samples) == [None] * 6
    first = server.bodies[2 + 1]["messages"][0]["content"]
    assert samples[0].prompt_hash == prompt_hash(first), "samples come as their requests end"


async def test_arrivals_wait_for_free_slots_only_and_report_their_delay():
    gate = Gate()
    held = [token("a"), gate, *ending("stop")]
    with Scripted(after_calibration(held, held, WORDS)) as server:
        poisson = Poisson(per_second=1000)
        measured = asyncio.create_task(run_case(server, requests=4, concurrency=2, arrival=poisson))
        await server.until(lambda: len(server.bodies) == 2 + 2)
        await gate.reached()
        await asyncio.sleep(0.2)
        assert len(server.bodies) == 2 + 2
        gate.open()
        samples = sorted(await measured, key=lambda sample: sample.request)
    late_ms = [sample.late_ms or 0.0 for sample in samples]
    assert min(late_ms[2:]) > 150
    assert all((sample.ttft_ms or 0) > 150 for sample in samples[2:]), "their users have waited since they were due"
    assert {sample.arrival for sample in samples} == {"poisson(1000/s)"}


async def test_repeats_have_different_arrivals():
    drawn = []

    class Noted(Poisson):
        def times_s(self, count, seed):
            drawn.append(super().times_s(count, seed))
            return drawn[-1]

    with Scripted(WORDS) as server:
        noted = case(arrival=Noted(per_second=500))
        for plan in (noted, [noted, noted]):
            await collect(runner.samples(ChatTarget(server.url), plan))
    assert drawn[0] == drawn[1] != drawn[2]


async def test_with_a_warm_cache_and_unknown_hits_prefill_speed_is_unknown():
    with Scripted(WORDS) as server:
        warm = await run_case(server, cache="warm", warm_up=1, prompt_tokens=40)
        cold = await run_case(server, prompt_tokens=40)
    assert {sample.prefill_tok_s for sample in warm} == {None}
    assert None not in {sample.prefill_tok_s for sample in cold}


async def test_closing_the_generator_cancels_running_requests():
    before = asyncio.all_tasks()
    with Scripted(after_calibration(WORDS, [token("a"), STALL])) as server:
        samples = runner.samples(ChatTarget(server.url), case(requests=4, concurrency=2))
        async with aclosing(samples):
            assert (await anext(samples)).error is None
            await server.until(lambda: len(server.bodies) >= 2 + 2)
        await server.until(lambda: server.left >= 1)
    assert asyncio.all_tasks() == before


async def test_a_refused_user_waits_as_the_server_advises(monkeypatch):
    slept = []
    loop, real_sleep = asyncio.get_running_loop(), asyncio.sleep

    async def sleep(seconds):
        # Engines of other tests may be running on other loops.
        if asyncio.get_running_loop() is loop:
            slept.append(seconds)
        else:
            await real_sleep(seconds)

    monkeypatch.setattr("lmx_lab.bench.load_generator.asyncio.sleep", sleep)
    answers = [
        refuses(429, "queue-full", "full", retry_after="2"),
        refuses(429, "queue-full", retry_after="900"),
        WORDS,
    ]
    with Scripted(after_calibration(*answers)) as server:
        case_run = CaseRun(ChatTarget(server.url), case(), repeat=0, run=Run())
        samples = await collect(case_run.measure(range(3)))
    assert codes(samples) == ["queue-full", "queue-full", None]
    assert slept == [0.0, 2.0, 5.0]
