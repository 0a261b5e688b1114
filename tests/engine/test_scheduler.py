"""Who runs next: pure decisions, told the time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.scheduler import SHORT_PROMPT_TOKENS, Scheduler, Verdict
from lmx_lab.errors import QueueFullError

LATER = 1e9
SHORT, LONG = SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS + 1


def take(_: object) -> Verdict:
    return Verdict.TAKE


def add(scheduler: Scheduler[str], *keys: str, tokens: int = LONG, deadline: float = LATER) -> None:
    for key in keys:
        scheduler.add([key], tokens=tokens, deadline=deadline)


def admitted(scheduler: Scheduler[str]) -> list[str]:
    keys = []
    while (key := scheduler.admit(take)) is not None:
        keys.append(key)
    return keys


def test_requests_take_slots_in_arrival_order() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=2, queue_limit=10, prefills=2, lanes=3)
    add(scheduler, *"abc")
    assert admitted(scheduler) == ["a", "b"]
    scheduler.remove("a")
    assert admitted(scheduler) == ["c"]


def test_the_queue_limit_counts_only_those_who_must_wait() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, queue_limit=1, prefills=1, lanes=2)
    add(scheduler, "runs at once", "waits")
    with pytest.raises(QueueFullError) as refused:
        add(scheduler, "too many")
    assert refused.value.retry_after_s is not None
    assert scheduler.queued == ["runs at once", "waits"]


def test_the_refused_are_told_when_to_come_back() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=2, queue_limit=0, prefills=2, lanes=3)
    add(scheduler, *"ab")
    with pytest.raises(QueueFullError, match="30 s") as refused:
        scheduler.add("c", tokens=LONG, deadline=LATER, retry_after_s=30.0)
    assert refused.value.retry_after_s == 30


def test_the_answers_to_one_request_are_taken_all_or_none() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, queue_limit=2, prefills=1, lanes=2)
    with pytest.raises(QueueFullError):
        scheduler.add("abcd", tokens=LONG, deadline=LATER)
    assert scheduler.queued == []
    scheduler.add("abc", tokens=LONG, deadline=LATER)
    assert scheduler.queued == ["a", "b", "c"]


def test_waiting_and_running_requests_expire() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, queue_limit=5, prefills=1, lanes=2)
    add(scheduler, "runs", deadline=1.0)
    scheduler.admit(take)
    add(scheduler, "waits", deadline=2.0)
    assert scheduler.expired(1.0) == []
    assert scheduler.expired(1.5) == ["runs"]
    assert sorted(scheduler.expired(3.0)) == ["runs", "waits"]


def test_prompts_are_computed_a_few_at_a_time() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=4, queue_limit=10, prefills=1, lanes=2)
    add(scheduler, *"abc")
    assert admitted(scheduler) == ["a"]
    scheduler.prefilled("a")
    assert admitted(scheduler) == ["b"]
    scheduler.remove("b")
    assert admitted(scheduler) == ["c"]
    assert scheduler.running == ["a", "c"]
    assert scheduler.prefilling == ["c"]


def test_a_short_prompt_does_not_wait_behind_long_ones() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=8, queue_limit=10, prefills=2, lanes=3)
    add(scheduler, *"ABC")
    add(scheduler, *"de", tokens=SHORT)
    assert admitted(scheduler) == ["A", "B", "d"]
    scheduler.prefilled("A")
    assert admitted(scheduler) == ["C"]
    scheduler.prefilled("d")
    assert admitted(scheduler) == ["e"]


def test_short_prompts_do_not_keep_long_ones_waiting() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=8, queue_limit=10, prefills=2, lanes=3)
    add(scheduler, *"abc", tokens=SHORT)
    add(scheduler, "D")
    add(scheduler, "e", tokens=SHORT)
    assert admitted(scheduler) == ["a", "b", "c"]
    scheduler.prefilled("a")
    assert admitted(scheduler) == ["D"]


def test_one_that_must_wait_for_itself_is_passed_and_keeps_its_turn() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=8, queue_limit=10, prefills=8, lanes=9)
    add(scheduler, *"ab")
    assert scheduler.admit(lambda key: Verdict.LATER if key == "a" else Verdict.TAKE) == "b"
    assert scheduler.admit(take) == "a"


def test_nobody_passes_one_that_waits_for_memory() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=8, queue_limit=10, prefills=8, lanes=9)
    add(scheduler, *"ab")
    assert scheduler.admit(lambda key: Verdict.BLOCKED if key == "a" else Verdict.TAKE) is None
    assert scheduler.queued == ["a", "b"]


ACTS = st.sampled_from(["add", "add two", "admit", "prefilled", "expire", "cancel"])


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.lists(ACTS, max_size=80), st.randoms())
def test_whatever_happens_every_request_ends_once_and_the_bounds_hold(
    slots: int, limit: int, prefills: int, acts: list[str], random: object
) -> None:
    scheduler: Scheduler[int] = Scheduler(slots=slots, queue_limit=limit, prefills=prefills, lanes=prefills + 1)
    alive: list[int] = []
    ends: Counter[int] = Counter()
    added = 0
    for now, act in enumerate(acts):
        if act.startswith("add"):
            keys = list(range(added, added + (2 if act == "add two" else 1)))
            try:
                scheduler.add(keys, tokens=random.choice([SHORT, LONG]), deadline=now + random.choice([3, 1000]))
            except QueueFullError:
                continue
            alive += keys
            added += len(keys)
        elif act == "admit":
            scheduler.admit(lambda key: random.choice(list(Verdict)))
        elif act == "prefilled" and scheduler.prefilling:
            scheduler.prefilled(random.choice(scheduler.prefilling))
        elif act == "expire":
            for key in scheduler.expired(now):
                scheduler.remove(key)
                alive.remove(key)
                ends[key] += 1
        elif act == "cancel" and alive:
            key = alive.pop(random.randrange(len(alive)))
            scheduler.remove(key)
            scheduler.remove(key)
            ends[key] += 1
        assert len(scheduler.running) <= slots
        assert len(scheduler.queued) <= limit + slots
        assert len(scheduler.prefilling) <= prefills + 1
        assert sorted(scheduler.running + scheduler.queued) == sorted(alive)
    assert set(ends.values()) <= {1}
    assert len(ends) + len(alive) == added


def test_a_request_is_admitted_as_soon_as_nothing_stands_in_its_way() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, queue_limit=10, prefills=1, lanes=2)
    add(scheduler, *"abc")
    served = []
    while not scheduler.idle:
        (key,) = admitted(scheduler)
        served.append(key)
        scheduler.remove(key)
    assert served == ["a", "b", "c"]
