"""Tests of the pages for browsers, also behind a proxy, where the server does not know its own address."""

import json
import re
import shlex
from urllib.parse import urljoin

import httpx2
import pytest
from playwright.sync_api import expect

from tests.support.browser import WAIT_MS, chromium, serious_violations
from tests.support.labs import serving

ELSEWHERE = re.compile("^https://")


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser):
    # A separate context has a separate cache.
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    yield page
    page.close()


def links(page):
    """Return the links of a page to this server, as they are in the page."""
    return [link for link in re.findall(r'(?:href|src)="([^"]*)"', page.text) if not link.startswith("https://")]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/about", "/docs"])
def test_all_links_are_relative_and_valid(lab, path):
    shown = httpx2.get(f"{lab.url}{path}")
    assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
    found = links(shown)
    assert "openapi.json" in found
    assert not [link for link in found if link.startswith("/")]
    assert {httpx2.get(urljoin(str(shown.url), link)).status_code for link in found} == {200}
    assert httpx2.head(f"{lab.url}{path}").status_code == 200
    assert httpx2.post(f"{lab.url}{path}").status_code == 405


def test_the_overview_needs_the_same_permission_as_the_server(tmp_path):
    with serving(tmp_path, None, api_key="s3cret") as keyed:
        refused = httpx2.get(f"{keyed.url}/about")
        shown = httpx2.get(f"{keyed.url}/about", headers={"authorization": "Bearer s3cret"})
        stranger = httpx2.get(f"{keyed.url}/about", headers={"host": "evil.example"})
    assert (refused.status_code, shown.status_code, stranger.status_code) == (401, 200, 421)
    assert "s3cret" not in shown.text


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("/", {"favicon.ico": 200, "icon-192.png": 200, "manifest.webmanifest": 200, "about": 401}),
        ("/docs", {"favicon.ico": 200, "openapi.json": 401}),
    ],
)
def test_pages_with_scripts_need_no_key_and_are_cached(tmp_path, path, files):
    """They are the same for all clients. Their requests send the key."""
    with serving(tmp_path, None, api_key="s3cret") as keyed:
        page = httpx2.get(f"{keyed.url}{path}")
        plain = httpx2.get(f"{keyed.url}{path}", headers={"accept-encoding": "identity"})
        again = httpx2.get(f"{keyed.url}{path}", headers={"if-none-match": page.headers["etag"]})
        stranger = httpx2.get(f"{keyed.url}{path}", headers={"host": "evil.example"})
        found = {link: httpx2.get(urljoin(f"{keyed.url}{path}", link)) for link in links(page)}
        icons = found["manifest.webmanifest"].json()["icons"] if path == "/" else []
        images = [httpx2.get(f"{keyed.url}/{icon['src']}") for icon in icons]
    assert (page.status_code, again.status_code, stranger.status_code) == (200, 304, 421)
    assert (page.headers["content-encoding"], plain.text) == ("gzip", page.text)
    assert {link: answer.status_code for link, answer in found.items()} == files
    assert {image.content[:8] for image in images} <= {b"\x89PNG\r\n\x1a\n"}


def test_without_the_chat_page_the_overview_is_at_the_root(tmp_path):
    with serving(tmp_path, "echo", page=False) as lab:
        assert "echo is loaded" in httpx2.get(f"{lab.url}/").text
        assert httpx2.get(f"{lab.url}/manifest.webmanifest").status_code == 404
    with serving(tmp_path, None, page=False, api_key="s3cret") as keyed:
        assert [httpx2.get(f"{keyed.url}{path}").status_code for path in ("/", "/docs")] == [401, 401]


@pytest.mark.slow
def test_the_openapi_document_has_no_pages(lab):
    paths = httpx2.get(f"{lab.url}/openapi.json").json()["paths"]
    assert not {"/", "/about", "/docs"} & set(paths)


@pytest.mark.long
def test_routes_can_be_tried_without_internet_access_below_any_path(lab, tab):
    """The page is below a path such as ``/user/me/proxy/8400/``, which the document does not contain."""
    prefix = "http://hub.example/user/me/proxy/8400/"
    asked = []
    problems = []

    def proxied(route):
        asked.append(path := route.request.url.removeprefix(prefix))
        answer = httpx2.get(f"{lab.url}/{path}")
        headers = {name: text for name, text in answer.headers.items() if name != "content-encoding"}
        route.fulfill(status=answer.status_code, body=answer.content, headers=headers)

    tab.route(ELSEWHERE, lambda route: route.abort())
    tab.route(f"{prefix}**", proxied)
    tab.on("pageerror", lambda error: problems.append(error.message))
    tab.on("requestfailed", lambda request: problems.append(request.url))
    tab.goto(f"{prefix}docs")
    send(open_route(tab, "inference_list_models"), "200 OK")
    assert "v1/models" in asked
    assert not problems


def test_the_overview_names_the_loaded_model_and_a_request(lab, tab):
    problems = []
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.emulate_media(color_scheme="dark")
    tab.goto(f"{lab.url}/about")
    assert "echo is loaded" in tab.inner_text("body")
    curl = shlex.split(tab.inner_text("pre"))
    assert curl[:2] == ["curl", f"{lab.url}/v1/chat/completions"]
    assert httpx2.post(curl[1], json=json.loads(curl[-1])).json()["choices"][0]["message"]["content"] == "Say hello."
    assert tab.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light dark"
    assert httpx2.get(f"{lab.url}/favicon.ico").status_code == 200
    assert not problems


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_overview_is_accessible(lab, tab, theme):
    tab.emulate_media(color_scheme=theme)
    tab.goto(f"{lab.url}/about")
    assert serious_violations(tab) == []


def open_route(tab, operation):
    route = tab.locator(f"#{operation}")
    route.locator("> summary").press("Enter")
    return route


def send(route, status):
    """Send the request of a route, and return the response."""
    route.get_by_role("button", name="Send").press("Enter")
    expect(route.get_by_role("status")).to_contain_text(status)
    return route.get_by_role("group", name="response")


@pytest.mark.long
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_routes_are_described_and_tried_with_the_keyboard(lab, tab, theme, width):
    tab.emulate_media(color_scheme=theme)
    tab.set_viewport_size({"width": width, "height": 800})
    tab.goto(f"{lab.url}/docs")
    chat = open_route(tab, "inference_chat_completions")
    assert '"content": "Say hello."' in send(chat, "200 OK").inner_text()
    body = chat.get_by_role("textbox", name="request body")
    body.fill(json.dumps({"stream": True, "id_slot": 1, "messages": [{"role": "user", "content": "It's new."}]}))
    expect(send(chat, "ignored: id_slot")).to_contain_text("data: [DONE]")
    curl = shlex.split(chat.locator("pre code").inner_text())
    assert curl[:4] == ["curl", "-X", "POST", f"{lab.url}/v1/chat/completions"]
    assert curl[-1] == body.input_value()
    body.fill("{")
    expect(send(chat, "400 Bad Request")).to_contain_text("invalid-request")
    model = open_route(tab, "inference_get_model")
    expect(model.locator("pre code")).to_have_text(f"curl '{lab.url}/v1/models/MODEL'")
    model.get_by_role("button", name="Send").click()
    expect(model.get_by_role("status")).to_be_empty()
    model.get_by_role("textbox").fill("echo")
    expect(send(model, "200 OK")).to_contain_text('"id": "echo"')
    events = open_route(tab, "admin_events")
    expect(send(events, "200 OK")).to_contain_text("data: ")
    events.get_by_role("button", name="Stop").press("Enter")
    expect(events.get_by_role("status")).to_have_text("stopped")
    expect(open_route(tab, "inference_chat_stream")).to_contain_text("The client sends ChatRequest")
    items = open_route(tab, "inference_response_input_items")
    expect(items.get_by_role("textbox", name="limit: integer (minimum 1, maximum 100)")).to_have_count(1)
    expect(tab).to_have_url(f"{lab.url}/docs#inference_response_input_items")
    schema = tab.locator("#schema-ChatRequest")
    for _ in range(2):  # A link also opens what was closed while the address named it.
        chat.get_by_role("link", name="ChatRequest").click()
        expect(schema).to_have_attribute("open", "")
        expect(schema.locator("> summary")).to_be_focused()
        schema.locator("> summary").press("Enter")
        expect(schema).not_to_have_attribute("open", "")
    schema.locator("> summary").press("Enter")
    expect(schema.get_by_role("row", name="temperature number (minimum 0, maximum 2) or null")).to_have_count(1)
    expect(schema).to_contain_text("Accepted and ignored: user, ")
    assert serious_violations(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for text, heading in (("ollamachatrequest", "Schemas"), ("post /v1/chat/", "inference")):
        tab.get_by_role("searchbox").fill(text)
        expect(tab.locator("main > details:visible")).to_have_count(1)
        expect(tab.locator("h2:visible")).to_have_text([heading])


LOST_CONNECTION = """window.fetch = async () => new Response(new ReadableStream({
    pull(stream) { stream.error(new TypeError("network error")); }}))"""


@pytest.mark.long
def test_responses_that_cannot_be_shown_are_described(lab, tab):
    tab.route("**/props", lambda route: route.fulfill(body=b"\x00\xff" * 40, content_type="application/x-safetensors"))
    tab.route("**/v1/models", lambda route: route.abort())
    tab.goto(f"{lab.url}/docs")
    expect(send(open_route(tab, "inference_props"), "200 OK")).to_contain_text("80 bytes of application/x-safetensors")
    models = open_route(tab, "inference_list_models")
    send(models, "The server cannot be reached")
    tab.evaluate(LOST_CONNECTION)
    send(models, "The connection was lost")


@pytest.mark.long
def test_the_page_of_routes_asks_for_the_key(tmp_path, tab):
    with serving(tmp_path, "echo", api_key="s3cret") as keyed:
        tab.goto(f"{keyed.url}/docs")
        for key, problem in (("wrong", "This server requires an API key."), ("s3cret", "The key is wrong.")):
            expect(tab.get_by_role("alert")).to_contain_text(problem)
            assert serious_violations(tab) == []
            tab.get_by_label("API key").fill(key)
            with tab.expect_response("**/openapi.json"):
                tab.get_by_role("button", name="Use the key").click()
        expect(tab.get_by_label("API key")).to_have_count(0)
        with tab.expect_download() as download:
            tab.get_by_role("link", name="openapi.json").click()
        assert "/v1/models" in json.loads(download.value.path().read_bytes())["paths"]
        route = open_route(tab, "inference_list_models")
        expect(send(route, "200 OK")).to_contain_text('"echo"')
        assert "s3cret" not in route.inner_text()


FRAMING = """async (address) => {
    const frame = Object.assign(document.createElement("iframe"), {src: address});
    const loaded = new Promise((done) => { frame.onload = done; });
    document.body.append(frame);
    await loaded;
    try { return frame.contentDocument.title; } catch { return "out of reach"; }
}"""


@pytest.mark.parametrize("path", ["", "about", "docs"])
def test_pages_of_the_same_origin_may_frame_them(lab, tab, path):
    """Behind jupyter-server-proxy, JupyterLab has the same origin as the server."""
    tab.route(ELSEWHERE, lambda route: route.abort())
    outside = "<!doctype html><title>outside</title><body>"
    tab.route(f"{lab.url}/lab", lambda route: route.fulfill(body=outside, content_type="text/html"))
    tab.goto(f"{lab.url}/lab")
    assert tab.evaluate(FRAMING, f"{lab.url}/{path}") == "LMX Lab"


def test_text_in_the_page_is_escaped(lab, tab):
    def written(route):
        answer = httpx2.get(f"{lab.url}/docs")
        injected = "<img src=x onerror='window.ran = 1'><script>window.ran = 1</script>"
        added = f"{injected}<script src={lab.url}/v1/models></script>"
        route.fulfill(body=answer.text + added, headers=dict(answer.headers))

    tab.route(ELSEWHERE, lambda route: route.abort())
    tab.route(f"{lab.url}/docs", written)
    refused = []
    tab.on(
        "console", lambda message: refused.append(message.text) if "Content Security Policy" in message.text else None
    )
    tab.goto(f"{lab.url}/docs")
    assert tab.evaluate("window.ran === undefined")
    assert len([text for text in refused if "script" in text]) >= 3
