"""On every engine, a request ends exactly once in any case, its slot becomes free, and the engine continues."""

import asyncio
import contextlib
import gc
import threading

import pytest

from lmx_lab.engine import AnswerFormat
from lmx_lab.engine.loads import Change, Drain
from lmx_lab.errors import EngineDeadError, GenerationTimeoutError, NotLoadedError, QueueFullError
from tests.contract.engines.entries import CONTEXT, FEW
from tests.support.engines import engine_alone, finish, load_on, numbers, request, run, until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
LONG = {"max_tokens": CONTEXT, "ignore_eos": True}
"""A request that takes seconds. No test waits for its end."""


async def occupy_slots(model):
    """Occupy both slots with requests that decode; return their streams, which must be closed to free the slots."""
    streams = [await model.submit(request(prompt=numbers(5, start=at), **LONG)) for at in (100, 200)]
    for stream in streams:
        await anext(stream)
    assert model.snapshot.active_requests == 2
    return streams


async def cancel(*streams):
    for stream in streams:
        await stream.aclose()


async def check_engine_answers(model):
    await until_idle(model)
    assert (await run(model, ignore_eos=True))[1].output_tokens == 8


# Cancellation


async def test_a_request_may_be_cancelled_while_it_waits(busy):
    streams = await occupy_slots(busy)
    waits = await busy.submit(request())
    assert waits.progress is None
    await waits.aclose()
    while busy.snapshot.queued_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert busy.snapshot.active_requests == 2
    await cancel(*streams)
    await check_engine_answers(busy)
    assert waits.report is None


async def test_a_request_may_be_cancelled_while_its_prompt_is_computed(busy):
    stream = await busy.submit(request(prompt=numbers(8000), max_tokens=100))
    while stream.progress is None:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await stream.aclose()
    await check_engine_answers(busy)
    assert stream.report is None


async def test_a_request_may_be_cancelled_while_it_decodes(busy):
    before = busy.snapshot.totals.output_tokens
    await cancel(*await occupy_slots(busy))
    await check_engine_answers(busy)
    # llama.cpp has computed some more tokens when the cancellation reaches it.
    assert 10 <= busy.snapshot.totals.output_tokens - before < CONTEXT


async def test_a_stream_that_is_dropped_is_cancelled(busy):
    streams = await occupy_slots(busy)
    waits = await busy.submit(request(**LONG))
    del streams, waits
    gc.collect()
    await check_engine_answers(busy)


async def test_cancelling_the_submit_leaves_nothing_behind(busy):
    for turns in range(12):
        task = asyncio.create_task(busy.submit(request(**LONG)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancel(await task)
    gc.collect()
    await check_engine_answers(busy)


async def test_a_cancelled_request_frees_its_slot_for_the_next_one(busy):
    first, second = await occupy_slots(busy)
    waits = await busy.submit(request(ignore_eos=True))
    await first.aclose()
    assert (await finish(waits))[1].output_tokens == 8
    await second.aclose()


async def test_a_request_with_a_grammar_may_wait_for_a_slot(busy):
    streams = await occupy_slots(busy)
    form = AnswerFormat(kind="regex", text="[ab]{9}")
    asking = asyncio.create_task(busy.submit(request(answer_format=form, max_tokens=20)))
    await asyncio.sleep(0)
    await cancel(*streams)
    assert len((await finish(await asking))[0]) == 9


# Deadlines


@pytest.mark.parametrize("prompt", [5, 8000])
async def test_a_running_request_ends_at_its_deadline(busy, prompt):
    with pytest.raises(GenerationTimeoutError, match=r"time limit of 0\.02 s"):
        await run(busy, prompt=numbers(prompt), timeout_s=0.02, **LONG)
    await check_engine_answers(busy)


async def test_a_queued_request_ends_at_its_deadline(busy):
    streams = await occupy_slots(busy)
    with pytest.raises(GenerationTimeoutError):
        await run(busy, timeout_s=0.02)
    assert busy.snapshot.active_requests == 2
    await cancel(*streams)
    await check_engine_answers(busy)


# The queue


async def test_a_full_queue_refuses_requests_and_loses_none(busy):
    streams = await occupy_slots(busy)
    waiting = [await busy.submit(request(max_tokens=20, ignore_eos=True)) for _ in range(2)]
    now = busy.snapshot
    assert (now.active_requests, now.queued_requests, now.context_length) == (2, 2, CONTEXT)
    assert now.memory_bytes > 1_000_000
    with pytest.raises(QueueFullError) as refused:
        await busy.submit(request())
    assert refused.value.retry_after_s >= 1
    await cancel(*streams)
    assert [(await finish(stream))[1].output_tokens for stream in waiting] == [20, 20]
    await check_engine_answers(busy)


async def test_queued_requests_run_in_the_order_of_arrival(busy):
    streams = await occupy_slots(busy)
    order = []

    async def waits(at, stream):
        await finish(stream)
        order.append(at)

    waiting = [await busy.submit(request(max_tokens=100, ignore_eos=True)) for _ in range(2)]
    tasks = [asyncio.create_task(waits(at, stream)) for at, stream in enumerate(waiting)]
    await streams[0].aclose()
    await asyncio.gather(*tasks)
    assert order == [0, 1]
    await cancel(*streams)


async def test_two_event_loops_use_one_engine_at_once(busy):
    alone = (await run(busy, max_tokens=60))[0]
    results = []

    async def elsewhere():
        results.extend([(await run(busy, max_tokens=60))[0] for _ in range(5)])

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    here = [(await run(busy, max_tokens=60))[0] for _ in range(5)]
    await asyncio.to_thread(thread.join)
    assert [*here, *results] == [alone] * 10


async def test_requests_end_when_the_event_loop_of_their_caller_closes(busy):
    kept = []

    async def elsewhere():
        kept.extend([await busy.submit(request(**LONG)) for _ in range(2)])
        await anext(kept[0])

    await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    # These requests need both slots, and the requests of the closed loop would take seconds.
    results = await asyncio.wait_for(asyncio.gather(run(busy, ignore_eos=True), run(busy, ignore_eos=True)), 60)
    assert [report.output_tokens for _, report in results] == [8, 8]
    assert kept[0].report is None


# Unloads


def drain(model, limit_s=60):
    change = Change[int](kind="unload", name=model.model.entry.id)
    return Drain(model.model, "the model was unloaded", change, limit_s=limit_s).run()


async def test_an_unload_waits_for_running_requests_and_refuses_queued_ones(own, ends):
    running = [await own.submit(request(max_tokens=1000, ignore_eos=True)) for _ in range(2)]
    for stream in running:
        await anext(stream)
    waits = [await own.submit(request()) for _ in range(2)]
    used = own.engine.memory.used
    await drain(own)
    freed = await own.close()
    assert freed > 1_000_000
    for stream in running:
        assert (await finish(stream))[1].output_tokens == 1000
    for stream in waits:
        with pytest.raises(NotLoadedError, match="the model was unloaded before this request started"):
            await finish(stream)
    now = own.snapshot
    assert (now.active_requests, now.queued_requests) == (0, 0)
    # Only MLX measures what all its models use.
    if used is not None:
        assert used - own.engine.memory.used > 1_000_000
    assert set(ends.values()) == {1}
    own.model.admission.reopen()
    with pytest.raises(NotLoadedError, match="long has been unloaded; load one first"):
        await run(own)


async def test_an_unload_ends_running_requests_at_its_time_limit(long_models, model_format):
    async with engine_alone(model_format, FEW) as engine:
        model = await load_on(engine, long_models[model_format])
        streams = await occupy_slots(model)
        await drain(model, limit_s=0.05)
        assert await model.close() > 1_000_000
        for stream in streams:
            with pytest.raises(NotLoadedError, match="the model was unloaded before this request ended"):
                await finish(stream)
        model = await load_on(engine, long_models[model_format])
        await check_engine_answers(model)
        await model.close()


async def test_closing_ends_running_and_queued_requests_and_an_engine_can_start_again(long_models, model_format, ends):
    async with engine_alone(model_format, FEW) as engine:
        model = await load_on(engine, long_models[model_format])
        streams = [*await occupy_slots(model), await model.submit(request())]
        await model.close(EngineDeadError("the engine was stopped"))
        await asyncio.to_thread(engine.stop)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await finish(stream)
        assert set(ends.values()) == {1}
        await asyncio.to_thread(engine.stop)
        model = await load_on(engine, long_models[model_format])
        await check_engine_answers(model)
        await model.close(EngineDeadError("the engine was stopped"))
