"""Test reports: their content, their escaping, and how they are written."""

import os
import re
from dataclasses import replace

import pandas as pd
import pytest

from lmx_lab.backend import ServerState
from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.report import CSS, GENERATOR, MAX_REQUEST_ROWS, report_html, take_snapshot, write_report
from lmx_lab.panels.summary import CHARTS
from lmx_lab.panels.workbench import EndedRequest
from lmx_lab.results.drawing import NotebookFigure
from lmx_lab.results.figures import HeatMap
from lmx_lab.wire.admin import Compute, ModelRecords
from tests.support.panels import Page, contrast, record, server_sample
from tests.support.samples import request_end

STATE = ServerState(state="running", place="in this kernel", url="http://127.0.0.1:8400", model="tiny")
HOSTILE = "<script>alert(1)</script><img src='http://evil.example/x' onerror=\"x\">\x00\u202e\ud800&amp;"


def snapshot(*models, state=STATE, now=None):
    compute = Compute(blas="openblas", detail="2 threads", threads=2, gflops=80.0)
    loaded = {"loaded": True, "vram_gb": 0.27, "size_gb": 0.26, "context_length": 8192}
    records = [record(name, **loaded) for name in models]
    return take_snapshot(state, ModelRecords(models=records, compute=compute), now)


def test_a_snapshot_has_server_model_measurements_machine_and_versions():
    taken = snapshot("tiny", now=server_sample(1, memory_active_gb=1.5, queued_requests=3))
    for text in (repr(taken), taken._repr_html_().replace("&#x27;", "'")):
        for words in ("running in this kernel", "127.0.0.1:8400", "tiny", "3 waiting", "1.50 GB", "cores"):
            assert words in text
        assert all(f"{name} " in text for name in ("lmx-lab", "mlx", "mlx-lm", "python"))


def ended(at, **fields):
    usual = {"prompt_tokens": 5, "completion_tokens": 7, "tokens_per_second": 20.0, "ttft_ms": 100.0}
    return EndedRequest(at=at, event=request_end(**{**usual, **fields}).event)


def rows(text, section):
    """Return the cells of the bodies of a section's tables."""
    (content,) = re.findall(rf"<h2>{section}</h2>(.*?)</section>", text, re.DOTALL)
    bodies = re.findall(r"<tbody>(.*?)</tbody>", content, re.DOTALL)
    parts = re.findall(r"<tr>(.*?)</tr>", "".join(bodies), re.DOTALL)
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)] for row in parts]


def full_report(requests=()):
    fields = {"active_requests": 1, "memory_active_gb": 2}
    samples = [server_sample(1000 + at, decode_tokens_per_second=at, **fields) for at in range(60)]
    return report_html(snapshot("tiny", now=samples[-1]), samples, requests, [("Chat", "<p>words</p>"), ("Empty", "")])


def test_the_page_is_complete_and_loads_nothing():
    page = Page(full_report([ended(1000)]))
    assert not {"script", "link", "iframe", "img", "object", "form"} & set(page.tags)
    outside = [value for _, attrs in page.elements for name, value in attrs.items() if name in ("src", "href", "style")]
    assert outside == []
    assert not re.search(r"@import|url\(", CSS)
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    assert page.tags.count("svg") == 4
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids)) == 8


def test_names_and_messages_are_shown_as_text():
    state = replace(STATE, model=HOSTILE, note=HOSTILE, others=(HOSTILE,), url=HOSTILE, place=HOSTILE)
    requests = [ended(1000, model=HOSTILE, code=HOSTILE, finish_reason="error")]
    text = report_html(snapshot(HOSTILE, state=state), [server_sample(1)], requests, [(HOSTILE, "<p>mine</p>")])
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text
    assert not set("\x00\u202e\ud800") & set(text)
    assert "<p>mine</p>" in text
    Page(snapshot(HOSTILE, state=state)._repr_html_())
    assert "<script" not in snapshot(HOSTILE, state=state)._repr_html_()


def test_an_empty_report_says_so_in_each_section():
    stopped = ServerState(state="stopped", place="", url="http://127.0.0.1:8400", note="run the launch cell again")
    text = report_html(take_snapshot(stopped, ModelRecords(models=[]), None), [], [], [("Chat", "")])
    Page(text)
    for words in ("no models", "No measurements", "No request", "nothing to show", "none loaded", "launch cell again"):
        assert words in text
    assert "<svg" not in text


def test_requests_are_listed_newest_first_with_their_outcome():
    refused = ended(3000, finish_reason="error", code="queue-full", tokens_per_second=0, ttft_ms=0)
    listed = rows(full_report([ended(1000), refused, ended(2000, kind="embedding")]), "Requests")[2:]
    outcomes = [("chat", "error: queue-full"), ("embedding", "stop"), ("chat", "stop")]
    assert [(row[1], row[7]) for row in listed] == outcomes
    assert listed[0][5:7] == ["", ""]  # A request that failed has no speed.
    assert listed[2][3:7] == ["5", "7", "20", "100"]


def test_each_kind_is_counted_and_medians_include_only_successful_requests():
    requests = [ended(index, tokens_per_second=speed) for index, speed in enumerate((10.0, 20.0, 90.0))]
    requests += [ended(9, finish_reason="error", tokens_per_second=0), ended(9, finish_reason="cancelled")]
    requests += [ended(9, kind="rerank", finish_reason="error")]
    chat, rerank = rows(full_report(requests), "Requests")[:2]
    assert chat == ["chat", "5", "1", "1", "25", "35", "20", "100"]
    assert rerank == ["rerank", "1", "1", "0", "5", "7", "", ""]


def test_requests_beyond_the_maximum_are_counted_and_omitted():
    text = full_report([ended(index, prompt_tokens=index) for index in range(MAX_REQUEST_ROWS + 50)])
    listed = rows(text, "Requests")
    assert listed[0][1] == "250"
    assert len(listed) == 1 + MAX_REQUEST_ROWS
    assert (listed[1][3], listed[-1][3]) == ("249", "50")
    assert "50 older ones are omitted" in text
    assert "omitted" not in full_report([ended(index) for index in range(MAX_REQUEST_ROWS)])


def test_models_and_charts_are_those_of_the_panels():
    text = full_report()
    assert re.findall(r"<title id=.*?>(.*?)</title>", text) == [chart.title for chart in CHARTS]
    assert rows(text, "Models") == [["tiny", "chat", "mlx", "mlx", "260 MB", "", "8,192", "", "loaded, 270 MB"]]


def test_samples_in_any_order_make_the_same_charts():
    samples = [server_sample(1000 + index, prompt_tokens_per_second=index) for index in range(20)]
    now = snapshot("tiny")
    assert report_html(now, samples, []) == report_html(now, samples[::-1], [])
    assert "Gaps" not in report_html(now, samples, [])


def test_text_and_lines_have_enough_contrast_in_both_themes():
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in CSS.split("@media screen", 1))
    assert set(light) == set(dark)
    for theme in (light, dark):
        assert min(contrast(theme[name], theme["paper"]) for name in ("text", "muted")) >= 4.5
        assert min(contrast(theme[f"line-{index}"], theme["paper"]) for index in range(3)) >= 4.5


def test_results_come_first_under_their_titles():
    chart = NotebookFigure()
    chart.subplots()
    results = [
        pd.DataFrame({"x": ["<script>\u202e</script>"]}),
        "A <plot>",
        chart,
        "Notes",
        HeatMap(title="m", values=[], rows=[], columns=[]),
    ]
    text = report_html(snapshot("tiny"), [], [], [], [*results, "Lone title"])
    page = Page(text)
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles[:6] == ["Data frame", "A &lt;plot&gt;", "Notes", "Lone title", "Server", "Models"]
    assert "script" not in page.tags
    assert [attrs["src"][:18] for tag, attrs in page.elements if tag == "img"] == ["data:image/svg+xml"]


# --- the file


def test_a_report_is_written_and_overwritten(tmp_path):
    target = tmp_path / "run.html"
    assert write_report(target, full_report()) == target
    assert write_report(str(target), full_report([ended(1)])) == target
    assert "<time" in target.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [target]


def test_a_report_has_the_permissions_of_the_users_files_and_a_link_to_it_stays_a_link(tmp_path):
    (tmp_path / "other").write_text("")
    (tmp_path / "link.html").symlink_to(tmp_path / "run.html")
    saved = write_report(tmp_path / "link.html", full_report())
    assert (saved, (tmp_path / "link.html").is_symlink()) == (tmp_path / "run.html", True)
    assert saved.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_that_is_not_a_report_is_not_overwritten(tmp_path):
    (tmp_path / "work.html").write_text("{}")
    with pytest.raises(InvalidRequestError, match=r"work\.html.*not a report"):
        write_report(tmp_path / "work.html", full_report())
    assert (tmp_path / "work.html").read_text() == "{}"
    with pytest.raises(InvalidRequestError, match=r"work\.png' has the suffix \.png, .* use \.html"):
        write_report(tmp_path / "work.png", full_report())
    (tmp_path / "empty.html").touch()
    write_report(tmp_path / "empty.html", full_report())


@pytest.mark.parametrize(
    "path", ["", ".", "no-such-folder/run.html", "file/run.html", "x" * 300, "a\x00b", "pipe", None]
)
def test_an_unwritable_path_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text(GENERATOR)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequestError, match=r"^the report "):
        write_report(path, full_report())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "pipe"]
