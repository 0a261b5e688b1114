"""Test the metrics panel without a browser: windows, frames, data frames."""

import asyncio
import json
import math
import re
import struct
from itertools import pairwise

import pandas as pd
import pytest

from lmx_lab.errors import RequestStoppedError
from lmx_lab.panels.metrics import MAX_FAILURES, MAX_POINTS, MetricsPanel, pack_columns, window
from lmx_lab.panels.panel import source
from lmx_lab.panels.summary import CHARTS, FIELDS
from lmx_lab.results.figures import segments
from lmx_lab.wire.admin import Sample
from tests.support.panels import WAIT_S, Reader, Refused, contrast, server_sample
from tests.support.samples import request_end

NOON = 1_800_000_000.0
DECODE = FIELDS.index("decode_tokens_per_second")
BACKGROUNDS = ("#ffffff", "#f5f5f5", "#111111", "#212121")
"""JupyterLab's backgrounds of outputs and of headers, light and dark."""


def seconds(count, start=NOON, **fields):
    """Two samples per second."""
    return [server_sample(start + 0.5 * number, **fields) for number in range(count)]


class Watched:
    """A panel that receives samples from a test."""

    def __init__(self, workbench, backend):
        self.panel = MetricsPanel(workbench)
        self.reader = Reader(self.panel)
        self._workbench = workbench
        self._backend = backend

    def take(self, samples):
        async def pass_on():
            for each in samples:
                if each is not None:
                    self._workbench.history.add_sample(each)
                self.panel.tick(self._backend, each)

        self._workbench.submit(pass_on()).result(WAIT_S)

    def ends_at(self, at):
        self.reader.until(lambda panel: panel.end == at)

    @property
    def columns(self):
        return unpacked(self.panel.frame)


@pytest.fixture
def watched(workbench, backend):
    return Watched(workbench, backend)


def unpacked(frame):
    numbers = struct.unpack(f"<{len(frame) // 4}f", frame)
    size = len(numbers) // (len(FIELDS) + 1)
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


# Windows


@pytest.mark.parametrize("minutes", [1, 5, 15])
def test_a_window_has_few_points_and_keeps_every_peak(minutes):
    samples = seconds(1800)
    peaks = {(number, float(number)) for number in range(1800 - 100 * minutes, 1800, 97)}
    for number, value in peaks:
        samples[number] = server_sample(samples[number].at, decode_tokens_per_second=value)
    rows = window(samples, window_s=60 * minutes)
    assert 100 < len(rows) <= MAX_POINTS
    assert all(before[0] < after[0] for before, after in pairwise(rows))
    assert rows[-1][0] - rows[0][0] == pytest.approx(60 * minutes, abs=3)
    assert {value for _, value in peaks} <= {row[1 + DECODE] for row in rows}


def test_points_keep_their_position_as_the_window_moves():
    samples = [server_sample(NOON + 0.5 * number, decode_tokens_per_second=number % 7) for number in range(1900)]
    before = {row[0]: row for row in window(samples[:1800], window_s=900)}
    after = {row[0]: row for row in window(samples[:1807], window_s=900)}
    # All points except those that have left the window, and the newest one, which was incomplete.
    assert len(before.items() & after.items()) >= len(before) - 5


def test_a_time_without_samples_is_a_gap():
    rows = window([*seconds(10, NOON), *seconds(10, NOON + 60)], window_s=300)
    gaps = [row for row in rows if math.isnan(row[1])]
    assert [math.isnan(value) for gap in gaps for value in gap[1:]] == [True] * len(FIELDS)
    assert [gap[0] for gap in gaps] == [pytest.approx(NOON + 32.25)]


@pytest.mark.parametrize(
    ("given", "drawn"),
    [([], []), ([0, 0, 1, 1], [0, 1]), ([3600, 3600.5, 3601, 0, 0.5], [0, 0.5])],
    ids=["no samples", "two samples of one moment", "the clock was set back"],
)
def test_a_window_has_a_point_for_each_moment_since_the_clock_was_set(given, drawn):
    rows = window([server_sample(NOON + at) for at in given], window_s=60)
    assert [row[0] - NOON for row in rows] == drawn


def test_times_keep_their_precision():
    samples = [server_sample(NOON + 0.001 * number, memory_total_gb=25.28) for number in range(0, 3000, 600)]
    columns = unpacked(pack_columns(window(samples, window_s=60), samples[-1].at))
    assert columns[0] == pytest.approx([-2.4, -1.8, -1.2, -0.6, 0], abs=1e-5)
    assert columns[-1] == pytest.approx([25.28] * 5, abs=1e-5)
    assert pack_columns([], NOON) == b""


# The panel


def test_a_frame_has_the_window_and_the_current_values(watched):
    watched.take([server_sample(NOON + number, decode_tokens_per_second=number) for number in range(10)])
    watched.ends_at(NOON + 9)
    assert watched.columns[0] == tuple(range(-9, 1))
    assert watched.columns[1 + DECODE] == tuple(range(10))
    assert watched.panel.now[DECODE] == 9
    assert len(watched.panel.now) == sum(len(chart["names"]) for chart in watched.panel.charts)


def test_a_panel_that_is_made_late_shows_earlier_samples(workbench, backend):
    for sample in seconds(20, active_requests=3):
        workbench.history.add_sample(sample)
    panel = MetricsPanel(workbench)
    assert panel.end == NOON + 9.5
    assert len(unpacked(panel.frame)[0]) == 20


@pytest.mark.slow
def test_a_thousand_updates_leave_a_small_widget(watched):
    samples = [server_sample(NOON + 0.9 * number, **dict.fromkeys(FIELDS, number % 11)) for number in range(1000)]
    watched.reader.ask("change", minutes=15)
    watched.take(samples)
    watched.ends_at(samples[-1].at)
    state = watched.panel.get_state(drop_defaults=False)
    assert len(bytes(state.pop("frame"))) <= 4 * MAX_POINTS * (len(FIELDS) + 1)
    del state["_esm"], state["_css"]
    assert len(json.dumps(state, default=str)) < 4000
    # 1,000 updates at once cause only a few messages.
    assert len([name for name, _ in watched.reader.frames if name == "frame"]) < 10


@pytest.mark.slow
def test_a_paused_view_does_not_change_while_samples_are_recorded(watched):
    watched.take(seconds(10))
    watched.ends_at(NOON + 4.5)
    watched.reader.ask("change", paused=True)
    watched.take(seconds(20, NOON + 5, decode_tokens_per_second=5))
    watched.reader.ask("change", minutes=5)
    watched.reader.until(lambda panel: (panel.paused, panel.minutes) == (True, 5))
    assert (watched.panel.end, watched.panel.now[DECODE]) == (NOON + 4.5, 0)
    assert len(watched.panel.samples) == 30
    watched.reader.ask("change", paused=False)
    watched.ends_at(NOON + 14.5)
    assert (watched.panel.minutes, watched.panel.now[DECODE]) == (5, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("distance_s", "parts"), [(1.9, 1), (2.1, 2), (2.9, 2), (3.1, 2)])
def test_the_panel_and_the_charts_of_reports_leave_the_same_gaps(distance_s, parts):
    samples = [server_sample(NOON), server_sample(NOON + distance_s)]
    gaps = [row for row in window(samples, window_s=60) if math.isnan(row[1])]
    assert len(gaps) + 1 == len(segments([each.at for each in samples], [1.0, 1.0])) == parts


def test_a_stopped_server_has_no_values_and_a_gap_precedes_new_ones(watched, backend):
    watched.take(seconds(4))
    watched.ends_at(NOON + 1.5)
    backend.set_state(state="stopped", note="run the launch cell again")
    watched.take([None])
    watched.reader.until(lambda panel: panel.now == [] and panel.server["state"] == "stopped")
    backend.set_state(state="running", note="")
    watched.take(seconds(4, NOON + 30))
    watched.ends_at(NOON + 31.5)
    assert [math.isnan(value) for value in watched.columns[1]] == [False] * 4 + [True] + [False] * 4
    assert len(watched.panel.now) == len(FIELDS)


@pytest.mark.parametrize(
    "fields", [{"minutes": 0}, {"minutes": 2}, {"minutes": "5"}, {"minutes": True}, {"minutes": []}, {"paused": 1}]
)
def test_invalid_settings_of_a_view_are_refused(watched, fields):
    with pytest.raises(Refused, match="invalid-request"):
        watched.reader.ask("change", **fields)
    assert (watched.panel.minutes, watched.panel.paused) == (1, False)


def test_the_data_frame_has_times_and_units_and_the_same_types_without_samples(watched):
    empty = watched.panel.df
    watched.take(seconds(3, memory_active_gb=1.5))
    frame = watched.panel.df
    assert list(frame.columns) == ["time", *FIELDS]
    assert frame["time"][1] == pd.Timestamp("2027-01-15 08:00:00.5", tz="UTC")
    assert frame["memory_active_gb"].tolist() == [1.5] * 3
    assert set(FIELDS) == set(Sample.model_fields) - {"type", "at", "memory_pressure", "memory_freed_gb"}
    assert (len(empty), len(frame)) == (0, 3)
    assert empty.dtypes.to_dict() == frame.dtypes.to_dict()
    assert [str(frame[name].dtype) for name in ("time", "active_requests")] == ["datetime64[us, UTC]", "int64"]


def test_the_snapshot_has_the_values_and_no_script(watched):
    assert "none yet" in watched.panel.snapshot_html()
    watched.take([*seconds(3, decode_tokens_per_second=71.25), server_sample(NOON + 2, memory_total_gb=25.28)])
    text = watched.panel.snapshot_html()
    for part in ("Decode: all requests", "71.2 tok/s", "0.0 tok/s", "Memory: total", "25.28 GB", "of 4 samples"):
        assert part in text
    assert "<script" not in text
    assert " id=" not in text


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_lines_have_enough_contrast_on_every_background(background):
    marks = dict(re.findall(r"\.mark(\d) \{[^}]*\bcolor: (#\w{6})", source("metrics.css")))
    assert len(marks) == max(chart.lines for chart in CHARTS)
    assert min(contrast(color, background) for color in marks.values()) >= 3


@pytest.mark.anyio
async def test_the_panel_shows_the_progress_of_a_measurement(lab):
    await lab.aload("tiny")
    reader = Reader(MetricsPanel(lab.workbench))
    # The measurement has enough requests to run until the panel has shown its progress.
    measuring = asyncio.create_task(lab.abench(prompt_tokens=32, output_tokens=60, requests=10_000, record=False))
    progress = re.compile(r"Measuring, [\d,]+ of 10001: lab p32-o60-c1-cold")
    await asyncio.to_thread(reader.until, lambda panel: progress.match(panel.job))
    measuring.cancel()
    await asyncio.wait([measuring])
    await asyncio.to_thread(reader.until, lambda panel: not panel.job)


def test_the_panel_shows_the_work_of_a_real_lab(lab, real_workbench):
    lab.load("tiny")
    panel = MetricsPanel(real_workbench)
    reader = Reader(panel)
    reader.until(lambda panel: panel.now)
    lab.chat("Count.", max_tokens=200, ignore_eos=True)
    reader.until(lambda panel: any(sample.decode_tokens_per_second > 0 for sample in panel.samples))
    assert panel.df["decode_tokens_per_second"].max() > 0
    reader.until(lambda panel: max(unpacked(panel.frame)[1 + DECODE]) > 0)
    assert panel.now[FIELDS.index("memory_total_gb")] > 0


def test_running_requests_are_listed_and_one_is_stopped(lab, real_workbench):
    lab.load("tiny")
    reader = Reader(MetricsPanel(real_workbench))
    stream = lab.chat("Count.", stream=True, max_tokens=20_000, ignore_eos=True)
    next(pieces := iter(stream))
    reader.until(lambda panel: panel.clients and "token" in panel.clients[0]["cells"][1])
    (client,) = reader.panel.clients
    assert client["cells"][0] == "this notebook"
    assert re.fullmatch("tiny: 1 token", client["cells"][1])
    assert re.fullmatch(r"\d+ s", client["cells"][2])
    assert reader.ask("stop", request_id=client["id"]) == client["id"]
    with pytest.raises(RequestStoppedError):
        list(pieces)
    reader.until(lambda panel: panel.clients == [])
    with pytest.raises(Refused, match="no running request"):
        reader.ask("stop", request_id=client["id"])


def test_the_last_failed_requests_of_any_client_are_listed(watched, workbench):
    for number in range(2 * MAX_FAILURES + 4):
        failed = {"finish_reason": "error", "code": f"code-{number}"} if number % 2 == 0 else {}
        workbench.history.add_request(request_end(model="<b>tiny</b>", **failed).event)
    watched.take([None])
    watched.reader.until(lambda panel: panel.failures)
    codes = [text.rpartition(": ")[2] for text in watched.panel.failures]
    assert codes == [f"code-{number}" for number in range(2 * MAX_FAILURES + 2, 2, -2)]
    assert "&lt;b&gt;tiny&lt;/b&gt;: code-22" in watched.panel.snapshot_html()
    # Without a model, the kind of the request is shown.
    without_model = request_end(model="", kind="embedding", finish_reason="error", code="no-model-loaded")
    workbench.history.add_request(without_model.event)
    watched.take([None])
    watched.reader.until(lambda panel: panel.failures[0].endswith(", embedding: no-model-loaded"))
