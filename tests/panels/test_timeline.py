"""Test the timeline panel without a browser."""

import asyncio
import threading
from dataclasses import replace

import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.panels.timeline import MAX_PARTS, TimelinePanel
from lmx_lab.values.timeline import EngineStep, ModelTimeline, ServerTimeline
from tests.support.panels import Reader, Refused
from tests.support.samples import request_timeline

ONE = request_timeline(
    EngineStep("queued", 0.0, 1.0),
    EngineStep("prefill", 1.0, 0.5, 4),
    EngineStep("decode", 1.5, 0.5, 1, kv_bytes=2 * 10**6),
    request_id="<b>",
)
LOADING = ModelTimeline(kind="load", model="m", at=99.0, outcome="loaded", message="", total_s=0.5, stages=())


def test_a_lane_is_shown_for_each_request_and_explained(backend, workbench):
    requests, may_answer = [[]], threading.Event()

    async def timeline(last_s, *, most=None):
        await asyncio.to_thread(may_answer.wait)
        if isinstance(requests[0], Exception):
            raise requests[0]
        return ServerTimeline(requests=tuple(requests[0]), models=(LOADING,))

    backend.timeline = timeline
    reader = Reader(TimelinePanel(workbench))
    panel = reader.panel
    assert panel.lanes is None
    may_answer.set()
    # The load is shown before the first request.
    reader.until(lambda panel: [lane["id"] for lane in panel.lanes or ()] == ["load-99.000000"])
    requests[0] = [ONE, replace(ONE, internal=True), replace(ONE, at=102.0, outcome="running")]
    reader.until(lambda panel: len(panel.lanes) == 3)
    newest, oldest, load = panel.lanes
    assert newest["text"].endswith("running")
    assert [part[:3] for part in oldest["parts"]] == [
        ["queued", 20.0, 20.0],
        ["prefill", 40.0, 10.0],
        ["decode", 50.0, 10.0],
    ]
    assert "2 MB of KV caches" in oldest["text"]
    assert [part[:3] for part in load["parts"]] == [["load", 0.0, 10.0]]
    assert "The load of m ended with 'loaded' after 0.500 s." in reader.ask("explain", lane=load["id"])
    assert "It waited 1.000 s for a slot" in reader.ask("explain", lane=oldest["id"])
    assert "no longer shown" in reader.ask("explain", lane="gone")
    assert "&lt;b&gt;" in panel.snapshot_html()
    reader.ask("change", paused=True)
    requests[0] = [ONE]
    with pytest.raises(Refused, match="must be true or false"):
        reader.ask("change", paused=1)
    assert len(panel.lanes) == 3
    reader.ask("change", paused=False)
    reader.until(lambda panel: len(panel.lanes) == 2)
    requests[0] = InvalidRequestError("the server runs elsewhere")
    reader.until(lambda panel: panel.problem == "the server runs elsewhere" and not panel.lanes)


def test_a_bar_has_a_limited_number_of_parts(backend, workbench):
    steps, at = list(ONE.steps), 2.0
    for number in range(400):
        duration = 0.2 + number / 1000 if number % 4 == 0 else 0.01
        steps.append(EngineStep("decode", at, duration, 1, number + 5))
        at += duration
    long = replace(ONE, steps=tuple(steps), decode_s=at - 1.5)

    async def timeline(last_s, *, most=None):
        return ServerTimeline(requests=(long,))

    backend.timeline = timeline
    reader = Reader(TimelinePanel(workbench))
    panel = reader.panel
    reader.until(lambda panel: panel.lanes)
    parts = panel.lanes[0]["parts"]
    assert 20 < len(parts) <= MAX_PARTS
    assert sum(part[2] for part in parts) == pytest.approx(100, abs=0.1)
    # The longest step is among those that are marked.
    assert any(part[0] == "slow" and "0.596 s" in part[3] for part in parts)
