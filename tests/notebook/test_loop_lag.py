"""Test the measurement of a loop's lag."""

from __future__ import annotations

import asyncio

import pytest

from lmx_lab.notebook.loop_lag import LoopLag

pytestmark = pytest.mark.anyio
WAIT_S = 60.0


async def test_a_responsive_loop_has_no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.notebook.loop_lag.BLOCKED_S", 60.0)  # No pause of a busy machine counts.
    lag = LoopLag()
    lag.start()
    await asyncio.sleep(0.25)
    async with asyncio.timeout(WAIT_S):
        while lag.now_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert lag.worst is None
    lag.stop()
    assert lag.now_s == 0
