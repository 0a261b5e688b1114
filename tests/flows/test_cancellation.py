"""Tests that a model stops computing for a client that disconnects, in each phase of its request."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.support.asking import CHAT, chat_body, open_request
from tests.support.labs import serving, wait_until_idle
from tests.support.waiting import until

LONG: list[Any] = [{"role": "user", "content": "word " * 7000}]
BUSY: dict[str, Any] = {"model": "default", "max_tokens": 7500, "ignore_eos": True}


@pytest.fixture(scope="module")
def one_slot(long_home):
    # Without a prefix cache, so that the second long prompt takes as long as the first.
    with serving(long_home, "tiny-long", slots=1, prefix_cache_bytes=0) as lab:
        yield lab


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("way", ["sse", "whole", "socket"])
def test_the_model_stops_computing(one_slot, way, phase):
    before = one_slot.engine.snapshot
    messages = {"messages": LONG} if phase == "prefill" else {}
    with open_request(one_slot, way, chat_body(**BUSY, **messages)):
        if phase == "prefill":
            until(lambda: one_slot.engine.snapshot.active_requests == 1)
        else:
            until(lambda: one_slot.engine.snapshot.output_tokens > before.output_tokens)
    wait_until_idle(one_slot)
    generated = one_slot.engine.snapshot.output_tokens - before.output_tokens
    assert generated == 0 if phase == "prefill" else 0 < generated < BUSY["max_tokens"]
    fresh = httpx2.post(f"{one_slot.url}{CHAT}", json=chat_body(model="tiny-long"), timeout=30)
    assert fresh.status_code == 200
