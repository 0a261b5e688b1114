"""Tests of loads, unloads and lists of models, which are the same for each way to reach a lab."""

import asyncio
import threading

import numpy as np
import pytest

from lmx_lab.arguments import chat_request, rerank_body
from lmx_lab.engine.echo.engine import EchoEngine
from lmx_lab.errors import (
    InvalidRequestError,
    LabError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    UnusableModelError,
)
from lmx_lab.values.models import LoadSpec
from tests.support.labs import manager_of, read_answer
from tests.support.waiting import WAIT_S, auntil

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def loaded(lab):
    return [record.id for record in await lab.amodels() if record.loaded]


async def test_models_are_loaded_listed_and_unloaded(reach, way, tiny_home):
    async with reach(tiny_home, None) as (lab, served):
        report = await lab.aload(tiny_home / "models" / "tiny-two")
        assert (report.model, report.memory_bytes) == ("tiny-two", manager_of(served).snapshot.model_memory_bytes)
        assert await lab.amodels() == await served.amodels() == await asyncio.to_thread(lab.models)
        snapshots = [await asyncio.to_thread(each.snapshot) for each in (lab, served)]
        assert snapshots[0].models == snapshots[1].models
        with pytest.raises(ModelNotFoundError):
            await lab.aload("no-such")
        # The code of both errors is the same, and the wire has nothing else.
        error = InvalidRequestError if way == "attached" else UnusableModelError
        with pytest.raises(error, match="runs on mlx and not on llama"):
            await lab.aload("tiny", engine="llama.cpp")
        assert await loaded(lab) == ["tiny-two"], "a failed load keeps the loaded model"
        assert (await lab.aload("tiny-two", engine="auto")).load_s == 0
        assert await lab.aunload() > 0
        for prompt in ("hi", [{"role": "user", "content": "hi"}]):
            with pytest.raises(NotLoadedError, match=r"lab\.load"):
                await lab.achat(prompt)
            with pytest.raises(NotLoadedError):
                await asyncio.to_thread(lab.chat, prompt, stream=True)
        assert await asyncio.to_thread(lambda: lab.load("tiny").model) == "tiny"
        assert await asyncio.to_thread(lab.unload) > 0
        assert await loaded(lab) == []


async def test_a_plan_names_the_models_that_have_to_leave(reach, tiny_home):
    async with reach(tiny_home, None) as (lab, served):
        alone = await lab.aplan("tiny")
        assert (alone.fits, alone.model, alone.engine, alone.on_disk) == ("now", "tiny", "mlx", True)
    async with reach(tiny_home, "tiny", memory_limit_bytes=alone.needed_bytes + 10**6) as (lab, served):
        plan = await lab.aplan("tiny-two", context_length=200)
        assert (
            plan
            == await served.aplan("tiny-two", context_length=200)
            == await asyncio.to_thread(lab.plan, tiny_home / "models" / "tiny-two", context_length=200)
        )
        assert (plan.fits, plan.unload) == ("after-unloading", ("tiny",))
        assert await loaded(lab) == ["tiny"]
        with pytest.raises(ModelNotFoundError):
            await lab.aplan("no-such")
        with pytest.raises(InvalidRequestError, match="contex_length"):
            await lab.aplan("tiny", contex_length=5)


async def test_panels_load_and_unload_while_the_callers_loop_is_blocked(reach, tiny_home):
    def blocked(work):
        return lab.workbench.submit(work).result(60)

    async with reach(tiny_home, "tiny") as (lab, served):
        backend = lab.workbench.backend
        with pytest.raises(LabError, match="load"):
            blocked(backend.rerank(rerank_body("a", ["b"], model=None)))
        assert blocked(backend.unload()) > 0
        assert manager_of(served).snapshot.model is None
        with pytest.raises(NotLoadedError):
            blocked(read_answer(backend, chat_request("hello", {})))
        assert blocked(backend.load(LoadSpec(model="tiny"))).model == "tiny"
        # The load has ended, so that there is nothing to cancel, and the model stays.
        with pytest.raises(InvalidRequestError, match="tiny is not being loaded"):
            blocked(backend.cancel_load("tiny"))
        assert [record.id for record in blocked(backend.models()).models if record.loaded] == ["tiny"]


async def test_a_load_continues_if_one_of_the_callers_that_wait_for_it_is_cancelled(reach, tmp_path, monkeypatch):
    resume, check = threading.Event(), EchoEngine.check

    async def slow_check(engine, entry, spec, **options):
        await asyncio.to_thread(resume.wait, WAIT_S)
        await check(engine, entry, spec, **options)

    monkeypatch.setattr(EchoEngine, "check", slow_check)
    async with reach(tmp_path, None) as (lab, served):
        loads = [asyncio.create_task(lab.aload("echo")) for _ in range(2)]
        residents = manager_of(served)._residents
        await auntil(lambda: [change.callers for change in residents._loads()] == [2])
        loads[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await loads[0]
        await auntil(lambda: residents._loads()[0].callers == 1)
        loads.append(asyncio.create_task(lab.aload("echo")))
        await auntil(lambda: residents._loads()[0].callers == 2)
        backend = lab.workbench.backend
        with pytest.raises(ModelBusyError, match="2 callers wait for the load of echo, so it was not cancelled"):
            await asyncio.wrap_future(lab.workbench.submit(backend.cancel_load("echo", shared=False)))
        resume.set()
        assert [(await load).model for load in loads[1:]] == ["echo"] * 2


async def test_vectors_and_rankings_are_those_of_the_server(reach, way, starter_home, minilm):
    documents = ["Bread is baked.", {"text": "Sea water is salty."}, "Sand."]
    async with reach(starter_home, minilm.id) as (lab, served):
        for texts in ("a", ["a", "b"]):
            np.testing.assert_array_equal(await lab.aembed(texts), await served.aembed(texts))
        np.testing.assert_array_equal(await asyncio.to_thread(lab.embed, "a"), await lab.aembed("a"))
        here, there = await served.arerank("sea", documents, top_n=2), await lab.arerank("sea", documents, top_n=2)
        body = rerank_body("sea", documents, model=None, top_n=2)
        ranking = lab.workbench.submit(lab.workbench.backend.rerank(body)).result(60)
    assert [(row.index, row.document) for row in there] == [(row.index, row.document) for row in here]
    np.testing.assert_allclose([row.score for row in there], [row.score for row in here], rtol=1e-6)
    assert (there.method, there.model, there.tokens) == (here.method, here.model, here.tokens)
    assert (there.report is None, here.report is None) == (way == "attached", False)
    assert [index for index, _ in ranking.order] == [row.index for row in here]
    assert (ranking.model, ranking.method, ranking.tokens) == (minilm.id, "cosine", here.tokens)
