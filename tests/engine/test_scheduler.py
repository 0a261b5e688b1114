"""Requests are counted and limited, and start in the order of arrival, as slots, prompts and memory allow."""

import asyncio
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.scheduler import (
    SHORT_PROMPT_TOKENS,
    AdmissionControl,
    Scheduler,
    SlotTimes,
    Turns,
    Verdict,
    deadline,
)
from lmx_lab.errors import GenerationTimeoutError, NotLoadedError, QueueFullError

WAIT_S, TURN_S = Turns().wait_s, Turns().turn_s
SHORT, LONG = SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS + 1


def take(_):
    return Verdict.TAKE


def add(scheduler, *keys, tokens=LONG, now=0.0, client=None):
    scheduler.add(keys, tokens=tokens, now=now, client=client)


def admit_all(scheduler):
    keys = []
    while (key := scheduler.admit(take, 0.0)) is not None:
        keys.append(key)
    return keys


def test_requests_get_slots_in_the_order_of_arrival():
    scheduler = Scheduler(slots=2, prefills=2, lanes=3)
    add(scheduler, *"abc")
    assert admit_all(scheduler) == ["a", "b"]
    scheduler.remove("a")
    assert admit_all(scheduler) == ["c"]
    for key in "bc":
        assert not scheduler.idle
        scheduler.remove(key)
    assert scheduler.idle


def test_the_number_of_prompts_that_are_computed_at_once_is_limited():
    scheduler = Scheduler(slots=4, prefills=1, lanes=2)
    add(scheduler, *"abc")
    assert admit_all(scheduler) == ["a"]
    scheduler.prefilled("a")
    assert admit_all(scheduler) == ["b"]
    scheduler.remove("b")
    assert admit_all(scheduler) == ["c"]
    assert scheduler.running == ["a", "c"]


def test_a_short_prompt_does_not_wait_behind_long_ones():
    scheduler = Scheduler(slots=8, prefills=2, lanes=3)
    add(scheduler, *"ABC")
    add(scheduler, *"de", tokens=SHORT)
    assert admit_all(scheduler) == ["A", "B", "d"]
    scheduler.prefilled("A")
    assert admit_all(scheduler) == ["C"]
    scheduler.prefilled("d")
    assert admit_all(scheduler) == ["e"]


def test_short_prompts_do_not_keep_long_ones_waiting():
    scheduler = Scheduler(slots=8, prefills=2, lanes=3)
    add(scheduler, *"abc", tokens=SHORT)
    add(scheduler, "D")
    add(scheduler, "e", tokens=SHORT)
    assert admit_all(scheduler) == ["a", "b", "c"]
    scheduler.prefilled("a")
    assert admit_all(scheduler) == ["D"]


def test_later_requests_pass_one_that_waits_for_a_reason_of_its_own_which_keeps_its_place():
    scheduler = Scheduler(slots=8, prefills=8, lanes=9)
    add(scheduler, *"ab")
    assert scheduler.admit(lambda key: Verdict.LATER if key == "a" else Verdict.TAKE, 0.0) == "b"
    assert scheduler.admit(take, 0.0) == "a"


def test_no_request_passes_one_that_waits_for_memory():
    scheduler = Scheduler(slots=8, prefills=8, lanes=9)
    add(scheduler, *"ab")
    assert scheduler.admit(lambda key: Verdict.BLOCKED if key == "a" else Verdict.TAKE, 0.0) is None
    assert scheduler.queued == ["a", "b"]


# Pauses


def busy_scheduler(slots):
    """A scheduler whose slots are taken by requests that decode since the time 0."""
    scheduler = Scheduler(slots=slots, prefills=slots, lanes=slots)
    add(scheduler, *(f"long {number}" for number in range(slots)))
    for key in admit_all(scheduler):
        scheduler.prefilled(key)
    return scheduler


def yes(_):
    return True


def test_a_request_is_paused_for_a_client_without_a_slot_and_continues_before_later_ones():
    scheduler = busy_scheduler(2)
    add(scheduler, "own")
    add(scheduler, "other", now=TURN_S, client="other")
    assert scheduler.next_pause_at() == TURN_S + WAIT_S
    assert scheduler.pause(yes, TURN_S + WAIT_S / 2) is None
    assert scheduler.pause(yes, TURN_S + 2 * WAIT_S) == "long 0"
    assert scheduler.queued == ["other", "long 0", "own"]
    assert scheduler.not_started == ["other", "own"]
    assert admit_all(scheduler) == ["other"]
    assert scheduler.next_pause_at() is None
    scheduler.remove("other")
    assert admit_all(scheduler) == ["long 0"]


def test_requests_of_one_client_do_not_pause_each_other():
    scheduler = busy_scheduler(2)
    add(scheduler, "new")
    assert scheduler.next_pause_at() is None
    assert scheduler.pause(yes, 100) is None


def test_a_client_keeps_one_slot():
    scheduler = busy_scheduler(3)
    add(scheduler, "a", client="a")
    add(scheduler, "b", client="b")
    add(scheduler, "c", client="c")
    paused = []
    for now in (1.0, 2.0, 3.0):
        paused.append(scheduler.pause(yes, now))
        for key in admit_all(scheduler):
            scheduler.prefilled(key)
    assert paused == ["long 0", "long 1", None]
    assert scheduler.running == ["long 2", "a", "b"]


def test_the_client_with_the_most_slots_is_paused():
    scheduler = busy_scheduler(3)
    scheduler.remove("long 0")
    add(scheduler, "a", client="a")
    assert admit_all(scheduler) == ["a"]
    scheduler.prefilled("a")
    add(scheduler, "b", client="b")
    assert scheduler.pause(yes, 10) == "long 1"


def test_requests_keep_their_slot_while_they_cannot_be_paused_or_have_just_started():
    scheduler = busy_scheduler(2)
    add(scheduler, "new", client="other")
    assert scheduler.pause(yes, TURN_S - 0.1) is None
    assert scheduler.pause(lambda _: False, TURN_S) is None
    assert scheduler.pause(lambda key: key == "long 1", TURN_S) == "long 1"


@pytest.mark.slow
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.sampled_from(["add", "add two", "admit", "prefilled", "cancel", "pause"]), max_size=80),
    st.randoms(),
)
def test_every_request_ends_once_and_the_limits_hold_whatever_happens(slots, prefills, actions, random):
    scheduler = Scheduler(slots=slots, prefills=prefills, lanes=prefills + 1)
    alive = []
    prefilling = set()
    ends = Counter()
    added = 0
    for now, action in enumerate(actions):
        if action.startswith("add"):
            keys = list(range(added, added + (2 if action == "add two" else 1)))
            scheduler.add(keys, tokens=random.choice([SHORT, LONG]), now=now, client=random.choice(["a", "b"]))
            alive += keys
            added += len(keys)
        elif action == "admit":
            if (admitted := scheduler.admit(lambda key: random.choice(list(Verdict)), now)) is not None:
                prefilling.add(admitted)
        elif action == "pause":
            scheduler.pause(lambda _: True, now)
        elif action == "prefilled" and prefilling:
            scheduler.prefilled(prefilled := random.choice(sorted(prefilling)))
            prefilling.remove(prefilled)
        elif action == "cancel" and alive:
            key = alive.pop(random.randrange(len(alive)))
            scheduler.remove(key)
            scheduler.remove(key)
            ends[key] += 1
        assert len(scheduler.running) <= slots
        prefilling &= {*scheduler.running}
        assert len(prefilling) <= prefills + 1
        assert sorted(scheduler.running + scheduler.queued) == sorted(alive)
    assert set(ends.values()) <= {1}
    assert len(ends) + len(alive) == added


# When a slot becomes free


def test_a_slot_is_free_after_the_mean_time_or_that_of_a_longer_request_or_its_limit():
    times = SlotTimes()
    assert times.free_in_s(running=2, oldest_s=5.0) == 1.0
    assert times.free_in_s(running=1, oldest_s=0.0, at_most_s=7.0) == 7.0
    times.add(10.0)
    assert times.free_in_s(running=2, oldest_s=3.0) == 5.0
    assert times.free_in_s(running=1, oldest_s=30.0) == 30.0
    assert times.free_in_s(running=1, oldest_s=0.0, at_most_s=7.0) == 7.0
    assert times.free_in_s(running=1, oldest_s=0.0, at_most_s=0.1) == 1.0
    times.add(20.0)
    assert times.free_in_s(running=1, oldest_s=3.0) == 12.0


# Admission


def test_requests_are_accepted_up_to_the_limit():
    admission = AdmissionControl("tiny", limit=2)
    # The estimate is made for a refusal only.
    first, _ = admission.admit(1, slot_free_s=pytest.fail) + admission.admit(1, slot_free_s=pytest.fail)
    with pytest.raises(
        QueueFullError, match=r"tiny has 2 requests running or queued, and the limit is 2 .* in 30 s"
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


@pytest.mark.anyio
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


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_a_cancelled_wait_does_not_disturb_others():
    admission = AdmissionControl("tiny", limit=1)
    (permit,) = admission.admit(1)
    waits = [asyncio.create_task(admission.until_at_most(0)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.sleep(0)
    permit.release()
    await asyncio.wait_for(waits[1], 10)


@pytest.mark.anyio
async def test_work_ends_at_its_deadline_which_counts_from_the_arrival():
    with pytest.raises(GenerationTimeoutError, match=r"time limit of 10 s .*; send fewer texts"):
        async with deadline(time.perf_counter() - 9.95, 10.0, "send fewer texts"):
            await asyncio.sleep(60)
    async with deadline(time.perf_counter(), 60.0):
        await asyncio.sleep(0)
