"""Tests of the events of /admin/events."""

from dataclasses import replace

import pytest
from pydantic_core import from_json, to_json

from lmx_lab.server.events import events_between, sample
from lmx_lab.values.engine import COUNTERS, EngineSnapshot, TokenTotals
from lmx_lab.values.models import ModelEvent, Unloading
from lmx_lab.wire.admin import Memory, Sample, Throughput
from tests.support.models import TINY_ENTRY, in_memory


def test_throughput_is_measured_since_the_previous_snapshot():
    before = EngineSnapshot(totals=TokenTotals(output_tokens=100))
    now = in_memory(
        TINY_ENTRY,
        totals=TokenTotals(output_tokens=130),
        active_requests=2,
        queued_requests=3,
        memory_used_bytes=10**9,
        memory_total_bytes=4 * 10**9,
    )
    assert events_between(before, now, 1.5) == [
        Throughput(tokens_per_second=20, active_requests=5, queued_requests=3),
        Memory(vram_used_gb=1, vram_total_gb=4, pct=25),
    ]


def test_a_sample_has_all_metrics_since_the_previous_snapshot():
    totals = TokenTotals(output_tokens=100, prompt_tokens=10, cached_tokens=5, encoded_tokens=50)
    before = EngineSnapshot(totals=totals)
    now = in_memory(
        TINY_ENTRY,
        totals=replace(totals, output_tokens=130, prompt_tokens=70, cached_tokens=45),
        active_requests=2,
        queued_requests=3,
        memory_used_bytes=10**9,
        memory_peak_bytes=2 * 10**9,
        memory_total_bytes=4 * 10**9,
        prefix_cache_bytes=5 * 10**8,
        memory_pressure="memory is short",
        memory_freed_bytes=3 * 10**8,
    )
    taken = sample(before, now, 2)
    assert taken.decode_tokens_per_second == 15
    assert taken.prompt_tokens_per_second == 10
    assert taken.encoded_tokens_per_second == 0
    assert (taken.active_requests, taken.queued_requests) == (2, 3)
    assert (taken.memory_active_gb, taken.memory_cache_gb) == (1, 0.5)
    assert (taken.memory_peak_gb, taken.memory_total_gb) == (2, 4)
    assert (taken.memory_pressure, taken.memory_freed_gb) == ("memory is short", 0.3)
    assert sample(now, before, 2).decode_tokens_per_second == 0


@pytest.mark.parametrize("name", [name for name in COUNTERS if f"{name}_per_second" in Sample.model_fields])
def test_a_sample_has_the_rate_of_a_counter(name):
    before, now = (EngineSnapshot(totals=TokenTotals(**{name: value})) for value in (100, 130))
    assert getattr(sample(before, now, 2), f"{name}_per_second") == 15


def test_rates_are_never_negative_after_the_engine_was_started_again():
    throughput, memory = events_between(
        *(EngineSnapshot(totals=TokenTotals(output_tokens=count)) for count in (100, 3)), 1
    )
    assert isinstance(throughput, Throughput)
    assert isinstance(memory, Memory)
    assert (throughput.tokens_per_second, memory.pct) == (0, 0)


def test_the_event_of_a_load_has_the_promised_fields():
    event = ModelEvent(
        model="tiny", stage="download", done_bytes=5, unloading=Unloading(answers_left=1, seconds_left=2)
    )
    assert from_json(to_json(event)) == {
        "type": "model",
        "model": "tiny",
        "stage": "download",
        "done_bytes": 5,
        "total_bytes": None,
        "message": None,
        "unloading": {"answers_left": 1, "seconds_left": 2, "replaced_by": None},
    }
