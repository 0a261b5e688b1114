"""With ``Settings.resident`` above 1, several models stay in memory; the one that was used least recently leaves."""

import asyncio
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.engine import EmbeddingRequest
from lmx_lab.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelBusyError,
    NotLoadedError,
    OtherModelLoadedError,
    OutOfMemoryError,
    UnusableModelError,
)
from lmx_lab.server.metrics import Metrics
from lmx_lab.values.models import LoadSpec
from tests.engine.slow_engine import EMBEDDER, ONE, SETTINGS, THREE, TWO, answer, request, running, start_answer
from tests.support.engines import load_entry
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
TEXT = EmbeddingRequest(inputs=("hello",))


def keeping(resident=2, **options):
    return running(replace(SETTINGS, resident=resident, **options))


@pytest.fixture
async def lab():
    async with keeping() as lab:
        yield lab


async def load(lab, *entries, **options):
    for entry in entries:
        await load_entry(lab.manager, entry, LoadSpec(model=entry.id, **options))


def in_memory(lab):
    """The models in memory, the main one first."""
    now = lab.manager.snapshot
    names = [state.entry.id for state in now.models]
    return sorted(names, key=lambda name: (name != now.model, name))


# Loads


async def test_a_load_adds_a_model_which_becomes_the_main_one(lab):
    await load(lab, ONE, TWO)
    assert in_memory(lab) == ["two", "one"]
    assert [await answer(lab, name) for name in ("one", "two", None)] == ["one", "two", "two"]
    assert ("one", "unloaded") not in lab.stages
    # It is in memory already.
    assert (await lab.manager.load(LoadSpec(model="one"))).load_s == 0
    assert in_memory(lab) == ["one", "two"]
    assert await answer(lab) == "one"
    assert [spec.model for spec in lab.engine.specs] == ["one", "two"]


async def test_the_model_that_was_used_least_recently_leaves(lab):
    await load(lab, ONE, TWO)
    await answer(lab, "one")
    await load(lab, THREE)
    assert in_memory(lab) == ["three", "one"]
    assert lab.stages[-3:] == [("three", "load"), ("two", "unloaded"), ("three", "loaded")]
    with pytest.raises(OtherModelLoadedError, match=r"two is not loaded; three and one are loaded; load one first"):
        await answer(lab, "two")


async def test_a_model_without_requests_leaves_before_one_that_answers(lab):
    await load(lab, ONE)
    stream = await start_answer(lab)
    await load(lab, TWO, THREE)
    assert in_memory(lab) == ["three", "one"]
    stream.close()


async def test_answers_of_a_model_that_leaves_end_first():
    async with keeping(drain_s=0.2) as lab:
        await load(lab, ONE, TWO)
        streams = [await lab.manager.submit(request(name, tokens=8000)) for name in ("one", "two")]
        loading = asyncio.create_task(load_entry(lab.manager, THREE))
        await lab.until_unloading()
        leaving = next(state for state in lab.manager.snapshot.models if state.unloading)
        assert (leaving.entry.id, leaving.unloading.replaced_by) == ("one", "three")
        with pytest.raises(NotLoadedError, match="the model was replaced by three before"):
            async for _ in streams[0]:
                pass
        await loading
        assert in_memory(lab) == ["three", "two"]
        assert [await anext(streams[1])]
        streams[1].close()


async def test_a_model_with_other_options_replaces_itself(lab):
    await load(lab, ONE, TWO)
    await lab.manager.keep("one", pin=True, ttl_s=600)
    await load(lab, ONE, context_length=7)
    assert in_memory(lab) == ["one", "two"]
    (one,) = [state for state in lab.manager.snapshot.models if state.entry.id == "one"]
    assert (one.pinned, one.ttl_s) == (True, 600)
    assert lab.engine.specs[-1].context_length == 7


async def test_models_that_have_left_for_a_load_that_fails_are_loaded_again(lab):
    await load(lab, ONE, TWO)
    lab.engine.failures["three"] = UnusableModelError("three is broken")
    with pytest.raises(UnusableModelError, match="three is broken; the previous model one is loaded again"):
        await load(lab, THREE)
    assert in_memory(lab) == ["two", "one"]
    await lab.manager.unload("one")
    with pytest.raises(UnusableModelError, match="three is broken; two is still loaded"):
        await load(lab, THREE)
    assert in_memory(lab) == ["two"]


async def test_a_cancelled_load_leaves_the_models_in_memory(lab):
    await load(lab, ONE, TWO)
    lab.engine.hangs = "three"
    loading = asyncio.create_task(load_entry(lab.manager, THREE))
    await auntil(lambda: lab.manager.snapshot.change and lab.manager.snapshot.change.stage == "loading")
    assert lab.manager.snapshot.state == "ready"
    assert await answer(lab) == "two"
    with pytest.raises(ModelBusyError, match="three is being loaded"):
        await lab.manager.unload("two")
    await lab.manager.cancel_load("three")
    with pytest.raises(NotLoadedError, match="load of three was cancelled; the previous model one is loaded again"):
        await loading
    assert in_memory(lab) == ["two", "one"]


async def test_loads_that_differ_only_in_how_long_the_model_stays_are_joined(lab):
    await load(lab, TWO)
    lab.engine.resume.clear()
    options = [{}, {"wait": False}, {"wait": True}, {"ttl_s": 600.0}, {"pin": True}]
    loads = [asyncio.create_task(lab.manager.load(LoadSpec(model="one", **each))) for each in options]
    await auntil(lambda: len(lab.engine.specs) == 2)
    lab.engine.resume.set()
    async with asyncio.timeout(20):
        assert [(await each).model for each in loads] == ["one"] * 5
    state = lab.manager.snapshot.main
    assert (state.entry.id, state.pinned, state.ttl_s) == ("one", True, 600)
    assert [spec.model for spec in lab.engine.specs] == ["two", "one"]


async def test_a_load_whose_files_are_found_later_joins_one_that_has_begun(lab, monkeypatch):
    found, names, find = threading.Event(), [], lab.manager.catalog.find_formats

    def find_slowly(name, **options):
        names.append(name)
        assert len(names) > 1 or found.wait(20)
        return find(name, **options)

    monkeypatch.setattr(lab.manager.catalog, "find_formats", find_slowly)
    lab.engine.resume.clear()
    first = asyncio.create_task(lab.manager.load(LoadSpec(model="one")))
    await auntil(lambda: names)
    second = asyncio.create_task(lab.manager.load(LoadSpec(model="one", pin=True)))
    await auntil(lambda: lab.engine.specs)
    found.set()
    await asyncio.wait([first], timeout=0.2)
    lab.engine.resume.set()
    assert [(await each).model for each in (first, second)] == ["one", "one"]
    assert len(lab.engine.specs) == 1


async def test_an_encoder_that_is_loaded_in_two_ways_at_once_is_in_memory_once(lab):
    await asyncio.gather(load(lab, EMBEDDER, pin=True), load(lab, EMBEDDER, prompt_lookup=False))
    assert [state.entry.id for state in lab.manager.snapshot.models] == ["embedder"]
    await load(lab, EMBEDDER, prompt_lookup=True, pin=True)
    assert [state.entry.id for state in lab.manager.snapshot.models] == ["embedder"]


# Memory


async def test_memory_decides_how_many_models_stay():
    async with keeping("auto") as lab:
        await load(lab, ONE)
        size = lab.manager.main.memory_bytes
    async with keeping("auto", memory_limit_bytes=int(size * 2.5)) as lab:
        lab.engine.needed_bytes = size
        await load(lab, ONE, TWO)
        assert in_memory(lab) == ["two", "one"]
        await load(lab, THREE)
        assert in_memory(lab) == ["three", "two"]
        await lab.manager.keep("two", pin=True)
        await lab.manager.keep("three", pin=True)
        with pytest.raises(OutOfMemoryError, match=r"; pinned models stay in memory: three, two; lab\.keep"):
            await load(lab, ONE)
        await lab.manager.keep("three", pin=False)
        await load(lab, ONE)
        assert in_memory(lab) == ["one", "two"]


async def test_unused_models_leave_if_memory_is_short_but_the_main_one_stays(lab):
    await load(lab, ONE, TWO)
    stream = await lab.manager.submit(request("one", tokens=8000))
    lab.manager.budget.evict(10**9)
    assert await answer(lab, "two") == "two"
    assert in_memory(lab) == ["two", "one"]
    await stream.aclose()
    await auntil(lambda: lab.manager.models[1].admission.active == 0)
    lab.manager.budget.evict(10**9)
    await auntil(lambda: (lab.progress[-1].model, lab.progress[-1].message) == ("one", "memory is short"))
    assert in_memory(lab) == ["two"]
    lab.manager.budget.evict(10**9)
    assert await answer(lab, "two") == "two"


# Pins and times to live


async def test_a_pinned_model_stays_and_does_not_count(lab):
    await load(lab, ONE, pin=True)
    await load(lab, TWO, THREE, EMBEDDER)
    assert in_memory(lab) == ["embedder", "one", "three"]
    with pytest.raises(InvalidRequestError, match=r"one is pinned: it stays .*lab\.keep\('one', pin=False\)"):
        await lab.manager.unload("one")
    assert not (await lab.manager.keep("one", pin=False)).pinned
    await load(lab, TWO)
    assert in_memory(lab) == ["two", "embedder"]
    with pytest.raises(InvalidRequestError, match=r"one is not loaded; two and embedder are loaded"):
        await lab.manager.keep("one", pin=True)


async def test_the_only_model_may_be_pinned_and_is_then_not_unloaded():
    async with running() as lab:
        await load(lab, ONE, pin=True)
        with pytest.raises(InvalidRequestError, match="one is pinned"):
            await lab.manager.unload()
        await load(lab, TWO)
        assert in_memory(lab) == ["two", "one"]
        await lab.manager.unload()
        assert await answer(lab) == "one"


async def test_a_model_leaves_after_its_time_to_live(lab):
    await load(lab, ONE, ttl_s=0.05)
    await load(lab, TWO)
    await auntil(lambda: lab.progress[-1].message == "idle for 0.05 s")
    assert in_memory(lab) == ["two"]
    await lab.manager.keep("two", ttl_s=0)
    await auntil(lambda: in_memory(lab) == [])
    assert lab.manager.snapshot.unload_cause == "idle"


async def test_a_pinned_model_and_one_that_stays_have_no_time_to_live():
    async with keeping(3, idle_unload_s=0.05) as lab:
        await load(lab, ONE, pin=True)
        await load(lab, TWO, ttl_s="never")
        await load(lab, THREE)
        await auntil(lambda: in_memory(lab) == ["two", "one"])
        assert [state.ttl_s for state in lab.manager.snapshot.models] == [None, 0.05]


async def test_a_model_that_is_pinned_while_it_leaves_for_a_load_stays_and_another_one_leaves(lab):
    await load(lab, ONE, TWO)
    streams = [await lab.manager.submit(request(name, tokens=8000)) for name in ("one", "two")]
    loading = asyncio.create_task(load_entry(lab.manager, THREE, LoadSpec(model="three", wait=True)))
    await lab.until_unloading()
    await lab.manager.keep("one", pin=True)
    await loading
    # Pinned models do not count, so the other one need not leave.
    assert in_memory(lab) == ["three", "one", "two"]
    assert ("one", "unloaded") not in lab.stages
    assert await answer(lab, "one") == "one"
    for stream in streams:
        assert [await anext(stream)]
        stream.close()


async def test_a_model_that_is_being_unloaded_by_request_cannot_be_pinned(lab):
    await load(lab, ONE, TWO)
    stream = await lab.manager.submit(request("one", tokens=8000))
    unloading = asyncio.create_task(lab.manager.unload("one", wait=True))
    await lab.until_unloading()
    with pytest.raises(ModelBusyError, match="the model is being unloaded"):
        await lab.manager.keep("one", pin=True)
    stream.close()
    assert await unloading > 0


async def test_a_model_that_is_pinned_when_its_time_to_live_is_over_stays():
    async with keeping(3) as lab:
        await load(lab, ONE, ttl_s=0.05)
        # Until the load has ended, no other model is unloaded.
        lab.engine.resume.clear()
        loading = asyncio.create_task(load_entry(lab.manager, TWO, LoadSpec(model="two", ttl_s=0.1)))
        await auntil(lambda: lab.manager.snapshot.change and lab.manager.snapshot.change.stage == "loading")
        await asyncio.sleep(0.1)
        await lab.manager.keep("one", pin=True)
        lab.engine.resume.set()
        await loading
        await auntil(lambda: in_memory(lab) == ["one"])
        assert ("one", "unloaded") not in lab.stages


async def test_a_load_and_a_time_to_live_count_as_uses(lab):
    await load(lab, ONE, TWO)
    await load(lab, ONE)
    await load(lab, THREE)
    assert in_memory(lab) == ["three", "one"]
    await asyncio.sleep(0.2)
    await load(lab, ONE, ttl_s=0.1)
    assert in_memory(lab) == ["one", "three"]
    await auntil(lambda: in_memory(lab) == ["three"])


async def test_a_model_with_no_time_to_live_answers_the_request_that_has_loaded_it():
    async with keeping(swap=True) as lab:
        await load(lab, ONE, ttl_s=0)
        await auntil(lambda: in_memory(lab) == [])
        assert [await answer(lab, "one") for _ in range(3)] == ["one"] * 3


async def test_a_model_that_was_idle_is_loaded_again_with_its_options():
    async with keeping(swap=True) as lab:
        await load(lab, ONE, context_length=100, ttl_s=0.05)
        await load(lab, TWO)
        await auntil(lambda: in_memory(lab) == ["two"])
        assert await answer(lab, "one") == "one"
        assert (lab.engine.specs[-1].context_length, lab.engine.specs[-1].ttl_s) == (100, 0.05)


async def test_a_pinned_model_does_not_take_the_place_of_another_one():
    async with running() as lab:
        await load(lab, ONE)
        await load(lab, TWO, pin=True)
        await load(lab, EMBEDDER, pin=True)
        assert in_memory(lab) == ["two", "embedder", "one"]


# Unloads


async def test_a_named_model_is_unloaded_and_without_a_name_the_main_one(lab):
    await load(lab, ONE, TWO)
    assert await lab.manager.unload("one") > 0
    assert in_memory(lab) == ["two"]
    await load(lab, ONE)
    assert await lab.manager.unload() > 0
    # The newest one of the others is the main model now.
    assert await answer(lab) == "two"
    await lab.manager.unload("two")
    assert lab.manager.snapshot.state == "empty"


async def test_a_model_that_answers_is_unloaded_while_another_one_continues(lab):
    await load(lab, ONE, TWO)
    streams = [await lab.manager.submit(request(name, tokens=8000)) for name in ("one", "two")]
    unload = asyncio.create_task(lab.manager.unload("one", wait=True))
    await lab.until_unloading()
    with pytest.raises(ModelBusyError, match=r"being unloaded \(one: .*lmx-lab unload one --now"):
        await lab.manager.unload("two")
    assert await lab.manager.unload("one", wait=False) > 0
    assert await unload > 0
    with pytest.raises(NotLoadedError):
        async for _ in streams[0]:
            pass
    assert [await anext(streams[1])]
    streams[1].close()


async def test_an_unload_of_the_main_model_does_not_join_that_of_another_one(lab):
    await load(lab, ONE, TWO)
    stream = await lab.manager.submit(request("one", tokens=8000))
    unloading = asyncio.create_task(lab.manager.unload("one", wait=True))
    await lab.until_unloading()
    with pytest.raises(ModelBusyError, match=r"the model is being unloaded \(one"):
        await lab.manager.unload(wait=False)
    assert [await anext(stream)]
    stream.close()
    await unloading
    assert in_memory(lab) == ["two"]


# Requests


async def test_requests_without_a_name_go_to_the_newest_model_that_can_answer(lab):
    await load(lab, ONE, EMBEDDER)
    assert lab.manager.snapshot.model == "embedder"
    assert await answer(lab) == "one"
    assert (await lab.manager.embed(TEXT)).report.model == "embedder"


async def test_models_with_the_same_public_name_are_one_series_of_the_metrics(lab):
    await load(lab, *(replace(ONE, id=f"/{folder}/m", path=Path(f"/{folder}/m")) for folder in ("a", "b")))
    size = lab.manager.main.memory_bytes
    lines = Metrics(lab.manager).render()[0].decode().splitlines()
    (series,) = [line for line in lines if line.startswith("lmx_lab_resident_memory_bytes{")]
    assert float(series.split()[-1]) == 2 * size


async def test_models_answer_at_the_same_time(lab):
    await load(lab, ONE, TWO)
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(answer(lab, name, tokens=100)) for name in ("one", "two") * 2]
    assert [task.result() for task in answers] == ["one", "two"] * 2


async def test_100_requests_load_each_of_three_models_once():
    async with keeping(3, swap=True, queue_limit=100) as lab:
        lab.manager.catalog.known["three"] = THREE
        names = random.Random(7).choices(["one", "two", "three"], k=100)
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(answer(lab, name)) for name in names]
        assert [task.result() for task in answers] == names
        assert sorted(spec.model for spec in lab.engine.specs) == ["one", "three", "two"]


async def test_with_room_for_two_of_three_every_request_is_answered():
    async with keeping(2, swap=True, queue_limit=100, drain_s=60) as lab:
        lab.manager.catalog.known["three"] = THREE
        names = random.Random(7).choices(["one", "two", "three"], k=60)
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(answer(lab, name)) for name in names]
        assert [task.result() for task in answers] == names
        assert len(lab.manager.models) == 2
        assert await answer(lab, "one") == "one"
        await answer(lab, "two")
        loads = len(lab.engine.specs)
        await answer(lab, "one")
        assert len(lab.engine.specs) == loads


# Models that are lost


async def test_a_model_that_is_lost_again_and_again_does_not_affect_another_one(lab):
    await load(lab, ONE, TWO)
    stream = await lab.manager.submit(request("two", tokens=8000))
    for _ in range(3):
        await lab.lose(next(model for model in lab.manager.models if model.entry.id == "one"))
        await auntil(lambda: lab.progress[-1].message == "the engine lost this model; load it again")
        assert in_memory(lab) == ["two"]
        with pytest.raises(OtherModelLoadedError, match="one is not loaded; two is loaded"):
            await answer(lab, "one")
        await load(lab, ONE)
        assert await answer(lab, "one") == "one"
    assert [await anext(stream)]
    stream.close()


async def test_pinned_models_that_are_lost_at_the_same_time_are_loaded_again():
    async with running() as lab:
        await load(lab, ONE, TWO, THREE, pin=True)
        for model in lab.manager.models:
            await lab.lose(model)
        await auntil(lambda: in_memory(lab) == ["three", "one", "two"])
        assert not [stage for _, stage in lab.stages if stage == "failed"]


async def test_a_pinned_model_that_was_lost_twice_is_in_memory_once(lab):
    await load(lab, ONE)
    await load(lab, TWO, pin=True, ttl_s=600)
    for _ in range(2):
        lost = next(model for model in lab.manager.models if model.entry.id == "two")
        await lab.lose(lost)
        await auntil(lambda lost=lost: lost not in lab.manager.models)
        await auntil(lambda: "two" in in_memory(lab) or "; load it again" in (lab.progress[-1].message or ""))
    await load(lab, TWO, context_length=7)
    assert in_memory(lab) == ["two", "one"]
    assert (lab.manager.snapshot.main.pinned, lab.manager.snapshot.main.ttl_s) == (True, 600)
    await lab.lose(lab.manager.main)
    assert not (await lab.manager.keep("two", pin=False)).pinned
    await load(lab, THREE)
    assert in_memory(lab) == ["three", "one"]


async def test_if_the_main_model_is_lost_another_one_takes_its_place(lab):
    await load(lab, ONE, TWO)
    await lab.lose(lab.manager.main)
    assert (lab.manager.snapshot.state, await answer(lab)) == ("ready", "one")
    await lab.lose(lab.manager.main)
    assert lab.manager.snapshot.state == "dead"
    with pytest.raises(EngineDeadError, match="the process has died"):
        await answer(lab)


async def test_all_models_make_room_for_another_manager_and_come_back():
    async with keeping(3) as lab:
        await load(lab, EMBEDDER, pin=True)
        await load(lab, ONE, TWO)
        await lab.manager.make_room("other", limit_s=0)
        assert lab.manager.models == []
        assert await lab.manager.take_back() == "two"
        assert in_memory(lab) == ["two", "embedder", "one"]
        assert [state.entry.id for state in lab.manager.snapshot.pinned] == ["embedder"]
