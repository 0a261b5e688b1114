"""Test the metrics panel: what its module draws on an empty page, and its charts, pause and time axis in a notebook."""

import re
from base64 import b64encode

import pytest
from playwright.sync_api import expect

from lmx_lab.panels.metrics import MetricsPanel, pack_columns, window
from lmx_lab.panels.panel import script, styles
from lmx_lab.panels.summary import CHARTS, FIELDS
from lmx_lab.wire.admin import Sample
from tests.browser.jupyterlab import LONG_ANSWER, NEXT_FRAMES, ask, chart_moves, drawn

NOON = 1_800_000_000.0
COLORS = ["31,131,214", "194,87,26", "168,92,196"]
"""The colours of the lines in metrics.css."""
LINE = COLORS[0]
VALUES = dict.fromkeys(FIELDS, 1.0) | {
    "decode_tokens_per_second": 50,
    "prompt_tokens_per_second": 1e6,
    "queued_requests": 3,
}
VALUES |= {"memory_cache_gb": 0.5, "memory_peak_gb": 20}
PAGE = """<!doctype html><meta charset=utf-8><style>{css}</style>
<div id=above style="height: 5000px"></div><div id=view style="width: 1000px"></div>"""
# The model that a widget's frontend passes to render(), with traits and listeners. Buffers may begin at any byte.
RENDER = """async ([code, state, frame]) => {
    const module = await import(URL.createObjectURL(new Blob([code], {type: "text/javascript"})));
    const bytes = Uint8Array.from(atob(frame), (each) => each.charCodeAt(0));
    const shifted = new Uint8Array(bytes.length + 3);
    shifted.set(bytes, 3);
    window.state = {...state, frame: new DataView(shifted.buffer, 3, bytes.length)};
    window.listeners = new Map();
    const model = {
        get: (name) => window.state[name],
        on: (names, f) => names.split(" ").forEach((name) =>
            listeners.set(name, [...(listeners.get(name) ?? []), f])),
        off: (names, f) => names.split(" ").forEach((name) =>
            listeners.set(name, listeners.get(name).filter((each) => each !== f))),
        send() {},
    };
    window.leave = module.default.render({model, el: document.getElementById("view")});
}"""
# For each column of pixels of the first chart, whether it has a pixel of the line.
COLUMNS = f"""(canvas) => {{
    const {{width, height}} = canvas;
    const {{data}} = canvas.getContext("2d").getImageData(0, 0, width, height);
    return Array.from({{length: width}}, (_, x) => Array.from({{length: height}}, (_, y) => 4 * (y * width + x))
        .some((at) => data.slice(at, at + 3).join() === "{LINE}"));
}}"""
# For each chart and colour, the rows of pixels with the colour, as fractions of the height.
ROWS = f"""(canvases) => canvases.map((canvas) => {{
    const {{width, height}} = canvas;
    const {{data}} = canvas.getContext("2d").getImageData(0, 0, width, height);
    const colors = Array.from({{length: width * height}}, (_, at) => data.slice(4 * at, 4 * at + 3).join());
    const rows = (color) => colors.flatMap((each, at) => each === color ? [Math.floor(at / width) / height] : []);
    return {COLORS}.map((color) => [...new Set(rows(color))]);
}})"""


@pytest.fixture
def page(browser):
    """The panel below the visible part of the page. Twenty seconds of the minute have no samples."""
    samples = [Sample(at=NOON + number / 2, **VALUES) for number in range(121) if not 40 < number < 80]
    frame = pack_columns(window(samples, window_s=60), samples[-1].at)
    state = {
        "charts": [chart.shown() for chart in CHARTS],
        **{"minutes": 1, "paused": False, "failures": [], "clients": []},
        **{"now": [1] * len(FIELDS), "end": samples[-1].at},
        "server": {"state": "running", "place": "in this kernel", "note": ""},
    }
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(PAGE.format(css=styles(*MetricsPanel.STYLES)))
    page.evaluate(RENDER, [script(*MetricsPanel.SCRIPTS), state, b64encode(frame).decode()])
    yield page
    page.close()
    assert not errors


def see(page):
    page.evaluate("document.getElementById('above').remove()")
    canvas = page.locator("canvas").first
    page.wait_for_function(f"() => ({COLUMNS})(document.querySelector('canvas')).includes(true)")
    return canvas


def test_a_chart_out_of_view_is_not_drawn(page):
    canvas = page.locator("canvas").first
    page.evaluate("listeners.get('change:frame').forEach((f) => f())")
    page.evaluate(NEXT_FRAMES)
    assert not any(canvas.evaluate(COLUMNS))
    see(page)


def test_a_gap_has_no_line(page):
    columns = see(page).evaluate(COLUMNS)
    first, last = columns.index(True), len(columns) - columns[::-1].index(True)
    width = last - first
    gap = columns[first + int(0.38 * width) : first + int(0.62 * width)]
    assert gap
    assert not any(gap)
    assert all(columns[first : first + int(0.3 * width)])
    assert all(columns[first + int(0.7 * width) : last])


def test_every_chart_shows_all_its_lines_inside_its_limits(page):
    see(page)
    page.evaluate(NEXT_FRAMES)
    shown = page.locator("canvas").evaluate_all(ROWS)
    assert [[bool(rows) for rows in lines] for lines in shown] == [
        [at < len(chart.fields) for at in range(3)] for chart in CHARTS
    ]
    for rows in (rows for lines in shown for rows in lines if rows):
        assert 0.05 < min(rows) <= max(rows) < 0.9


def test_a_chart_follows_the_width(page):
    canvas = see(page)
    wide = canvas.evaluate("canvas => canvas.width")
    page.evaluate("document.getElementById('view').style.width = '400px'")
    page.wait_for_function(f"document.querySelector('canvas').width !== {wide}")
    assert page.evaluate("document.getElementById('view').scrollWidth") == 400


def test_a_closed_view_removes_its_listeners(page):
    see(page)
    page.evaluate("leave()")
    assert page.evaluate("[...listeners.values()].flat().length") == 0
    assert page.locator("canvas").count() == 0


# --- the panel in a notebook


def test_the_chart_moves_while_an_answer_streams(panels):
    metrics = panels.panel("Metrics")
    ask(panels, "Tell me a story.", max_tokens=LONG_ANSWER)
    decode = metrics.locator("figcaption").first.locator("b").first
    panels.wait(lambda: float(decode.inner_text().split()[0]) > 0, "decoding shows")
    chart_moves(panels)
    chart_moves(panels)
    panels.page.keyboard.press("Escape")
    panels.wait(lambda: float(decode.inner_text().split()[0]) == 0, "it is over")


def test_a_running_request_is_listed_and_stopped_by_keyboard(panels):
    requests = panels.panel("Metrics").get_by_role("list", name="running requests").get_by_role("listitem")
    chat = ask(panels, "Tell me a story.", max_tokens=LONG_ANSWER)
    expect(requests).to_have_count(1)
    expect(requests).to_contain_text(re.compile(r"this notebook.*tiny: [\d,]+ tokens.*\d s"))
    requests.get_by_role("button", name="Stop").press("Enter")
    expect(requests).to_have_count(0)
    expect(panels.panel("Metrics").get_by_role("button", name="Pause")).to_be_focused()
    expect(chat).to_contain_text("the request was stopped on the server")
    expect(panels.panel("Metrics")).to_contain_text("tiny: request-stopped")


def test_a_paused_chart_does_not_change_until_it_is_resumed(panels):
    metrics = panels.panel("Metrics")
    chart_moves(panels)
    metrics.get_by_role("button", name="Pause").click()
    resume = metrics.get_by_role("button", name="Resume")
    expect(resume).to_be_visible()
    still, taken = drawn(panels), int(panels.kernel("print(len(lab.metrics().samples))"))
    panels.wait(lambda: int(panels.kernel("print(len(lab.metrics().samples))")) > taken + 2, "samples are taken")
    assert drawn(panels) == still
    resume.focus()
    panels.page.keyboard.press("Enter")
    panels.wait(lambda: drawn(panels) != still, "the chart moves again")


def test_the_window_is_chosen_by_keyboard(panels):
    window = panels.panel("Metrics").get_by_label("window")
    window.focus()
    panels.page.keyboard.press("End")
    panels.wait(lambda: panels.kernel("print(lab.metrics().minutes)") == "15", "the panel knows")
    # JupyterLab would select the previous cell.
    panels.page.keyboard.press("ArrowUp")
    panels.wait(lambda: panels.kernel("print(lab.metrics().minutes)") == "5", "the panel knows")
    expect(window).to_be_focused()


def test_keys_on_a_button_are_not_commands_of_the_notebook(panels):
    cells = panels.page.locator(".jp-Notebook:visible .jp-Cell")
    before = cells.count()
    panels.panel("Metrics").get_by_role("button", name="Pause").focus()
    panels.page.keyboard.type("ddab")
    panels.page.keyboard.press("Space")
    expect(panels.panel("Metrics").get_by_role("button", name="Resume")).to_be_focused()
    panels.page.keyboard.press("Enter")
    expect(panels.panel("Metrics").get_by_role("button", name="Pause")).to_be_visible()
    assert cells.count() == before


def test_the_values_of_a_chart_are_also_a_table_and_a_data_frame(panels):
    table = panels.panel("Metrics").locator("table").first
    panels.wait(lambda: table.locator("tbody tr").count() > 1, "rows are written")
    assert "decode_tokens_per_second" in panels.kernel("print(list(lab.metrics().df))")
