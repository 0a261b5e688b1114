"""Tests of delays between attempts, and of the detection of sleep."""

from __future__ import annotations

import asyncio

import pytest

from lmx_lab.client import backoff
from lmx_lab.client.backoff import Backoff, SleepWatch


def longest(low: float, high: float) -> float:
    assert low == 0
    return high


def test_delays_double_up_to_ten_seconds_and_start_again_after_a_reset() -> None:
    delays = Backoff(longest)
    assert [delays.next_delay_s() for _ in range(8)] == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    delays.reset()
    assert (delays.next_delay_s(), delays.attempts) == (0.25, 1)


def test_delays_are_random_up_to_the_limit() -> None:
    drawn = [Backoff().next_delay_s() for _ in range(200)]
    assert min(drawn) < 0.05
    assert 0.2 < max(drawn) <= 0.25


def test_a_million_failures_do_not_overflow() -> None:
    delays = Backoff(longest)
    delays.attempts = 1_000_000
    assert delays.next_delay_s() == 10


@pytest.mark.parametrize(("advised_s", "delay_s"), [(None, 0.25), (0.0, 0.25), (7.0, 7.0), (1e9, 60.0), (-5.0, 0.25)])
def test_the_advised_delay_is_followed_up_to_a_limit(advised_s: float | None, delay_s: float) -> None:
    assert Backoff(longest).next_delay_s(advised_s) == delay_s


@pytest.mark.anyio
@pytest.mark.parametrize(("ahead_s", "wakes"), [(4.0, 0), (6.0, 1), (86_400.0, 1), (-86_400.0, 0)])
async def test_a_jump_of_the_wall_clock_is_reported_once_as_sleep(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float, wakes: int
) -> None:
    monkeypatch.setattr(backoff, "CHECK_INTERVAL_S", 0.001)
    loop, seen, checks = asyncio.get_running_loop(), list[None](), list[None]()
    done = asyncio.Event()

    def wall() -> float:
        checks.append(None)
        if len(checks) == 20:
            done.set()
        return loop.time() + (ahead_s if len(checks) > 5 else 0.0)

    watch = SleepWatch(lambda: seen.append(None), wall=wall)
    await done.wait()
    watch.close()
    watch.close()
    assert len(seen) == wakes
