"""The number of threads depends on the number of rows and on the load of the machine."""

from __future__ import annotations

import mlx.core as mx
import pytest

from lmx_lab.engine.cpu_blas import ThreadChoice, openblas, thread_choice
from lmx_lab.engine.cpu_blas.thread_choice import BUSY_INTERVAL_S, INTERVAL_S, PAUSE_S
from lmx_lab.values.engine import BlasReport


class Machine:
    """Simulates the time of a product for each number of threads, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.seconds = {1: 1.0, 2: 0.6, 3: 0.5, 4: 0.4}
        self.measured: list[int] = []
        self.in_use = 0
        monkeypatch.setattr(openblas, "use_threads", self._use)
        monkeypatch.setattr(thread_choice, "_product_s", self._measure)
        monkeypatch.setattr(thread_choice.time, "perf_counter", lambda: self.now)

    def _use(self, count: int) -> None:
        self.in_use = count

    def _measure(self, limit_s: float) -> float:
        self.measured.append(self.in_use)
        return self.seconds[self.in_use]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def choice(machine: Machine, threads: int = 2, *, fixed: bool = False) -> ThreadChoice:
    made = ThreadChoice(BlasReport(name="openblas", detail="", threads=threads, threads_fixed=fixed))
    machine.in_use = threads
    return made


def test_an_idle_machine_uses_all_threads(machine: Machine) -> None:
    choice(machine).prepare(100)
    assert machine.in_use == 2


def test_a_busy_machine_uses_the_fastest_number_of_threads(machine: Machine) -> None:
    machine.seconds = {1: 1.0, 2: 30.0}
    choice(machine).prepare(100)
    assert machine.in_use == 1


@pytest.mark.parametrize(("seconds", "best"), [({1: 4, 2: 2, 3: 1.5, 4: 9}, 3), ({1: 4, 2: 2, 3: 8, 4: 9}, 2)])
def test_with_more_cores_numbers_in_between_are_measured(
    machine: Machine, seconds: dict[int, float], best: int
) -> None:
    machine.seconds = seconds
    choice(machine, 4).prepare(100)
    assert machine.in_use == best
    assert machine.measured == [1, 4, 3, 2]


def test_few_rows_have_one_thread_and_nothing_is_measured(machine: Machine) -> None:
    choice(machine).prepare(3)
    assert (machine.in_use, machine.measured) == (1, [])


def test_short_work_after_a_pause_has_one_thread(machine: Machine) -> None:
    made = choice(machine)
    made.prepare(63)
    assert (machine.in_use, machine.measured) == (1, [])
    machine.now += PAUSE_S / 2
    made.prepare(63)
    assert machine.in_use == 2


def test_it_measures_again_only_after_the_interval(machine: Machine) -> None:
    made = choice(machine)
    made.prepare(100)
    measured = len(machine.measured)
    machine.now += INTERVAL_S - 0.01
    made.prepare(100)
    assert len(machine.measured) == measured
    machine.seconds = {1: 1.0, 2: 30.0}
    machine.now += 0.02
    made.prepare(100)
    assert machine.in_use == 1


def test_on_a_busy_machine_it_measures_less_often_and_uses_all_threads_again(machine: Machine) -> None:
    made = choice(machine)
    machine.seconds = {1: 1.0, 2: 30.0}
    made.prepare(100)
    measured = len(machine.measured)
    machine.seconds = {1: 1.0, 2: 0.6}
    machine.now += INTERVAL_S + 0.1
    made.prepare(100)
    assert (machine.in_use, len(machine.measured)) == (1, measured)
    machine.now += BUSY_INTERVAL_S
    made.prepare(100)
    assert machine.in_use == 2


def test_a_fixed_number_of_threads_is_always_used(machine: Machine) -> None:
    made = choice(machine, fixed=True)
    for rows in (1, 100):
        made.prepare(rows)
        assert (machine.in_use, machine.measured) == (2, [])


@pytest.mark.parametrize("fixed", [True, False])
def test_lanes_have_one_thread_each_and_later_steps_have_all(machine: Machine, fixed: bool) -> None:
    made = choice(machine, fixed=fixed)
    made.prepare(500, lanes=2)
    assert (machine.in_use, machine.measured) == (1, [])
    made.prepare(500)
    assert machine.in_use == 2


def test_with_one_core_nothing_is_measured(machine: Machine) -> None:
    made = choice(machine, 1)
    made.prepare(500)
    assert (made.current, machine.measured) == (1, [])


def test_a_real_product_is_measured() -> None:
    assert 0 < thread_choice._product_s(float("inf")) < 10


def test_a_slow_number_of_threads_is_measured_once() -> None:
    assert thread_choice._product_s(0.0) > 0


def test_the_number_changes_and_is_measured_only_when_the_stream_computes_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = False

    def wait(stream: object) -> None:
        nonlocal idle
        idle = stream is threads.stream

    def use(count: int) -> None:
        nonlocal idle
        assert idle
        machine.in_use = count

    monkeypatch.setattr(mx, "synchronize", wait)
    monkeypatch.setattr(openblas, "use_threads", use)
    threads = choice(machine)
    threads.stream = mx.default_stream(mx.cpu)
    for rows in (100, 1, 100):
        idle = False
        threads.prepare(rows)
        machine.now += INTERVAL_S / 4
    assert machine.measured == [1, 2]
    assert machine.in_use == 2
