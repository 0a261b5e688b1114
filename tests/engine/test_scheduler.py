from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.scheduler import Scheduler
from lmx_lab.errors import QueueFullError

LATER = 1e9


def test_requests_take_slots_in_arrival_order() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=2, queue_limit=10, prefills=2)
    for key in "abc":
        scheduler.add(key, deadline=LATER)
    assert scheduler.admit() == ["a", "b"]
    scheduler.remove("a")
    assert scheduler.admit() == ["c"]


def test_the_queue_limit_counts_only_those_who_must_wait() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, queue_limit=1, prefills=1)
    scheduler.add("runs at once", deadline=LATER)
    scheduler.add("waits", deadline=LATER)
    with pytest.raises(QueueFullError) as refused:
        scheduler.add("too many", deadline=LATER)
    assert refused.value.retry_after_s is not None
    assert scheduler.queued == ["runs at once", "waits"]


def test_waiting_and_running_requests_expire() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, queue_limit=5, prefills=1)
    scheduler.add("runs", deadline=1.0)
    scheduler.admit()
    scheduler.add("waits", deadline=2.0)
    assert scheduler.expired(1.0) == []
    assert scheduler.expired(1.5) == ["runs"]
    assert sorted(scheduler.expired(3.0)) == ["runs", "waits"]


def test_prompts_are_computed_a_few_at_a_time() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=4, queue_limit=10, prefills=1)
    for key in "abc":
        scheduler.add(key, deadline=LATER)
    assert scheduler.admit() == ["a"]
    assert scheduler.admit() == []
    scheduler.prefilled("a")
    assert scheduler.admit() == ["b"]
    scheduler.remove("b")
    assert scheduler.admit() == ["c"]
    assert scheduler.running == ["a", "c"]


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.sampled_from(["add", "admit", "remove"]), max_size=60))
def test_slots_and_queue_stay_within_their_bounds_and_nothing_is_lost(slots: int, limit: int, acts: list[str]) -> None:
    scheduler: Scheduler[int] = Scheduler(slots=slots, queue_limit=limit, prefills=2)
    alive: list[int] = []
    for number, act in enumerate(acts):
        if act == "add":
            try:
                scheduler.add(number, deadline=LATER)
            except QueueFullError:
                continue
            alive.append(number)
        elif act == "admit":
            scheduler.admit()
        elif alive:
            scheduler.remove(alive.pop(0))
        assert len(scheduler.running) <= slots
        assert len(scheduler.queued) <= limit + slots
        assert sorted(scheduler.running + scheduler.queued) == alive
