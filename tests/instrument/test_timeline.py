"""Test timelines: what is recorded of a request, the spans, the file for Perfetto, and explanations."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from itertools import pairwise

import httpx2
import pytest
from pydantic import ValidationError

import lmx_lab
from lmx_lab.broadcast import Feed
from lmx_lab.engine import Answer, Caller, GenerationRequest, TextPrompt
from lmx_lab.engine.stream import Mailbox
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument import load_requests
from lmx_lab.instrument.timeline import Timeline
from lmx_lab.server.requests import Requests
from lmx_lab.server.timelines import TimelineLog
from lmx_lab.values.models import ModelEvent
from lmx_lab.values.timeline import KINDS, MAX_STEPS, EngineStep, ModelStage, ModelTimeline, StepLog
from lmx_lab.wire.admin import TimelinePage
from tests.support.labs import serving
from tests.support.samples import request_timeline

FIELDS = {"X": {"ts", "dur", "cat"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "M": {"args"}}
"""The fields of the events that Perfetto reads, after "Trace Event Format": complete events, counters, instants and
names."""
QUIET = request_timeline(
    EngineStep("queued", 0.0, 1.0),
    EngineStep("prefill", 1.0, 0.5, 4, 7, 2, 1000),
    EngineStep("decode", 1.5, 0.1, 1, 8, 2, 3000),
    EngineStep("decode", 1.6, 0.1, 1, 9, 2),
    EngineStep("paused", 1.7, 0.2),
    EngineStep("prefill", 1.9, 0.1, 6, 10, 2),
    EngineStep("decode", 2.9, 0.1, 1, 11, 2),
    EngineStep("decode", 3.0, 0.6, 1, 12, 2),
    outcome="length",
    output_tokens=4,
    decode_s=2.0,
)
"""A request that waited, was paused, and with a slow step; the last step ends after the request."""
LOADING = ModelTimeline(
    kind="load",
    model="m",
    at=90.0,
    outcome="loaded",
    message="",
    total_s=5.0,
    stages=(ModelStage("download", 0.0, 2.0), ModelStage("load", 2.0, 3.0)),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), "echo", slots=1, echo_tokens_per_s=200) as lab:
        yield lab


def check_nesting(spans, total_s):
    """Check that spans are within those of the next lower depth, do not overlap, and that phases add up."""
    open_spans = []
    for span in spans:
        del open_spans[span.depth :]
        if open_spans:
            outer = open_spans[-1]
            assert outer.start_s - 1e-9 <= span.start_s
            assert span.start_s + span.duration_s <= outer.start_s + outer.duration_s + 1e-9
        open_spans.append(span)
    for depth in (1, 2):
        level = [span for span in spans if span.depth == depth]
        for one, other in pairwise(level):
            assert one.start_s + one.duration_s <= other.start_s + 1e-9
    assert sum(span.duration_s for span in spans if span.depth == 1) == pytest.approx(total_s, abs=1e-3)


def test_the_spans_nest_and_add_up_to_the_measured_time(lab):
    replies = [lab.chat(f"the sea is wide {number}", stop=["wide"]) for number in range(2)]
    timeline = lab.timeline()[-2:]
    with pytest.raises(InvalidRequestError, match="last_s is nan"):
        lab.timeline(last_s=float("nan"))
    for one, reply in zip(timeline, replies, strict=True):
        check_nesting(one.spans(), reply.report.total_s)
        assert one.total_s == pytest.approx(reply.report.total_s, abs=1e-3)
        assert one.decode_s == pytest.approx(reply.timings.predicted_ms / 1e3, abs=1e-3)
        assert sum(step.tokens for step in one.steps if step.kind == "decode") == reply.usage.completion_tokens
        assert (one.outcome, one.stop_string) == ("stop", True)
        assert [segment.kind for segment in one.segments()][:2] == ["queued", "prefill"]
    check_nesting(QUIET.spans(), 3.5)
    check_nesting(LOADING.spans(), 5.0)
    assert [span.kv_bytes for span in QUIET.spans() if span.depth < 2] == [3000, 0, 1000, 3000]


def test_a_timeline_has_a_frame_bars_and_a_file_for_perfetto(lab, tmp_path):
    lab.chat("one two three")
    timeline = lab.timeline(3600)
    frame = timeline.df
    of_requests = frame[frame["request"].notna()]
    assert set(of_requests["span"]) <= {"request", *KINDS}
    assert len(of_requests[of_requests["depth"] == 0]) == len(timeline)
    assert list(frame[frame["request"].isna()]["span"]) == ["load", "load"]
    assert Timeline([]).df.dtypes.to_dict() == frame.dtypes.to_dict()
    assert (str(frame["request"].dtype), str(frame["at"].dtype)) == ("Int64", "datetime64[us, UTC]")
    assert "echo stop" in repr(timeline)
    bars = re.findall(r"display:flex.*?</td>", timeline._repr_html_())
    assert len(bars) == len(timeline) + len(timeline.models)
    for bar in bars:
        before, *parts = re.findall(r"width:([\d.]+)%;height:14px;(background:#\w+)?", bar)
        assert 0 <= float(before[0]) < 100
        assert all(color for _, color in parts)
        assert 0 < sum(float(width) for width, _ in (before, *parts)) < 100.1
    assert "No request" in Timeline([])._repr_html_()
    written = json.loads(
        Timeline([QUIET, *timeline], [LOADING, *timeline.models]).save(tmp_path / "trace.json").read_text()
    )
    assert written["displayTimeUnit"] == "ms"
    for event in written["traceEvents"]:
        assert {"name", "ph", "pid", "tid", *FIELDS[event["ph"]]} <= set(event)
        values = event["args"].values() if event["ph"] == "C" else ()
        numbers = [*(event[name] for name in ("pid", "tid", "ts", "dur") if name in event), *values]
        assert all(type(number) is int and number >= 0 for number in numbers)
        assert event.get("s", "t") in ("g", "p", "t")
        assert event["ph"] != "M" or (event["name"] in ("process_name", "thread_name") and event["args"]["name"])
    caches = [event["args"]["bytes"] for event in written["traceEvents"] if event["name"] == "KV caches"]
    assert caches == [1000, 3000, 0]
    complete = [event for event in written["traceEvents"] if event["ph"] == "X"]
    for thread in {event["tid"] for event in complete}:
        ends = []
        for event in (each for each in complete if each["tid"] == thread):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1]
            ends.append(event["ts"] + event["dur"])
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        timeline.save(tmp_path / "no folder" / "trace.json")


def test_recorded_requests_have_their_timeline_also_without_a_lab(tmp_path):
    path = tmp_path / "requests.db"
    with serving(tmp_path, "echo", record_to=path) as lab:
        reply = lab.chat("hello")
        (live,) = lab.timeline()
    (stored,) = load_requests(path)[0].timeline()
    assert stored.total_s == pytest.approx(reply.report.total_s, abs=1e-6)
    assert [step[:1] + step[3:] for step in stored.steps] == [step[:1] + step[3:] for step in live.steps]
    request = load_requests(path)[0]
    request.record = replace(request.record, steps=())
    with pytest.raises(InvalidRequestError, match="no steps were recorded"):
        request.timeline()


def test_running_and_cancelled_requests_are_in_the_timeline_and_a_wait_is_explained(lab):
    stream = lab.chat("hello", stream=True, max_tokens=4000, ignore_eos=True)
    pieces = iter(stream)
    next(pieces)
    second = lab.chat("hi", stream=True)
    running, queued = lab.timeline()[-2:]
    assert (running.outcome, queued.outcome) == ("running", "running")
    assert (queued.steps, queued.queue_s) == ((), queued.total_s)
    stream.close()
    assert "".join(second) == "hi"
    timeline = lab.timeline()[-2:]
    assert [one.outcome for one in timeline] == ["cancelled", "stop"]
    check_nesting(timeline[0].spans(), timeline[0].total_s)
    assert "meanwhile another request had a slot" in timeline.explain()


def test_an_explanation_names_slow_steps_pauses_and_what_was_computed_meanwhile():
    chunk = EngineStep("prefill", 0.1, 0.6, 300, 12, 2)
    other = replace(QUIET, at=102.0, queue_s=0.0, prefill_s=0.7, decode_s=0.0, steps=(chunk,))
    text = Timeline([QUIET, other]).explain(0)
    assert "It waited 1.000 s for a slot." in text
    assert "It was paused for 0.200 s, 1.700 s after its arrival" in text
    assert "A step took 1.000 s, 2.000 s after its arrival; meanwhile another request had a slot, and 300 of" in text
    assert "4 of its 4 prompt tokens were computed in 1 chunk, which took 0.500 s." in text
    assert "The KV caches of all running requests took up to 3 kB." in text
    assert [segment.kind for segment in QUIET.segments()] == [
        *("queued", "prefill", "decode", "paused", "prefill", "slow", "decode"),
    ]
    with pytest.raises(InvalidRequestError, match="there is no request 5"):
        Timeline([QUIET]).explain(5)
    with pytest.raises(InvalidRequestError, match="there is no request 'last'"):
        Timeline([QUIET]).explain("last")


def test_scores_and_first_tokens_of_explored_answers_are_not_requests_of_the_notebook(lab):
    lab.chat("hello", max_tokens=4)
    with lmx_lab.attach(lab.url) as far:
        for place in (lab, far):
            before, hidden = len(place.timeline()), len(place.timeline().internal)
            records = len(lab.requests)
            reply = lab.chat("hello", max_tokens=4)
            assert len(reply.lens()) == len(reply.ids)
            tree = lab.explore("hello", width=2, depth=2, max_tokens=3)
            assert len(tree) == 4
            timeline = place.timeline()
            assert len(timeline) - before == len(lab.requests) - records == 1 + 4
            # One that scores the reply, and one for each beginning: none, and that of each of two tokens.
            assert len(timeline.internal) - hidden == 1 + 3
            assert len(timeline[-2:].internal) == len(timeline.internal)
            assert set(timeline.df["request"].dropna()) == set(range(len(timeline)))
    metrics = httpx2.get(f"{lab.url}/metrics").text
    counted = re.findall(r'lmx_lab_requests_total\{code="",kind="internal",outcome="\w+"\} (\S+)', metrics)
    assert sum(map(float, counted)) == 2 * (1 + 3)


def test_an_attached_lab_has_the_timeline_of_its_server_but_no_comparison(lab):
    for number in range(3):
        lab.chat(f"hello {number}", max_tokens=3)
    with lmx_lab.attach(lab.url) as far:
        here, there = lab.timeline(3600), far.timeline(3600)
        assert len(here) >= 3
        assert [(one.at, one.model, one.outcome, one.decode_s) for one in there] == [
            (one.at, one.model, one.outcome, one.decode_s) for one in here
        ]
        assert there.models == here.models
        assert list(there.df["span"]) == list(here.df["span"])
        assert [one.at for one in far.backend.portal.run(far.backend.timeline(3600, most=2)).requests] == [
            one.at for one in here[-2:]
        ]
        assert len(asyncio.run(far.atimeline(3600))) == len(here)
        with pytest.raises(InvalidRequestError, match="attached lab"):
            far.compare(["hello"], [{"temperature": 0}])


def test_a_long_answer_keeps_a_limited_number_of_steps_with_all_tokens():
    log = StepLog(0.0)
    log.start(1.0)
    for number in range(3 * MAX_STEPS):
        log.add("decode", 1.0 + number, 2.0 + number, tokens=1, step=number + 1)
    log.add("decode", 1.0 + number, 3.0 + number, tokens=2, step=number + 1)
    steps = log.steps()
    assert len(steps) < MAX_STEPS
    assert sum(step.tokens for step in steps) == 3 * MAX_STEPS + 2
    assert steps[0] == EngineStep("queued", 0.0, 1.0)
    for one, other in pairwise(steps):
        assert one.end_s == pytest.approx(other.start_s)


def log_with(logs, *, kept=256, **options):
    """Return the timelines of requests with these steps, whose ids are their numbers."""
    requests = Requests(Feed(), kept=kept)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        for number, steps in enumerate(logs):
            answer = Answer(Mailbox(loop, steps), lambda: None, request=GenerationRequest(prompt=TextPrompt(text="a")))
            caller = Caller(request_id=f"{number}")
            requests.accept(requests.begin(caller, kind="chat", model="m"), [answer])
    return TimelineLog(requests, **options)


def test_the_oldest_requests_are_dropped_from_the_log():
    log = log_with([StepLog(0.0)] * 7, kept=4)
    kept = log.read(60).requests
    assert (len(kept), kept[0].request_id) == (4, "3")
    assert [one.request_id for one in log.read(60, most=1).requests] == ["6"]


def test_loads_and_unloads_consist_of_their_stages():
    log = TimelineLog(Requests(Feed()), loads=6)
    stages = [
        *(("org/m", "download"), ("org/m", "download"), ("org/m", "verify"), ("m", "load"), ("e", "load")),
        *(("e", "loaded"), ("m", "loaded"), ("m", "unloading"), ("m", "unloading"), ("m", "unloaded")),
        *(("x", "load"), ("path/x", "failed"), ("m", "unloaded"), ("n", "load")),
    ]
    for model, stage in stages:
        log.observe_model(ModelEvent(model=model, stage=stage, message="why" if stage == "failed" else None))
    found = log.read(60).models
    assert [(one.kind, one.model, one.outcome, [stage.name for stage in one.stages]) for one in found] == [
        ("load", "m", "loaded", ["download", "verify", "load"]),
        ("load", "e", "loaded", ["load"]),
        ("unload", "m", "unloaded", ["unloading"]),
        ("load", "path/x", "failed", ["load"]),
        ("unload", "m", "unloaded", []),
        ("load", "n", "running", ["load"]),
    ]
    for one in found[:4]:
        check_nesting(one.spans(), one.total_s)
    assert found[3].message == "why"
    for number in range(12):
        log.observe_model(ModelEvent(model=f"{number}", stage="unloaded"))
    assert len(log.read(60).models) == 6


def test_a_page_has_a_limited_number_of_steps():
    steps = StepLog(0.0)
    for at in range(2):
        steps.add("decode", at, at + 1, tokens=1, kv_bytes=7)
    log = log_with([steps] * 5, page_steps=3)
    pages, before = [], None
    while not pages or before is not None:
        page = log.page(60, limit=4, before=before)
        before = page.before
        pages.append([each.request_id for each in page.requests])
        assert page.requests[0].steps == (
            EngineStep("decode", 0, 1, 1, 0, 0, 7),
            EngineStep("decode", 1, 1, 1, 0, 0, 7),
        )
    assert pages == [["4", "3"], ["2", "1"], ["0"]]


@pytest.mark.parametrize("steps", [[[0]], [[0], [1, 2], *[[0]] * 5], [[9], *[[0]] * 6]])
def test_steps_of_another_form_are_refused(steps):
    page = TimelinePage(requests=[QUIET], models=[], before=None).model_dump()
    page["requests"][0]["steps"] = steps
    with pytest.raises(ValidationError):
        TimelinePage.model_validate(page)
