"""Test the models panel by mouse and by keyboard."""

import re

import pytest
from playwright.sync_api import expect

from lmx_lab.panels.models import ModelsPanel
from lmx_lab.panels.panel import script
from lmx_lab.urls import qr_data_uri
from tests.browser.jupyterlab import LONG_ANSWER, ask, model_button, model_row

# The panel on an empty page. Its kernel replies when a direct request was sent to the server, which does not respond.
SCRIPT = """async ([code, phone_code]) => {
    const module = await import(URL.createObjectURL(new Blob([code], {type: "text/javascript"})));
    const listeners = new Set(), sent = [];
    const state = {
        server: {
            state: "running", place: "", note: "", url: "http://127.0.0.1:1", model: "tiny", others: [], phone_code,
        },
        rows: [{id: "tiny", cells: ["", "", "", "", "", "loaded"], action: "", engines: ["mlx"]}],
        resident: [{id: "tiny", main: true, pinned: false, leaving: false, memory: "", idle: "", ttl: "", ttls: []}],
        choices: {engine: [], kv_cache_dtype: []}, storage: {},
        jobs: [], pressure: "", error: "", error_field: "", caption: "", engines: "", compact: false, revision: 1,
    };
    const model = {
        get: (name) => state[name],
        on: (name, f) => name === "msg:custom" && listeners.add(f),
        off: (name, f) => listeners.delete(f),
        send: (message) => sent.push(message),
    };
    window.fetch = (address, {signal}) => new Promise(() => {
        window.request = {path: address.pathname, before: signal.aborted, signal};
        const {id} = sent.find((message) => message.do === "unload");
        listeners.forEach((f) => f({id, ok: true, result: {model: "tiny"}}));
    });
    module.default.render({model, el: document.body});
}"""
MEASURED = """from lmx_lab.engine.speeds import FILE, Speeds, conditions, store_speeds
store_speeds(lab.settings, Speeds(model="smollm2-135m", measured_at=0, busy_percent=0,
    tokens_per_second={"mlx": 24, "llama.cpp": 110}, made_with=conditions(lab.settings)))"""
UNMEASURED = "(lab.settings.home / FILE).unlink()"


def test_each_model_has_its_engine_and_one_line_says_which_is_faster(panels):
    # With other panels beside it, not all columns are visible, but this one is.
    expect(panels.panel("Models").get_by_role("columnheader", name="engine")).to_be_visible()
    expect(model_row(panels, "tiny").get_by_role("cell", name="mlx").first).to_be_visible()
    line = panels.panel("Models").get_by_text("for smollm2-135m: MLX 24 tok/s, llama.cpp 110 tok/s; prefer GGUF files")
    expect(line).to_have_count(0)
    panels.kernel(MEASURED)
    model_button(panels, "Refresh").click()
    expect(line).to_be_visible()
    panels.kernel(UNMEASURED)
    model_button(panels, "Refresh").click()
    expect(line).to_have_count(0)


@pytest.mark.parametrize("clicks", [1, 2])
def test_load_and_unload_by_mouse(panels, clicks):
    model_button(panels, "Load tiny-two").click(click_count=clicks)
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    expect(model_row(panels, "tiny")).to_contain_text("on disk")
    assert panels.kernel("print(lab.server.engine.snapshot.model)") == "tiny-two"
    model_button(panels, "Unload tiny-two").click()
    expect(model_row(panels, "tiny-two")).to_contain_text("on disk")
    assert panels.kernel("print(lab.server.engine.snapshot.model)") == "None"


def test_load_and_unload_by_keyboard_keep_the_focus(panels):
    name = panels.panel("Models").get_by_label("model to load")
    name.focus()
    panels.page.keyboard.type("tiny-two")
    panels.page.keyboard.press("Enter")
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    expect(name).to_be_focused()
    expect(name).to_have_value("")
    for _ in range(30):
        panels.page.keyboard.press("Shift+Tab")
        if model_button(panels, "Unload tiny-two").evaluate("node => node === document.activeElement"):
            break
    panels.page.keyboard.press("Space")
    expect(model_row(panels, "tiny-two")).to_contain_text("on disk")
    expect(model_button(panels, "Load tiny-two")).to_be_focused()


def test_options_are_set_by_keyboard_and_a_wrong_one_is_marked(panels):
    models, keyboard = panels.panel("Models"), panels.page.keyboard
    model_button(panels, "options of tiny-two").press("Enter")
    engine = models.get_by_label("engine")
    expect(engine).to_be_focused()
    assert engine.get_by_role("option").all_inner_texts() == ["automatic", "mlx"]
    assert models.get_by_label("draft model").get_by_role("option").all_inner_texts() == ["none", "tiny"]
    context, name = models.get_by_label("context length"), models.get_by_label("model to load")
    context.press_sequentially("many")
    keyboard.press("Enter")
    expect(context).to_be_focused()
    expect(context).to_have_attribute("aria-invalid", "true")
    expect(context).to_have_accessible_description(re.compile("^context_length: .*'many'"))
    context.fill("200")
    models.get_by_label("deterministic").press("Space")
    expect(model_button(panels, "options (2)")).to_have_attribute("aria-expanded", "true")
    model_button(panels, "Load").press("Enter")
    # The load is refused later, by the engine: what was entered is shown again.
    expect(models.get_by_role("alert")).to_contain_text("tiny-two was not loaded: tiny-two runs on MLX")
    deterministic = models.get_by_label("deterministic")
    expect(deterministic).to_have_attribute("aria-invalid", "true")
    expect(deterministic).to_be_checked()
    expect(name).to_have_value("tiny-two")
    expect(context).to_have_value("200")
    deterministic.press("Space")
    context.press("Enter")
    expect(model_row(panels, "tiny-two")).to_contain_text("200 in 8 slots")
    expect(name).to_have_value("")
    expect(models.get_by_role("group", name="options of the load")).to_be_hidden()
    assert panels.kernel("print(lab.server.engine.snapshot.context_length)") == "200"
    model_button(panels, "options").press("Enter")
    expect(context).to_have_value("")
    context.press("Escape")
    expect(model_button(panels, "options")).to_be_focused()
    expect(context).to_be_hidden()


def test_a_model_is_pinned_and_its_time_to_live_is_set(panels):
    row = panels.panel("Models").get_by_role("list", name="models in memory").get_by_role("listitem")
    row = row.filter(has=panels.page.get_by_text("tiny", exact=True))
    expect(row).to_contain_text("main")
    share = row.get_by_role("meter", name="memory of tiny")
    expect(share).to_have_attribute("aria-valuetext", re.compile(r"^6 MB of [\d.]+ GB$"))
    pin, ttl = row.get_by_role("button", name="keep tiny loaded"), row.get_by_label("time to live of tiny")
    ttl.select_option("15 min")
    panels.wait(lambda: kept(panels) == "False 900.0", "the time to live has changed")
    pin.press("Space")
    expect(pin).to_have_attribute("aria-pressed", "true")
    expect(ttl).to_be_disabled()
    expect(row.get_by_role("button", name="Unload tiny")).to_be_hidden()
    assert kept(panels) == "True 900.0"
    pin.press("Space")
    expect(pin).to_have_attribute("aria-pressed", "false")
    expect(ttl).to_have_value("900")
    ttl.select_option("never")
    panels.wait(lambda: kept(panels) == "False None", "the model stays")
    expect(row.get_by_role("button", name="Unload tiny")).to_be_visible()
    # From a cell, too.
    panels.kernel("lab.keep('tiny', pin=True, ttl_s=300)")
    expect(pin).to_have_attribute("aria-pressed", "true")
    panels.kernel("lab.keep('tiny', pin=False)")
    expect(pin).to_have_attribute("aria-pressed", "false")
    expect(ttl).to_have_value("300")
    panels.kernel("lab.keep('tiny', ttl_s='never')")
    expect(ttl).to_have_value("never")


def kept(panels):
    return panels.kernel("print(lab.server.engine.snapshot.main.pinned, lab.server.engine.snapshot.main.ttl_s)")


def test_storage_is_read_when_it_is_opened_and_a_second_click_deletes(panels, panels_home):
    runs = panels_home / "bench"
    runs.mkdir()
    (runs / "run.jsonl").write_bytes(b"0" * 2_000_000)
    models = panels.panel("Models")
    storage = models.get_by_role("list", name="list of what is stored")
    expect(storage).to_be_hidden()
    models.get_by_text("storage", exact=True).click()
    row = storage.get_by_role("listitem").filter(has_text="benchmark runs")
    expect(row).to_contain_text(str(runs))
    question = row.get_by_role("group", name="Delete bench")
    model_button(panels, "Delete bench …").press("Enter")
    expect(question).to_have_text(f"Delete bench, 2 MB at {runs}? 1 file: run.jsonl (2 MB).Delete 2 MBKeep")
    expect(model_button(panels, "Keep bench")).to_be_focused()
    panels.page.keyboard.press("Enter")
    expect(question).to_be_hidden()
    expect(model_button(panels, "Delete bench …")).to_be_focused()
    assert runs.exists()
    panels.page.keyboard.press("Enter")
    model_button(panels, "Delete 2 MB of bench").press("Enter")
    expect(row).to_have_count(0)
    expect(model_button(panels, "Refresh storage")).to_be_focused()
    assert not runs.exists()
    expect(storage.get_by_role("listitem").filter(has_text="tiny-bert")).to_be_visible()
    models.get_by_text("storage", exact=True).click()


def test_loading_an_unknown_model_is_an_error_that_can_be_dismissed(panels):
    panels.panel("Models").get_by_label("model to load").fill("<b>no</b>/<img src=x onerror=alert(1)>")
    panels.page.keyboard.press("Enter")
    strip = panels.panel("Models").get_by_role("alert")
    expect(strip).to_contain_text("<b>no</b>")
    strip.get_by_role("button", name="dismiss").click()
    expect(strip).to_be_hidden()


def test_an_unload_says_how_many_answers_are_left_and_can_wait_or_stop_them(panels):
    chat = ask(panels, "Tell me a story.", max_tokens=LONG_ANSWER)
    panels.wait(chat.locator(".assistant .text:not(.dim)").last.inner_text, "the answer has started")
    model_button(panels, "Unload tiny").click()
    models = panels.panel("Models")
    job = models.locator(".job")
    expect(job).to_contain_text(re.compile(r"^tinyunloading, 1 answer left \(\d+ s\)"))
    expect(model_row(panels, "tiny")).to_contain_text("unloading")
    expect(model_button(panels, "Unload tiny")).to_have_attribute("aria-disabled", "true")
    # The remaining time is updated.
    first = job.inner_text()
    panels.wait(lambda: job.inner_text() != first, "the remaining time has changed")
    state = panels.kernel("print(lab)")
    assert "tiny" in state
    assert "unloading, 1 answer left (" in state
    model_button(panels, "Wait tiny").focus()
    panels.page.keyboard.press("Enter")
    expect(job).to_contain_text("unloading, 1 answer left (no time limit)")
    expect(model_button(panels, "Wait tiny")).to_be_hidden()
    model_button(panels, "Stop now tiny").click()
    expect(model_row(panels, "tiny")).to_contain_text("on disk")
    expect(job).to_have_count(0)
    expect(chat.locator(".assistant").last).to_contain_text("requested to stop running requests immediately")
    assert panels.kernel("print(lab.server.engine.snapshot.model)") == "None"


def panel_alone(browser, phone_code=""):
    page = browser.new_page()
    # A page of this machine, so that the server's own address is used.
    page.route("http://localhost/", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
    page.goto("http://localhost/")
    page.evaluate(SCRIPT, [script(*ModelsPanel.SCRIPTS), phone_code])
    return page


def test_the_qr_code_of_the_chat_page_is_shown_if_there_is_one(browser):
    page = panel_alone(browser, qr_data_uri("http://192.0.2.5:8400"))
    page.get_by_text("QR code for phones").click()
    image = page.get_by_role("img", name="QR code of the LAN address")
    expect(image).to_be_visible()
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    page.close()
    page = panel_alone(browser)
    expect(page.get_by_text("QR code for phones")).to_be_hidden()
    page.close()


def test_a_direct_request_is_aborted_when_the_kernel_answers(browser):
    page = panel_alone(browser)
    page.get_by_role("button", name="Unload tiny").click()
    requested = page.wait_for_function(
        "window.request && {...window.request, after: window.request.signal.aborted}"
    ).json_value()
    assert (requested["path"], requested["before"], requested["after"]) == ("/admin/models/unload", False, True)
    page.close()
