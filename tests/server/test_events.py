"""The figures of /admin/events, from made-up snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmx_lab.server.admin import events_between, sample, vanished
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.wire.admin import Memory, ModelEvent, Throughput
from tests.server.conftest import ENTRY

LOADED = EngineSnapshot(state="ready", entry=ENTRY)
IDLE = EngineSnapshot(unloaded_model="tiny", unload_cause="idle")
MEMORY = replace(IDLE, unload_cause="memory")
ASKED = replace(IDLE, unload_cause="asked")
LOADING = EngineSnapshot(state="loading")


def test_a_sample_is_what_happened_since_the_last_one() -> None:
    before = EngineSnapshot(output_tokens=100)
    now = EngineSnapshot(
        output_tokens=130, active_requests=2, queued_requests=3, memory_used_bytes=10**9, memory_total_bytes=4 * 10**9
    )
    assert events_between(before, now, 1.5) == [
        Throughput(tokens_per_second=20, active_requests=5, queued_requests=3),
        Memory(vram_used_gb=1, vram_total_gb=4, pct=25),
    ]


def test_a_sample_has_all_figures_of_the_time_since_the_last_one() -> None:
    before = EngineSnapshot(output_tokens=100, prompt_tokens=10, cached_tokens=5, encoded_tokens=50)
    now = EngineSnapshot(
        output_tokens=130,
        prompt_tokens=70,
        cached_tokens=45,
        encoded_tokens=50,
        active_requests=2,
        queued_requests=3,
        memory_used_bytes=10**9,
        memory_peak_bytes=2 * 10**9,
        memory_total_bytes=4 * 10**9,
        prefix_cache_bytes=5 * 10**8,
    )
    figures = sample(before, now, 2).model_dump(exclude={"at", "type"})
    assert list(figures.values()) == [15, 10, 0, 2, 3, 1, 0.5, 2, 4]
    assert sample(now, before, 2).decode_tokens_per_second == 0


def test_an_engine_that_was_started_anew_does_not_count_backwards() -> None:
    throughput, memory = events_between(EngineSnapshot(output_tokens=100), EngineSnapshot(output_tokens=3), 1)
    assert isinstance(throughput, Throughput)
    assert isinstance(memory, Memory)
    assert (throughput.tokens_per_second, memory.pct) == (0, 0)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (LOADED, IDLE, "idle for 300 s"),
        (LOADED, MEMORY, "out of memory"),
        # Loaded and gone within one second, whatever was before.
        (EngineSnapshot(), MEMORY, "out of memory"),
        (LOADING, MEMORY, "out of memory"),
        (IDLE, MEMORY, "out of memory"),
        # The cause is set a moment before the model is gone.
        (replace(LOADED, unloaded_model="tiny", unload_cause="memory"), MEMORY, "out of memory"),
    ],
)
def test_a_model_that_goes_by_itself_is_told_with_the_reason(
    before: EngineSnapshot, now: EngineSnapshot, message: str
) -> None:
    event = ModelEvent(model="tiny", stage="unloaded", message=message)
    assert vanished(before, now, idle_unload_s=300) == event


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (LOADED, LOADED),
        (LOADED, ASKED),
        (IDLE, IDLE),
        (IDLE, replace(IDLE, state="loading")),
        (EngineSnapshot(), LOADED),
        (LOADED, LOADING),
        (LOADED, replace(LOADED, unloaded_model="tiny", unload_cause="memory")),
    ],
)
def test_nothing_is_told_twice_nor_what_the_loader_tells(before: EngineSnapshot, now: EngineSnapshot) -> None:
    assert vanished(before, now, idle_unload_s=300) is None
