"""Test the chat page of the server in Chromium: a conversation, hostile text, faults, and large conversations."""

import json
import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from lmx_lab.notebook.lab import Lab
from lmx_lab.panels.chat import from_json
from lmx_lab.settings import Settings
from tests.browser.jupyterlab import tab_through
from tests.support.browser import FOREIGN, WAIT_MS, machine_only, serious_violations
from tests.support.labs import serving
from tests.support.models import write_endless_llama

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 800}
LONG_MS = 50.0
"""Duration from which a task of the main thread is a long one."""
PACE = 200.0
"""Tokens per second of answers during which something happens."""
LONG = "a " * 4000
"""A question whose repetition takes 20 s at ``PACE``."""
VIOLATIONS = "addEventListener('securitypolicyviolation', (event) => console.error('CSP: ' + event.violatedDirective))"
TEXT = ".text:not(.plain)"
GO, BOX = "main button.go", "main textarea"
"""The button "Send" or "Stop", and the field for the message. Among 2,000 messages, finding them by their names takes
seconds."""
MESSAGES = "[role=log] .block > *"
FULL = """() => {
    IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
}"""
SCROLL = """async () => {
    const log = document.querySelector("[role=log]"), frames = [];
    let began = performance.now();
    for (let top = 0; top < log.scrollHeight; top += 1500) {
        log.scrollTop = top;
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        frames.push(now - began);
        began = now;
    }
    return frames;
}"""
"""Scrolls through all messages, and returns the duration of each frame in milliseconds."""


@contextmanager
def window(browser, *, expected="(?!)", **options):
    """A context whose pages log no error, violate no policy and request nothing from other hosts.

    Args:
        expected: Matches messages of the console that the test provokes.
    """
    problems = []

    def check(page):
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: problems.append(error.message))
        page.on("console", lambda it: problems.append(it.text) if it.type in ("error", "warning") else None)
        page.on("request", lambda it: problems.append(it.url) if FOREIGN.match(it.url) else None)

    with machine_only(browser, **options) as context:
        context.add_init_script(VIOLATIONS)
        context.on("page", check)
        yield context
        for page in context.pages:
            page.evaluate("0")
    assert [text for text in problems if not re.search(expected, text)] == []


def open_page(context, lab):
    page = context.new_page()
    page.goto(lab.url)
    expect(page.locator(BOX)).to_be_visible()
    return page


def ask(page, text):
    """Send a message, and return the answer."""
    page.locator(BOX).fill(text)
    page.locator(GO).click()
    return page.locator(".assistant").last


def ended(page):
    expect(page.locator(GO)).to_have_text("Send")
    expect(page.locator("[role=log] [aria-busy=true]")).to_have_count(0)


def conversations(page):
    """Return the entries in the list of conversations, which is in a drawer on a phone."""
    opener = page.get_by_role("button", name="Conversations", exact=True)
    if opener.is_visible():
        opener.click()
    return page.get_by_role("navigation").get_by_role("listitem")


def settings(page):
    page.get_by_role("button", name="Settings").click()
    return page.get_by_role("dialog", name="Settings")


def import_file(page, content):
    conversations(page)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    text = content if isinstance(content, str) else json.dumps(content)
    chooser.value.set_files({"name": "chat.json", "mimeType": "application/json", "buffer": text.encode()})


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("paced"), "echo", echo_tokens_per_s=PACE) as lab:
        yield lab


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_conversation(browser, paced, size):
    bodies = []
    with window(browser, viewport=size) as context:
        page = open_page(context, paced)
        page.on("request", lambda it: bodies.append(it.post_data_json) if it.method == "POST" else None)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"\n{size['width']} px: first paint after {paint:.0f} ms")
        assert paint < 5000
        drawer = settings(page)
        drawer.get_by_label("system prompt").fill("Be brief.")
        drawer.get_by_label("temperature").fill("0.2")
        drawer.get_by_label("temperature").press("Tab")
        for name, wrong in (("temperature", "1e999"), ("temperature", "2.5"), ("max_tokens", "0"), ("seed", "1.5")):
            drawer.get_by_label(name).fill(wrong)
            drawer.get_by_label(name).press("Tab")
            expect(drawer.get_by_role("alert")).to_contain_text(f"{name} must be a ")
        expect(drawer.get_by_label("temperature")).to_have_value("0.2")
        assert drawer.locator("input:invalid").count() == 0
        assert serious_violations(page) == []
        drawer.get_by_role("button", name="Close").click()
        answer = ask(page, "# One\n\n**two** `three`\n\n- four\n\n```python\nfive = 5\n```")
        expect(answer).to_contain_text("tok/s · first token in")
        expect(answer.get_by_role("heading")).to_have_text("One")
        expect(answer.locator("strong, p > code, li, pre")).to_have_text(["two", "three", "four", "five = 5"])
        stopped = ask(page, LONG)
        expect(stopped.locator(TEXT)).to_contain_text("a a a")
        page.get_by_label("message").fill("Too early.")
        page.get_by_label("message").press("Enter")
        expect(page.get_by_role("status").first).to_contain_text("The message was not sent")
        page.get_by_label("message").press("Escape")
        expect(stopped).to_contain_text("stopped")
        expect(page.get_by_role("status").first).to_be_empty()
        expect(page.get_by_label("message")).to_have_value("Too early.")
        page.get_by_label("message").fill("A draft.")
        page.locator(".user").last.get_by_role("button", name="edit").click()
        page.get_by_role("button", name="Cancel editing").click()
        expect(page.get_by_label("message")).to_have_value("A draft.")
        page.locator(".user").last.get_by_role("button", name="edit").click()
        page.get_by_label("message").fill("Edited.")
        page.locator(GO).click()
        expect(page.locator(f".assistant {TEXT}").last).to_have_text("Edited.")
        ended(page)
        expect(page.get_by_label("message")).to_have_value("A draft.")
        expect(page.locator(".user")).to_have_count(2)
        page.get_by_role("button", name="try again").click()
        expect(page.locator(".assistant")).to_have_count(2)
        ended(page)
        assert [(body["temperature"], body["messages"][0]["content"]) for body in bodies] == [(0.2, "Be brief.")] * 4
        assert [len(body["messages"]) for body in bodies] == [2, 4, 4, 4]
        check_files(page)


def check_files(page):
    """Save the conversation of the page, read it here and in the page, and delete one of the two."""
    with page.expect_download() as download:
        settings(page).get_by_role("button", name="Save").click()
    page.keyboard.press("Escape")
    saved = download.value.path().read_text(encoding="utf-8")
    messages, sampling = from_json(saved)
    assert [message["text"] for message in messages][2:] == ["Edited.", "Edited."]
    assert sampling == {"temperature": 0.2, "system": "Be brief."}
    page.reload()
    expect(page.locator(f".assistant {TEXT}").last).to_have_text("Edited.")
    conversations(page)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".user")).to_have_count(0)
    import_file(page, saved)
    expect(page.locator(f".assistant {TEXT}").last).to_have_text("Edited.")
    expect(conversations(page)).to_have_count(2)
    page.keyboard.press("Escape")
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        assert serious_violations(page) == []
    page.on("dialog", lambda dialog: dialog.accept())
    expect(ask(page, LONG).locator(TEXT)).to_contain_text("a a a")
    settings(page).get_by_role("button", name="Delete").click()
    expect(page.locator(".user")).to_have_count(0)
    expect(conversations(page)).to_have_count(1)


HOSTILE = (
    "<img src=x onerror='window.ran = 1'> <script>window.ran = 1</script> [a](javascript:window.ran=1) "
    "[b](data:text/html,x) [c](https://example.test/) ![d](https://example.test/d.png)\n\n"
    "```html\n<script>window.ran = 1</script>\n</code></pre><img src=x onerror='window.ran = 1'>\n```\n\n"
    "| <svg onload='window.ran = 1'> |\n|---|\n| [e](vbscript:x) |"
)


def test_text_of_models_and_files_does_nothing(browser, paced):
    name = "<img src=x onerror='window.ran = 1'>.txt"
    with window(browser, viewport=PHONE) as context:
        page = open_page(context, paced)
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Attach").click()
        chooser.value.set_files({"name": name, "mimeType": "text/plain", "buffer": HOSTILE.encode()})
        expect(page.locator("main .pill")).to_contain_text(name)
        answer = ask(page, HOSTILE)
        ended(page)
        expect(page.locator(".user details:visible")).to_contain_text(name)
        links = answer.get_by_role("link").all()
        # The answer repeats the question and the file.
        assert len(links) == 4
        assert {link.get_attribute("href") for link in links} == {"https://example.test/", "https://example.test/d.png"}
        call = {"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
        imported = [
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": HOSTILE},
            {"role": "assistant", "content": "done", "stats": HOSTILE, "error": HOSTILE},
        ]
        import_file(page, {"title": HOSTILE, "messages": imported})
        expect(page.locator(".assistant")).to_have_count(2)
        for fold in page.locator("details:visible summary").all():
            fold.click()
        assert page.locator("img, svg, [role=log] script, iframe, [onerror], [onload]").count() == 0
        assert page.evaluate("window.ran === undefined")
        system, wizard = {"role": "system", "content": HOSTILE}, {"role": "wizard"}
        for content, problem in (
            ({"version": 99, "messages": imported}, "The file has version 99"),
            ({"messages": [wizard]}, "Message 0 of the file has no role"),
            ({"messages": [system, wizard]}, "Message 1 of the file has no role"),
            ({"messages": [system]}, "The file has only a system prompt"),
            ({"conversations": []}, "The file has no conversations"),
        ):
            import_file(page, content)
            expect(page.get_by_role("status").first).to_contain_text(problem)
        import_file(page, [system, system, *imported])
        expect(page.get_by_role("status").first).to_be_empty()
        expect(page.locator(".system summary")).to_have_text(["system message"])
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Attach").click()
        chooser.value.set_files({"name": "x.bin", "mimeType": "application/octet-stream", "buffer": b"\xff\x00"})
        expect(page.get_by_role("status").first).to_contain_text("x.bin is not a text file")


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_every_control_is_reached_by_keyboard_and_has_a_name(browser, paced, size):
    with window(browser, viewport=size) as context:
        page = open_page(context, paced)
        if size == PHONE:
            # The page does not do this itself, because the keyboard of a phone covers half of the page.
            page.locator(BOX).focus()
        page.keyboard.type("Say hello.")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant")).to_contain_text("tok/s")
        expect(conversations(page)).to_have_count(1)
        page.keyboard.press("Escape")
        root = page.locator(".page")
        for opener in (None, "Settings", *(["Conversations"] if size == PHONE else [])):
            if opener:
                page.get_by_role("button", name=opener, exact=True).press("Enter")
                root = page.get_by_role("dialog")
            assert tab_through(page, root) >= (5 if opener == "Conversations" else 8)
            page.keyboard.press("Escape")
            expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_key_is_asked_for_once(browser, tmp_path):
    with (
        serving(tmp_path, "echo", api_key="s3cret", record="all") as lab,
        window(browser, viewport=PHONE, expected="401") as context,
    ):
        page = open_page(context, lab)
        dialog = page.get_by_role("dialog", name="key")
        # An HTTP header cannot contain the quotation marks.
        for wrong in ("“s3cret”", "wrong"):
            dialog.get_by_label("key", exact=True).fill(wrong)
            page.keyboard.press("Enter")
            expect(dialog.get_by_role("alert")).to_contain_text("The key is wrong")
        assert serious_violations(page) == []
        dialog.get_by_label("key", exact=True).fill("s3cret")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(ask(page, "Say hello.")).to_contain_text("tok/s")
        expect(page.get_by_role("status").first).to_contain_text("records all requests")
        page.reload()
        expect(ask(page, "And again.")).to_contain_text("tok/s")
        expect(dialog).to_be_hidden()


def test_a_conversation_continues_after_interruptions(browser, panels_home):
    """The network is lost, the model is unloaded during an answer, and the server restarts."""
    notes = "[role=status].notes"
    with window(browser, viewport=PHONE, expected="ERR_|503|404|409") as context:
        with serving(panels_home, "echo", echo_tokens_per_s=PACE) as lab:
            page, port = open_page(context, lab), lab.server.port
            expect(ask(page, "First.")).to_contain_text("tok/s")
            context.set_offline(True)
            expect(ask(page, "Second.")).to_contain_text("cannot be reached")
            context.set_offline(False)
            page.get_by_role("button", name="try again").click()
            expect(page.locator(f".assistant {TEXT}").last).to_have_text("Second.")
            ended(page)
            unloaded = ask(page, LONG)
            expect(unloaded.locator(TEXT)).to_contain_text("a a a")
            lab.unload(wait=False)
            expect(unloaded.locator(".error")).not_to_be_empty()
            expect(unloaded.locator(TEXT)).to_contain_text("a a a")
            expect(page.locator(notes)).to_contain_text("No model is ready")
            lab.load("echo")
            expect(page.locator(notes)).not_to_contain_text("No model is ready")
            ask(page, LONG)
            expect(page.locator(f".assistant {TEXT}").last).to_contain_text("a a a")
        expect(page.locator(".assistant .error").last).not_to_be_empty()
        expect(page.locator(notes)).to_contain_text("cannot be reached")
        with Lab(Settings(home=panels_home, port=port, swap=True), loop="thread") as again:
            again.load("echo")
            expect(page.locator(notes)).not_to_contain_text("cannot be reached")
            expect(ask(page, "Third.")).to_contain_text("tok/s")
            expect(page.locator(".assistant")).to_have_count(5)
            page.get_by_label("model").select_option("tiny-two")
            settings(page).get_by_label("max_tokens").fill("5")
            page.keyboard.press("Escape")
            expect(ask(page, "Fourth.")).to_contain_text("tiny-two · 5 tokens")


def test_a_visitor_reads_what_happened_on_the_server(browser, panels_home):
    # A caller on another machine, who cannot load a model.
    elsewhere = {"extra_http_headers": {"x-forwarded-for": "192.168.1.6"}}
    with (
        serving(panels_home, "echo") as lab,
        window(browser, viewport=PHONE, expected="503", **elsewhere) as context,
    ):
        page = open_page(context, lab)
        lab.unload()
        text = "echo was unloaded; ask the person who runs this server to load one"
        expect(page.locator("[role=status].notes")).to_contain_text(f"No model is ready: {text}.")
        expect(ask(page, "Hello?")).to_contain_text(text)
        assert "POST" not in page.inner_text("body")


@pytest.mark.parametrize("swap", [False, True])
def test_the_header_fits_the_screen_of_a_phone(browser, tmp_path, smollm2, swap):
    name = "a-model-whose-name-is-longer-than-the-screen-of-a-phone-is-wide"
    for each in (name, "other"):
        write_endless_llama(tmp_path / "models" / each, smollm2.path, seed=0, context=512)
    with serving(tmp_path, name, swap=swap) as lab, window(browser, viewport=PHONE) as context:
        page = open_page(context, lab)
        shown = page.get_by_label("model", exact=True) if swap else page.locator("header b")
        expect(shown).to_contain_text(name)
        expect(shown).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        boxes = [each.bounding_box() for each in page.locator("header > :visible:not(.hidden, .grow)").all()]
        assert len({round(box["y"] + box["height"] / 2) for box in boxes}) == 1, "the header is one line"
        assert all(left["x"] + left["width"] <= right["x"] for left, right in pairwise(boxes))
        assert boxes[-1]["x"] + boxes[-1]["width"] <= PHONE["width"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the main thread. Other programs delay it, but do not change its CPU time."""

    ms: float
    cpu_ms: float


@contextmanager
def traced_tasks(browser, page):
    """Add the tasks that run within the block to the list, at its end. A browser records one trace at a time."""
    tasks = []
    browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline"])
    try:
        yield tasks
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    names = [it for it in events if it["name"] == "thread_name"]
    main = {(it["pid"], it["tid"]) for it in names if it["args"]["name"] == "CrRendererMain"}
    by_thread = defaultdict(list)
    for event in events:
        thread = event["pid"], event["tid"]
        if event["name"] == "RunTask" and event["ph"] == "X" and thread in main:
            by_thread[thread].append(Task(ms=event["dur"] / 1000, cpu_ms=event.get("tdur", event["dur"]) / 1000))
    # Other pages of the browser are idle.
    tasks += max(by_thread.values(), key=lambda found: sum(task.cpu_ms for task in found))


def described(tasks):
    """Return the figures of tasks in words."""
    wall, cpu = [task.ms for task in tasks], [task.cpu_ms for task in tasks]
    count, of_cpu = (sum(value > LONG_MS for value in values) for values in (wall, cpu))
    return (
        f"{len(tasks)} tasks with {sum(cpu) / 1000:.2f} s of CPU time; "
        f"longest {max(wall):.0f} ms, by CPU time {max(cpu):.0f} ms; "
        f"over {LONG_MS:.0f} ms: {count}, by CPU time {of_cpu}"
    )


TABLE = "document.querySelector('.assistant table').outerHTML"
LAST_ANSWER = "[...document.querySelectorAll('.assistant')].at(-1).textContent"


def wait_for_answer(page, text):
    """Wait until the last answer contains a text. Locators of Playwright take seconds among 2,000 messages."""
    while text not in page.evaluate(LAST_ANSWER):
        page.wait_for_timeout(200)


def test_large_conversations_and_answers_stay_responsive(browser, tmp_path):
    """Prints the durations of tasks and frames. The limits are wide, because other programs use the processor too."""
    roles = ("user", "assistant")
    messages = [{"role": role, "content": f"{role} {at}\n\n- **item**"} for at in range(1000) for role in roles]
    with (
        serving(tmp_path, None, echo_tokens_per_s=PACE) as lab,
        serving(tmp_path, None) as quick,
        window(browser, viewport=PHONE) as context,
    ):
        lab.load("echo", context_length=200_000)
        page = open_page(context, lab)
        import_file(page, messages)
        expect(page.locator(MESSAGES)).to_have_count(2000)
        with traced_tasks(browser, page) as tasks:
            frames = sorted(page.evaluate(SCROLL))
        print(f"\nscrolling through 2,000 messages: {len(frames)} frames, median {frames[len(frames) // 2]:.0f} ms, "
              f"longest {frames[-1]:.0f} ms; {described(tasks)}")  # fmt: skip
        page.locator("[role=log]").evaluate("log => (log.scrollTop = 0)")
        expect(page.locator(MESSAGES).first).to_be_in_viewport()
        ask(page, LONG)
        wait_for_answer(page, "a a a")
        page.wait_for_timeout(1000)
        with traced_tasks(browser, page) as tasks:
            page.wait_for_timeout(5000)
        print(f"streaming at {PACE:.0f} tokens/s below 2,000 messages: {described(tasks)}")
        assert max(task.cpu_ms for task in tasks) < 500
        page.locator(GO).click()
        wait_for_answer(page, "stopped")
        page.close()
        quick.load("echo", context_length=200_000)
        page = open_page(context, quick)
        settings(page).get_by_label("max_tokens").fill("50000")
        page.keyboard.press("Escape")
        items = "\n".join(f"{number}. A **sea**" for number in range(1, 121))
        rows = "\n".join(["| number | name |", "|---|---|", *(f"| {number} | a `{number}`" for number in range(120))])
        ask(page, "\n\n".join([items, rows, *(f"{number} " + "**The** sea is `wide`. " * 20 for number in range(300))]))
        wait_for_answer(page, "50000 tokens")
        # Of a growing table, only the last row is shown again.
        table = page.evaluate(TABLE)
        assert table.count("<tr>") == 121
        page.reload()
        expect(page.locator(".assistant")).to_contain_text("50000 tokens")
        assert page.evaluate(TABLE) == table
        assert page.locator(f".assistant {TEXT} > p").first.inner_text().startswith("0 The sea is wide.")
        # The items of a long list are in several lists, so that only the last one changes while the answer grows.
        lists = page.locator(".assistant ol").evaluate_all("all => all.map((it) => [it.start, it.children.length])")
        assert lists[:3] == [[1, 50], [51, 50], [101, 20]]


def test_two_tabs_and_a_full_storage_lose_no_message(browser, paced):
    with window(browser, viewport=DESKTOP) as context:
        one = open_page(context, paced)
        expect(ask(one, "Both.")).to_contain_text("tok/s")
        entries = one.get_by_role("navigation").get_by_role("listitem")
        expect(entries).to_have_count(1)
        two = open_page(context, paced)
        expect(two.locator(".assistant")).to_contain_text("tok/s")
        expect(ask(two, "Only two.")).to_contain_text("tok/s")
        ended(two)
        expect(one.locator(".user").last).to_contain_text("Only two.")
        ask(one, LONG)
        expect(one.locator(f".assistant {TEXT}").last).to_contain_text("a a a")
        expect(two.locator(".user").last).to_contain_text("a a a")
        expect(ask(two, "While one answers.")).to_contain_text("tok/s")
        one.locator(GO).click()
        ended(one)
        ended(two)
        expect(entries).to_have_count(2)
        tabs = {page.get_by_role("status").first.inner_text() for page in (one, two)}
        assert any("continues in a copy" in text for text in tabs)
        one.reload()
        expect(entries).to_have_count(2)
        texts = []
        for entry in entries.all():
            entry.get_by_role("button").click()
            expect(entry.get_by_role("button")).to_have_attribute("aria-current", "true")
            texts.append(one.locator("[role=log]").text_content() or "")
        assert ["While one answers." in text for text in texts].count(True) == 1
        one.evaluate(FULL)
        expect(ask(one, "No room. " * 500)).to_contain_text("tok/s")
        expect(one.get_by_role("status").first).to_contain_text("storage of this browser is full")
        expect(one.locator(".user").last).to_contain_text("No room.")
