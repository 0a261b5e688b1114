"""Tests of the measurement of one request: its metrics, and the rows of tables."""

import math
import time
from datetime import datetime

import pytest

from lmx_lab.bench import frame
from lmx_lab.bench.sample import COLUMNS, Chunk, RunClock, ServerMetrics, Trace, measure_chunk, row
from lmx_lab.client.chat_format import ChunkReader, TokenUsage
from lmx_lab.errors import UnreachableError
from tests.support.model_server import event
from tests.support.samples import sample


def metrics(*chunks):
    trace = Trace(sent_at_s=10.0, ended_at_s=10.0)
    for chunk in chunks:
        trace.add(chunk)
    return trace.metrics()


def read(**fields):
    return measure_chunk(ChunkReader("http://x").read(event(fields).removeprefix(b"data: ").decode()), 1.0)


def test_the_metrics_of_ten_tokens_agree_with_a_calculation_by_hand():
    times = [10.5, *(10.6 + 0.1 * number for number in range(9))]
    found = metrics(
        Chunk(at_s=10.0),
        *(Chunk(at_s=at_s, tokens=1) for at_s in times),
        Chunk(at_s=11.4, finish_reason="length"),
        Chunk(at_s=11.5, usage=TokenUsage(prompt=30, cached=10, completion=10)),
    )
    assert found == {
        **{"prompt_tokens": 30, "cached_tokens": 10, "output_tokens": 10, "counted_by": "usage", "pieces": 10},
        "ttft_ms": pytest.approx(500),
        **dict.fromkeys(("itl_ms_p50", "itl_ms_p95", "itl_ms_p99"), pytest.approx(100)),
        "prefill_tok_s": pytest.approx(40),
        "decode_tok_s": pytest.approx(10),
        "e2e_ms": pytest.approx(1500),
        **dict.fromkeys(("queue_ms", "server_ttft_ms", "server_prefill_tok_s", "server_decode_tok_s")),
        **dict.fromkeys(("peak_memory_gb", "drafted_tokens", "accepted_tokens")),
        "finish_reason": "length",
    }


def piece(at_s, tokens=1):
    return Chunk(at_s=at_s, tokens=tokens)


def used(at_s, completion):
    return Chunk(at_s=at_s, usage=TokenUsage(prompt=3, cached=None, completion=completion))


END = Chunk(at_s=10.7, finish_reason="stop")
UNKNOWN = {"decode_tok_s": None, "itl_ms_p50": None}


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        pytest.param(
            [piece(10.5), piece(10.6), END, used(12.0, 3)],
            {"decode_tok_s": pytest.approx(10)},
            id="the time of a last token without text counts",
        ),
        pytest.param(
            [piece(10.5, 2), piece(10.9, 4), piece(11.0)],
            {"itl_ms_p50": pytest.approx(100), "decode_tok_s": pytest.approx(10)},
            id="the tokens of a piece share the time before it",
        ),
        pytest.param(
            [piece(10.5), piece(10.6), used(10.7, 128)],
            {"output_tokens": 128, "pieces": 2, "ttft_ms": pytest.approx(500), **UNKNOWN},
            id="the times of the tokens of large pieces are unknown",
        ),
        pytest.param(
            [piece(10.5), piece(10.6), END],
            {"output_tokens": 2, "counted_by": "chunks", "prompt_tokens": None, "prefill_tok_s": None},
            id="without usage, pieces are counted and the prompt is unknown",
        ),
        pytest.param(
            [piece(10.5), used(10.6, 0)],
            {"output_tokens": 1, "counted_by": "chunks", "prompt_tokens": 3},
            id="a usage of zero tokens is ignored",
        ),
        pytest.param([], UNKNOWN, id="no token has no rate"),
        pytest.param([piece(10.5)], UNKNOWN, id="one token has no rate"),
        pytest.param(
            [used(10.5, 1), Chunk(at_s=10.5, server=ServerMetrics(cached_tokens=20))],
            {"cached_tokens": 20},
            id="cached tokens are read from the timings if usage has none",
        ),
    ],
)
def test_the_metrics_of_a_stream(chunks, expected):
    found = metrics(*chunks)
    assert {name: found.get(name) for name in expected} == expected


def test_times_start_when_the_request_was_due():
    trace = Trace(sent_at_s=10.0, due_at_s=7.0, ended_at_s=10.0)
    for chunk in (Chunk(at_s=10.5, tokens=1), Chunk(at_s=11.0, usage=TokenUsage(prompt=20, cached=0, completion=1))):
        trace.add(chunk)
    found = trace.metrics()
    assert (found["ttft_ms"], found["e2e_ms"]) == (pytest.approx(3500), pytest.approx(4000))
    assert found["prefill_tok_s"] == pytest.approx(40), "only the time of the server counts"


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        ({"content": "a"}, 1),
        ({"reasoning_content": "a"}, 1),
        ({"reasoning": "a"}, 1),
        ({"tool_calls": [{"index": 0}]}, 1),
        ({"role": "assistant", "content": ""}, 0),
        ({}, 0),
        (None, 0),
    ],
)
def test_only_a_delta_with_content_is_a_piece_of_the_answer(delta, tokens):
    assert read(choices=[{"index": 0, "delta": delta, "finish_reason": None}]).tokens == tokens


def test_a_chunk_is_read_with_usage_and_timings():
    timings = {"cache_n": 4, "prompt_per_second": 50.0, "predicted_per_second": 7, "queue_ms": 2, "ttft_ms": "late"}
    usage = {"prompt_tokens": 9, "completion_tokens": 3.0, "prompt_tokens_details": {"cached_tokens": 4}}
    chunk = read(choices=[{"delta": {}, "finish_reason": "length"}], usage=usage, timings=timings)
    assert chunk.usage == TokenUsage(prompt=9, cached=4, completion=3)
    assert chunk.server == ServerMetrics(queue_ms=2, prefill_tok_s=50, decode_tok_s=7, cached_tokens=4)
    assert chunk.finish_reason == "length"


@pytest.mark.parametrize("data", ["[1]", "no", "\ufffd", "[" * 100_000])
def test_data_that_is_not_a_chunk_is_refused(data):
    with pytest.raises(UnreachableError, match="unlike"):
        ChunkReader("http://x").read(data)


def test_every_sample_is_a_row_and_the_table_has_the_provenance():
    table = frame([sample(request=1), sample(request=2, error="lmx-timeout: late")], {"commit": "abc"})
    assert tuple(table.columns) == COLUMNS
    assert table["request"].tolist() == [1, 2]
    assert table["error"].isna().tolist() == [True, False]
    assert table.attrs["provenance"] == {"commit": "abc"}


def test_nan_and_infinity_are_missing_values():
    written = row(sample(ttft_ms=math.nan, decode_tok_s=math.inf, e2e_ms=2.5))
    assert (written["ttft_ms"], written["decode_tok_s"], written["e2e_ms"]) == (None, None, 2.5)


def test_time_stamps_do_not_follow_changes_of_the_wall_clock(monkeypatch):
    clock = RunClock()
    before = clock.stamp(100.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    one, other = (datetime.fromisoformat(stamp) for stamp in (before, clock.stamp(102.5)))
    assert (other - one).total_seconds() == 2.5
    assert one.year > 2000
