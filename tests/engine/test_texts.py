"""Jobs of texts end in time, with the right error, and exactly once."""

import asyncio

import pytest

from lmx_lab.engine.scheduler import AdmissionControl
from lmx_lab.engine.texts import Jobs
from lmx_lab.errors import EngineError, NotLoadedError

pytestmark = pytest.mark.anyio


class Texts:
    """Jobs with one permit for each."""

    def __init__(self):
        self.jobs = Jobs()
        self.admission = AdmissionControl("minilm", limit=4)

    def start(self, work, *, started=True):
        (permit,) = self.admission.admit(1)
        return self.jobs.start(work, permit, is_started=lambda: started)


async def succeed():
    return "done"


async def fail(error):
    raise error


async def test_a_job_returns_its_result_and_releases_its_permit():
    texts = Texts()
    job, trace = texts.start(succeed()), texts.start(succeed(), started=False)
    assert (len(texts.jobs), texts.jobs.running, texts.admission.active) == (2, 1, 2)
    assert (await job, await trace) == ("done", "done")
    assert (len(texts.jobs), texts.admission.active) == (0, 0)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [(NotLoadedError("unloaded"), NotLoadedError, "unloaded"), (ValueError("odd"), EngineError, "ValueError: odd")],
)
async def test_an_error_of_a_job_is_an_error_of_the_lab(error, kind, message):
    texts = Texts()
    with pytest.raises(kind, match=message):
        await texts.start(fail(error))
    assert texts.admission.active == 0


async def test_jobs_are_ended_with_an_error_and_the_queued_ones_first():
    texts = Texts()
    running, queued = texts.start(asyncio.sleep(60)), texts.start(asyncio.sleep(60), started=False)
    await texts.jobs.end(NotLoadedError("queued"), queued_only=True)
    with pytest.raises(NotLoadedError, match="queued"):
        await queued
    assert not running.done()
    await texts.jobs.end(NotLoadedError("the model was unloaded"))
    with pytest.raises(NotLoadedError, match="the model was unloaded"):
        await running
    assert texts.admission.active == 0


async def test_a_cancelled_job_releases_its_permit_even_before_its_first_step():
    texts = Texts()
    jobs = [texts.start(asyncio.sleep(60)) for _ in range(2)]
    jobs[0].cancel()
    await asyncio.sleep(0)
    jobs[1].cancel()
    await asyncio.wait_for(texts.admission.until_at_most(0), 10)
    assert {job.cancelled() for job in jobs} == {True}
    assert len(texts.jobs) == 0
