"""Tests of the metrics, which are read with the parsers of Prometheus' client library."""

from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from lmx_lab.engine import ModelManager
from lmx_lab.server.metrics import BUCKETS_S, Metrics
from lmx_lab.settings import Settings
from lmx_lab.values.engine import COUNTERS, EngineSnapshot, TokenTotals
from tests.support.asking import report
from tests.support.models import TINY_ENTRY, in_memory
from tests.support.samples import request_end

ODD = replace(TINY_ENTRY, id='odd "name"\n')
REPORT = replace(report(cached=4, decode_s=0.5), queue_s=0.002)


@dataclass
class FakeManager:
    """A manager whose state is set by the tests."""

    snapshot: EngineSnapshot = field(default_factory=EngineSnapshot)
    alive: bool = True
    uptime_s: float = 12.5
    settings: Settings = field(default_factory=Settings)


def metrics_of(manager):
    return Metrics(cast(ModelManager, manager))


def samples(metrics):
    body, _ = metrics.render()
    return {
        (sample.name.removeprefix("lmx_lab_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def end(outcome="stop", code=None, report=REPORT):
    return request_end(finish_reason=outcome, code=code, report=report)


def test_metrics_of_the_engine_come_from_the_current_snapshot():
    manager = FakeManager()
    metrics = metrics_of(manager)
    assert value(metrics, "output_tokens_total") == 0
    counters = {name: at for at, name in enumerate(COUNTERS, 10)}
    manager.snapshot = in_memory(
        ODD,
        memory_bytes=8,
        active_requests=1,
        queued_requests=2,
        totals=TokenTotals(**counters),
        prefix_cache_bytes=6,
        memory_used_bytes=7,
        memory_peak_bytes=9,
        memory_total_bytes=2**40,
        progress_at=float("inf"),
    )
    expected = {
        **{f"{name}_total": count for name, count in counters.items()},
        "requests_active": 1,
        "requests_queued": 2,
        "prefix_cache_bytes": 6,
        "memory_used_bytes": 7,
        "model_memory_bytes": 8,
        "memory_peak_bytes": 9,
        "memory_total_bytes": 2**40,
        "uptime_seconds": 12.5,
        "engine_up": 1,
        "engine_stalled": 0,
    }
    assert {name: value(metrics, name) for name in expected} == expected


def test_only_the_loaded_model_is_a_label():
    manager = FakeManager(in_memory(ODD))
    metrics = metrics_of(manager)
    assert value(metrics, "model_loaded", model=ODD.id) == 1
    manager.snapshot = EngineSnapshot(state="empty", unloaded_model=ODD.id, unload_cause="idle")
    assert not [name for name, _ in samples(metrics) if name == "model_loaded"]


@pytest.mark.parametrize(
    ("manager", "up", "stalled"),
    [
        (FakeManager(), 1, 0),
        (FakeManager(EngineSnapshot(state="dead")), 0, 0),
        (FakeManager(alive=False), 0, 0),
        (FakeManager(in_memory(ODD, active_requests=1, progress_at=float("-inf"))), 1, 1),
    ],
)
def test_dead_and_stalled_engines_are_distinguished(manager, up, stalled):
    metrics = metrics_of(manager)
    assert (value(metrics, "engine_up"), value(metrics, "engine_stalled")) == (up, stalled)


def test_ends_are_counted_by_outcome_and_code():
    metrics = metrics_of(FakeManager())
    for outcome, code in (("stop", None), ("stop", None), ("error", "queue-full"), ("error", "lmx-timeout")):
        metrics.observe(end(outcome, code, None))
    metrics.observe(end("cancelled", report=None))
    metrics.observe(end("tool_calls"))
    counted = {labels: count for (name, labels), count in samples(metrics).items() if name == "requests_total"}
    assert counted == {
        (("code", ""), ("kind", "chat"), ("outcome", "stop")): 2,
        (("code", "queue-full"), ("kind", "chat"), ("outcome", "error")): 1,
        (("code", "lmx-timeout"), ("kind", "chat"), ("outcome", "error")): 1,
        (("code", ""), ("kind", "chat"), ("outcome", "cancelled")): 1,
        (("code", ""), ("kind", "chat"), ("outcome", "tool_calls")): 1,
    }


def test_histograms_contain_the_times_of_complete_answers():
    metrics = metrics_of(FakeManager())
    metrics.observe(end())
    metrics.observe(end("error", "internal-error", None))
    sums = {
        "queue_seconds": REPORT.queue_s,
        "time_to_first_token_seconds": REPORT.ttft_s,
        "time_per_output_token_seconds": 0.1,
        "request_seconds": REPORT.total_s,
    }
    for name, seconds in sums.items():
        assert value(metrics, f"{name}_count") == 1
        assert value(metrics, f"{name}_sum") == pytest.approx(seconds)
    bounds = [float(dict(labels)["le"]) for name, labels in samples(metrics) if name == "request_seconds_bucket"]
    assert bounds == [*BUCKETS_S, float("inf")]
    assert value(metrics, "queue_seconds_bucket", le="0.0025") == 1
    assert value(metrics, "queue_seconds_bucket", le="0.001") == 0


def test_an_answer_without_tokens_has_no_time_per_token():
    metrics = metrics_of(FakeManager())
    metrics.observe(end("length", report=replace(REPORT, output_tokens=0, finish_reason="length")))
    assert value(metrics, "time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_seconds_count") == 1


def test_two_servers_in_one_process_have_separate_metrics():
    one, two = metrics_of(FakeManager()), metrics_of(FakeManager())
    one.observe(end())
    assert value(one, "request_seconds_count") == 1
    assert value(two, "request_seconds_count") == 0
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("lmx_lab")]


def test_the_format_is_negotiated_and_each_metric_has_a_description():
    metrics = metrics_of(FakeManager(in_memory(ODD)))
    metrics.observe(end())
    body, content_type = metrics.render("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = list(parse_openmetrics(body.decode()))
    names = {family.name for family in families}
    assert {"lmx_lab_requests", "lmx_lab_output_tokens", "lmx_lab_model_loaded", "lmx_lab_request_seconds"} <= names
    assert all(family.documentation and family.name.startswith("lmx_lab_") for family in families)


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/html", ";;,", "application/openmetrics-text;version=abc", "text/plain;version=é"]
)
def test_other_formats_get_plain_text(accept):
    body, content_type = metrics_of(FakeManager()).render(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert list(parse_text(body.decode()))
