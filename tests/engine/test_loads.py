"""A load can be cancelled at any point, and all its callers get one result. An unload says what it waits for, further
callers join it, and can let the answers finish or stop them.
"""

import asyncio
from dataclasses import replace

import pytest

from lmx_lab.engine.loads import LOAD_BASE_S, Change, load_limit_s, same_options
from lmx_lab.errors import InvalidRequestError, LabError, ModelBusyError, NotLoadedError
from lmx_lab.values.models import LoadReport, LoadSpec, Unloading
from tests.engine.slow_engine import ONE, SETTINGS, TWO, answer, request, running, start_answer
from tests.support.engines import finish, load_entry
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio


REPORT = LoadReport(model="tiny", load_time_ms=1000.0, vram_gb=0.1)
CANCELLED = NotLoadedError("the load was cancelled")


def operation():
    return Change(kind="load", name="tiny", spec=LoadSpec(model="tiny"))


async def test_a_part_of_a_load_returns_its_result():
    assert await operation().run(asyncio.sleep(0, "found")) == "found"


async def test_cancelling_ends_the_current_part_and_waits_for_its_end():
    load, ended = operation(), asyncio.Event()

    async def part():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    running = asyncio.create_task(load.run(part()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    load.cancel(CANCELLED)
    with pytest.raises(NotLoadedError, match="the load was cancelled"):
        await running
    assert ended.is_set()


async def test_a_cancelled_load_starts_no_further_part():
    load = operation()
    load.cancel(CANCELLED)
    load.cancel(NotLoadedError("later"))
    with pytest.raises(NotLoadedError, match="the load was cancelled"):
        await load.run(asyncio.sleep(60))


async def test_work_after_a_cancelled_load_can_be_cancelled_too():
    load = operation()
    load.cancel(CANCELLED)
    assert await load.restore(asyncio.sleep(0, "restored")) == "restored"
    restoring = asyncio.create_task(load.restore(asyncio.sleep(60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    load.cancel(NotLoadedError("later"), restores=False)
    with pytest.raises(NotLoadedError, match="the load was cancelled"):
        await restoring
    assert not load.restores


def test_the_time_limit_of_a_load_is_proportional_to_its_size():
    assert load_limit_s(0, None) == LOAD_BASE_S
    assert load_limit_s(100 * 10**9, None) == LOAD_BASE_S + 5000
    assert load_limit_s(100 * 10**9, 7.0) == 7.0


async def test_only_the_first_result_counts():
    load = operation()
    load.finish(REPORT)
    load.finish(CANCELLED)
    assert await load.done is REPORT


# Unloads


PATIENT = replace(SETTINGS, drain_s=600)


@pytest.fixture
async def lab():
    """A lab with the model ``one``, whose answers have ten minutes to end."""
    async with running(PATIENT) as lab:
        await lab.manager.load(LoadSpec(model="one"))
        yield lab


async def start_unload(lab, work):
    """Start a load or unload, and wait until it waits for answers."""
    task = asyncio.create_task(work)
    await lab.until_unloading()
    return task


async def end_of(stream):
    with pytest.raises(NotLoadedError) as ended:
        async for _ in stream:
            pass
    return ended.value


def reported(lab):
    """The reported states of unloads: model, answers that are left, whether there is a time limit."""
    states = [(step.model, step.unloading) for step in lab.progress if step.unloading is not None]
    return [(model, state.answers_left, state.seconds_left is not None) for model, state in states]


def test_the_state_of_an_unload_is_one_line():
    assert str(Unloading(answers_left=1, seconds_left=28)) == "unloading, 1 answer left (28 s)"
    assert str(Unloading(answers_left=1, seconds_left=0)) == "unloading, 1 answer left (stopping now)"
    assert str(Unloading(answers_left=2, seconds_left=None)) == "unloading, 2 answers left (no time limit)"


async def test_callers_join_an_unload_wait_without_a_limit_and_stop_it(lab):
    first, second = await start_answer(lab), await start_answer(lab)
    unload = await start_unload(lab, lab.manager.unload())
    change, state = lab.manager.snapshot.change, lab.manager.snapshot.unloading
    assert (change.kind, change.model, change.stage) == ("unload", "one", "draining")
    assert (state.answers_left, state.replaced_by) == (2, None)
    assert 590 < state.seconds_left <= 600
    # Meanwhile, the model accepts nothing, and another load is refused with the state and the remedy.
    with pytest.raises(NotLoadedError, match="one is being unloaded"):
        await answer(lab)
    with pytest.raises(ModelBusyError, match=r"one: unloading, 2 answers left \(\d+ s\).*lmx-lab unload one --now"):
        await lab.manager.load(LoadSpec(model="two"))
    with pytest.raises(InvalidRequestError, match="two is not loaded; one is loaded"):
        await lab.manager.unload("two")
    joined = [asyncio.create_task(lab.manager.unload(*name, wait=True)) for name in ((), ("one",))]
    await auntil(lambda: reported(lab)[-1:] == [("one", 2, False)])
    await first.aclose()
    await auntil(lambda: reported(lab)[-1:] == [("one", 1, False)])
    stopping = asyncio.create_task(lab.manager.unload(wait=False))
    error = await end_of(second)
    assert error.message == (
        "the model was unloaded before this request ended, because it was requested to stop running requests "
        "immediately; try again when a model is loaded"
    )
    freed = await unload
    assert freed > 0
    assert [await task for task in (*joined, stopping)] == [freed] * 3
    assert reported(lab)[0] == ("one", 2, True)
    assert lab.stages[-1] == ("one", "unloaded")
    assert lab.manager.snapshot.change is None
    assert await lab.manager.unload(wait=False) == 0, "without a model"


async def test_calls_at_the_same_time_are_one_unload(lab):
    stream = await start_answer(lab)
    calls = (lab.manager.unload(), lab.manager.unload("one"), lab.manager.unload("one", wait=False))
    freed = asyncio.gather(*calls)
    assert "requested to stop" in (await end_of(stream)).message
    assert len(set(await freed)) == 1


@pytest.mark.slow
async def test_answers_end_with_an_error_at_the_time_limit():
    async with running(replace(SETTINGS, drain_s=0.3)) as lab:
        await lab.manager.load(LoadSpec(model="one"))
        stream = await start_answer(lab)
        unload = await start_unload(lab, lab.manager.unload())
        error = await end_of(stream)
        assert "before this request ended, because running requests had 0.3 s to end; try again" in error.message
        assert await unload > 0


@pytest.mark.slow
async def test_an_unload_that_waits_without_a_limit_ends_with_the_answer():
    async with running(replace(SETTINGS, drain_s=0.0)) as lab:
        await lab.manager.load(LoadSpec(model="one"))
        stream = await lab.manager.submit(request(tokens=200))
        await anext(stream)
        unload = asyncio.create_task(lab.manager.unload(wait=True))
        async for _ in stream:
            pass
        assert stream.report is not None
        assert await unload > 0


async def test_an_unload_continues_after_its_callers_were_cancelled(lab):
    stream = await start_answer(lab)
    unload = await start_unload(lab, lab.manager.unload())
    unload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unload
    assert lab.manager.snapshot.unloading is not None
    load = asyncio.create_task(lab.manager.load(LoadSpec(model="two"), if_busy="wait"))
    await stream.aclose()
    assert (await load).model == "two"
    assert lab.stages[-3:] == [("one", "unloaded"), ("two", "load"), ("two", "loaded")]


@pytest.mark.parametrize("finish_queued", [False, True])
async def test_a_load_waits_for_running_requests_and_for_queued_ones_if_this_is_requested(finish_queued):
    async with running(PATIENT) as lab:
        await load_entry(lab.manager, ONE)
        streams = [await lab.manager.submit(request(tokens=200)) for _ in range(4)]
        load = asyncio.create_task(load_entry(lab.manager, TWO, finish_queued=finish_queued))
        reports = await asyncio.gather(*map(finish, streams), return_exceptions=True)
        assert (await load).model == "two"
        ended = [each[1].output_tokens if isinstance(each, tuple) else each.message for each in reports]
        refusal = "the model was replaced by two before this request started"
        assert ended[:2] == [200] * 2
        assert ended[2:] == [200] * 2 if finish_queued else all(refusal in each for each in ended[2:])


async def test_a_load_that_waits_for_queued_requests_waits_no_longer_than_drain_s():
    async with running(replace(SETTINGS, drain_s=0.05)) as lab:
        await load_entry(lab.manager, ONE)
        streams = [await lab.manager.submit(request(tokens=8000)) for _ in range(3)]
        await load_entry(lab.manager, TWO, finish_queued=True)
        for stream in streams:
            assert "the model was replaced by two" in (await end_of(stream)).message


async def test_the_model_that_a_load_replaces_is_unloading_and_can_be_stopped_by_its_name(lab):
    stream = await start_answer(lab)
    load = await start_unload(lab, lab.manager.load(LoadSpec(model="two")))
    state = lab.manager.snapshot.unloading
    assert (state.answers_left, state.replaced_by) == (1, "two")
    stopping = asyncio.create_task(lab.manager.unload("one", wait=False))
    assert "the model was replaced by two before this request ended" in (await end_of(stream)).message
    assert (await load).model == "two"
    assert await stopping > 0
    assert await answer(lab) == "two"
    stages = list(dict.fromkeys(lab.stages))  # Each state is reported once or twice.
    assert stages[-4:] == [("two", "load"), ("one", "unloading"), ("one", "unloaded"), ("two", "loaded")]


@pytest.mark.parametrize("by_name", [False, True])
async def test_a_model_stays_if_the_load_that_waits_for_its_answers_is_cancelled(lab, by_name):
    stream = await start_answer(lab)
    load = await start_unload(lab, lab.manager.load(LoadSpec(model="two")))
    waiting = asyncio.create_task(lab.manager.unload("one", wait=True))
    await auntil(lambda: reported(lab)[-1:] == [("one", 1, False)])
    if by_name:
        await lab.manager.cancel_load("two")
    else:
        assert await lab.manager.unload() == 0
    with pytest.raises(NotLoadedError, match="the load of two was cancelled; one is still loaded"):
        await load
    assert await waiting == 0
    await anext(stream)
    assert lab.manager.snapshot.unloading is None
    assert await answer(lab) == "one"
    await stream.aclose()


@pytest.mark.parametrize("joins", [False, True])
async def test_a_load_can_stop_the_answers_of_the_previous_model(lab, joins):
    stream = await start_answer(lab)
    waiting = [await start_unload(lab, lab.manager.load(LoadSpec(model="two")))] if joins else []
    load = asyncio.create_task(lab.manager.load(LoadSpec(model="two", wait=False)))
    assert "requested to stop" in (await end_of(stream)).message
    assert [(await task).model for task in (load, *waiting)] == ["two"] * (1 + joins)
    assert len(lab.engine.specs) == 2


@pytest.mark.slow
async def test_in_swap_mode_the_replaced_model_is_unloading_and_can_be_stopped():
    async with running(replace(PATIENT, swap=True)) as lab:
        await lab.manager.load(LoadSpec(model="one"))
        stream = await start_answer(lab)
        swap = await start_unload(lab, answer(lab, "two"))
        state = lab.manager.snapshot.unloading
        assert (state.answers_left, state.replaced_by) == (1, "two")
        await lab.manager.unload("one", wait=False)
        assert "the model was replaced by two" in (await end_of(stream)).message
        assert await swap == "two"


async def test_stopping_the_server_ends_an_unload_without_a_time_limit(lab):
    stream = await start_answer(lab)
    unload = await start_unload(lab, lab.manager.unload(wait=True))
    await lab.manager.quiesce(0)
    assert "the server was stopped before this request ended" in (await end_of(stream)).message
    assert await unload > 0


async def test_quiescing_ends_requests_that_take_too_long_and_keeps_the_model():
    async with running() as lab:
        await lab.manager.load(LoadSpec(model="one"))
        stream = await start_answer(lab)
        await lab.manager.quiesce(0.01)
        assert "the server was stopped before this request ended" in (await end_of(stream)).message
        assert await answer(lab) == "one"


async def test_an_unload_ends_if_its_engine_dies(lab):
    stream = await start_answer(lab)
    unload = await start_unload(lab, lab.manager.unload(wait=True))
    await lab.lose(lab.manager.main)
    with pytest.raises(LabError):
        async for _ in stream:
            pass
    assert await unload == 0
    assert lab.manager.snapshot.unloading is None


def test_the_name_the_engine_and_the_wait_of_a_load_do_not_change_the_loaded_model():
    spec = LoadSpec(model="org/tiny", context_length=7)
    assert same_options(spec, replace(spec, model="tiny", engine="mlx", wait=True))
    assert not same_options(spec, replace(spec, context_length=8))
