"""The requests of each loaded model are counted from acceptance to their end, and limited."""

import asyncio
import threading

import pytest

from lmx_lab.engine.admission import AdmissionControl
from lmx_lab.errors import NotLoadedError, QueueFullError

pytestmark = pytest.mark.anyio


def test_requests_are_accepted_up_to_the_limit():
    admission = AdmissionControl("tiny", limit=2)
    # The estimate is made for a refusal only.
    first, _ = admission.admit(1, slot_free_s=pytest.fail) + admission.admit(1, slot_free_s=pytest.fail)
    with pytest.raises(
        QueueFullError, match=r"2 requests for tiny are running or queued, and the limit is 2 .* in 30 s"
    ) as refused:
        admission.admit(1, slot_free_s=lambda: 30.0)
    assert refused.value.retry_after_s == 30
    first.release()
    admission.admit(1)
    assert admission.active == 2


def test_a_permit_is_released_once_however_often_its_request_ends_and_the_last_end_is_reported():
    reports = []
    admission = AdmissionControl("tiny", limit=2, on_idle=lambda: reports.append(admission.active))
    first, second = admission.admit(2)
    first.release()
    first.release()
    assert (admission.active, reports) == (1, [])
    second.release()
    assert (admission.active, reports) == (0, [0])


def test_a_closed_model_accepts_no_requests_and_its_accepted_ones_are_queued_unless_it_was_closed_with_an_error():
    admission = AdmissionControl("tiny", limit=2)
    (permit,) = admission.admit(1)
    admission.close(None)
    with pytest.raises(NotLoadedError, match="tiny is being unloaded"):
        admission.admit(1)
    permit.check()
    admission.reopen()
    admission.admit(1)
    permit.check()
    admission.close(NotLoadedError("the model was unloaded"))
    with pytest.raises(NotLoadedError, match="the model was unloaded"):
        permit.check()


async def test_until_at_most_waits_for_the_end_of_requests():
    admission = AdmissionControl("tiny", limit=2)
    await admission.until_at_most(0)
    permits = admission.admit(2)
    idle = asyncio.create_task(admission.until_at_most(0))
    for permit in permits:
        assert not idle.done()
        # An engine releases permits on a thread of its own.
        thread = threading.Thread(target=permit.release)
        thread.start()
        await asyncio.to_thread(thread.join)
    await asyncio.wait_for(idle, 10)


async def test_until_room_waits_for_room_in_the_queue():
    admission = AdmissionControl("tiny", limit=2)
    permits = admission.admit(2)
    room = asyncio.create_task(admission.until_room(2))
    await asyncio.sleep(0)
    permits[0].release()
    await asyncio.sleep(0.01)
    assert not room.done()
    permits[1].release()
    await asyncio.wait_for(room, 10)


async def test_a_cancelled_wait_does_not_disturb_others():
    admission = AdmissionControl("tiny", limit=1)
    (permit,) = admission.admit(1)
    waits = [asyncio.create_task(admission.until_at_most(0)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.sleep(0)
    permit.release()
    await asyncio.wait_for(waits[1], 10)
