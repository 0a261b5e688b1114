"""Work on the event loop of an engine ends when its caller cancels it, in time, and with the right error."""

import asyncio
import gc
import time

import pytest

from lmx_lab.engine.admission import AdmissionControl
from lmx_lab.engine.loop_engine import TextTasks, deadline
from lmx_lab.errors import EngineError, GenerationTimeoutError, NotLoadedError

pytestmark = pytest.mark.anyio


async def test_work_ends_at_its_deadline_which_counts_from_the_arrival():
    with pytest.raises(GenerationTimeoutError, match=r"time limit of 10 s"):
        async with deadline(time.perf_counter() - 9.95, 10.0):
            await asyncio.sleep(60)
    async with deadline(time.perf_counter(), 60.0):
        await asyncio.sleep(0)


class Texts:
    """Tasks of texts, with one permit for each."""

    def __init__(self):
        self.tasks = TextTasks()
        self.admission = AdmissionControl("minilm", limit=4)
        self.ended = 0

    def start(self, work):
        (permit,) = self.admission.admit(1)
        return self.tasks.start(work, permit, self.count)

    def count(self):
        self.ended += 1


async def succeed():
    return "done"


async def fail(error):
    raise error


async def test_a_task_returns_its_result_and_releases_its_permit():
    texts = Texts()
    pending = texts.start(succeed())
    assert (len(texts.tasks), texts.admission.active) == (1, 1)
    assert await pending.result() == "done"
    assert (len(texts.tasks), texts.admission.active, texts.ended) == (0, 0, 1)


@pytest.mark.parametrize(
    ("error", "message"), [(NotLoadedError("unloaded"), "unloaded"), (ValueError("odd"), "ValueError: odd")]
)
async def test_an_error_of_a_task_is_an_error_of_the_lab(error, message):
    texts = Texts()
    with pytest.raises((NotLoadedError, EngineError), match=message):
        await texts.start(fail(error)).result()
    assert texts.admission.active == 0


async def test_tasks_of_one_model_are_ended_with_an_error():
    one, other = Texts(), AdmissionControl("other", limit=1)
    pending = one.start(asyncio.sleep(60))
    (permit,) = other.admit(1)
    kept = one.tasks.start(asyncio.sleep(0.01, "kept"), permit, one.count)
    await one.tasks.end(one.admission, NotLoadedError("the model was unloaded"))
    with pytest.raises(NotLoadedError, match="the model was unloaded"):
        await pending.result()
    assert await kept.result() == "kept"


async def test_a_result_that_no_caller_waits_for_cancels_its_task():
    texts = Texts()
    pending = texts.start(asyncio.sleep(60))
    await asyncio.sleep(0)
    del pending
    gc.collect()
    await asyncio.wait_for(texts.admission.until_at_most(0), 10)
    assert len(texts.tasks) == 0
