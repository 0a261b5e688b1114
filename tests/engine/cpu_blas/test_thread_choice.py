"""How many threads products get: by their rows, and by what other programs leave."""

from __future__ import annotations

from typing import Any

import pytest

from lmx_lab.engine.cpu_blas import binding, thread_choice
from lmx_lab.engine.cpu_blas.thread_choice import LOOK_AGAIN_S, LOOK_LATER_S, REST_S, ThreadChoice


class Machine:
    """Says how long a product takes with so many threads, and what time it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.seconds = {1: 1.0, 2: 0.6, 3: 0.5, 4: 0.4}
        self.tried: list[int] = []
        self.in_use = 0
        monkeypatch.setattr(binding, "use_threads", self._use)
        monkeypatch.setattr(thread_choice, "_seconds", self._try)
        monkeypatch.setattr(thread_choice.time, "perf_counter", lambda: self.now)

    def _use(self, count: int) -> None:
        self.in_use = count

    def _try(self, hopeless_s: float) -> float:
        self.tried.append(self.in_use)
        return self.seconds[self.in_use]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def choice(machine: Machine, most: int = 2, **changes: Any) -> ThreadChoice:
    made = ThreadChoice(most, **changes)
    machine.in_use = most
    return made


def test_a_quiet_machine_uses_all(machine: Machine) -> None:
    choice(machine).prepare(100)
    assert machine.in_use == 2


def test_a_busy_machine_uses_what_is_quickest(machine: Machine) -> None:
    machine.seconds = {1: 1.0, 2: 30.0}
    choice(machine).prepare(100)
    assert machine.in_use == 1


@pytest.mark.parametrize(("seconds", "best"), [({1: 4, 2: 2, 3: 1.5, 4: 9}, 3), ({1: 4, 2: 2, 3: 8, 4: 9}, 2)])
def test_with_more_cores_there_is_something_in_between(machine: Machine, seconds: dict[int, float], best: int) -> None:
    machine.seconds = seconds
    choice(machine, 4).prepare(100)
    assert machine.in_use == best
    assert machine.tried == [1, 4, 3, 2]


def test_few_rows_have_one_thread_and_nothing_is_tried(machine: Machine) -> None:
    choice(machine).prepare(3)
    assert (machine.in_use, machine.tried) == (1, [])


def test_short_work_after_a_rest_has_one_thread(machine: Machine) -> None:
    made = choice(machine)
    made.prepare(63)
    assert (machine.in_use, machine.tried) == (1, [])
    machine.now += REST_S / 2
    made.prepare(63)
    assert machine.in_use == 2


def test_it_looks_again_after_a_while_only(machine: Machine) -> None:
    made = choice(machine)
    made.prepare(100)
    tried = len(machine.tried)
    machine.now += LOOK_AGAIN_S - 0.01
    made.prepare(100)
    assert len(machine.tried) == tried
    machine.seconds = {1: 1.0, 2: 30.0}
    machine.now += 0.02
    made.prepare(100)
    assert machine.in_use == 1


def test_on_a_busy_machine_it_looks_later_and_comes_back(machine: Machine) -> None:
    made = choice(machine)
    machine.seconds = {1: 1.0, 2: 30.0}
    made.prepare(100)
    tried = len(machine.tried)
    machine.seconds = {1: 1.0, 2: 0.6}
    machine.now += LOOK_AGAIN_S + 0.1
    made.prepare(100)
    assert (machine.in_use, len(machine.tried)) == (1, tried)
    machine.now += LOOK_LATER_S
    made.prepare(100)
    assert machine.in_use == 2


def test_a_number_that_somebody_chose_stays(machine: Machine) -> None:
    made = choice(machine, fixed=True)
    for rows in (1, 100):
        made.prepare(rows)
        assert (machine.in_use, machine.tried) == (2, [])


@pytest.mark.parametrize("fixed", [True, False])
def test_lanes_have_a_thread_each_and_after_them_all_are_used_again(machine: Machine, fixed: bool) -> None:
    made = choice(machine, fixed=fixed)
    made.prepare(500, lanes=2)
    assert (machine.in_use, machine.tried) == (1, [])
    made.prepare(500)
    assert machine.in_use == 2


def test_one_core_leaves_nothing_to_choose(machine: Machine) -> None:
    made = choice(machine, 1)
    made.prepare(500)
    assert (made.now, machine.tried) == (1, [])


def test_the_product_that_is_tried_is_a_real_one() -> None:
    assert 0 < thread_choice._seconds(float("inf")) < 10


def test_a_hopeless_number_is_tried_once() -> None:
    assert thread_choice._seconds(0.0) > 0
