"""Tests of the two pages for browsers, also behind a proxy, where the server does not know its own address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest
from playwright.sync_api import Browser, Page, Route

from lmx_lab.notebook import Lab
from tests.browser.chromium import chromium
from tests.browser.jupyterlab import WAIT_MS
from tests.flows.conftest import serving

SWAGGER_STUB = """
window.started = new Promise((done) => {
    window.SwaggerUIBundle = (options) => { window.given = options; done(true); };
});
"""
"""Replaces Swagger UI, which a browser loads from the internet, and resolves ``started`` when the page calls it."""
ELSEWHERE = re.compile("^https://")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with serving(tmp_path_factory.mktemp("home"), "echo") as lab:
        yield lab


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    # A separate context has a separate cache.
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    yield page
    page.close()


def links(page: httpx2.Response) -> list[str]:
    """Return the links of a page to this server, as they are in the page."""
    return [link for link in re.findall(r'(?:href|src)="([^"]*)"', page.text) if not link.startswith("https://")]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_all_links_are_relative_and_valid(lab: Lab, path: str) -> None:
    shown = httpx2.get(f"{lab.url}{path}")
    assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
    found = links(shown)
    assert "openapi.json" in found
    assert not [link for link in found if link.startswith("/")]
    assert {httpx2.get(urljoin(str(shown.url), link)).status_code for link in found} == {200}
    assert httpx2.head(f"{lab.url}{path}").status_code == 200
    assert httpx2.post(f"{lab.url}{path}").status_code == 405


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_need_the_same_permission_as_the_server(tmp_path: Path, path: str) -> None:
    with serving(tmp_path, None, api_key="s3cret") as keyed:
        refused = httpx2.get(f"{keyed.url}{path}")
        shown = httpx2.get(f"{keyed.url}{path}", headers={"authorization": "Bearer s3cret"})
        stranger = httpx2.get(f"{keyed.url}{path}", headers={"host": "evil.example"})
    assert (refused.status_code, shown.status_code, stranger.status_code) == (401, 200, 421)
    assert "s3cret" not in shown.text


def test_the_openapi_document_has_no_pages(lab: Lab) -> None:
    paths = httpx2.get(f"{lab.url}/openapi.json").json()["paths"]
    assert not {"/", "/docs"} & set(paths)


def test_requests_from_the_page_use_its_own_address(lab: Lab, tab: Page) -> None:
    """The page is below a path such as ``/user/me/proxy/8400/``, which the document does not contain."""
    prefix = "http://hub.example/user/me/proxy/8400/"

    def proxied(route: Route) -> None:
        answer = httpx2.get(f"{lab.url}/{route.request.url.removeprefix(prefix)}")
        route.fulfill(status=answer.status_code, body=answer.text, headers=dict(answer.headers))

    # A replacement of the script would have another hash than the page expects, so the browser would not run it.
    tab.route(ELSEWHERE, lambda route: route.abort())
    tab.add_init_script(SWAGGER_STUB)
    tab.route(f"{prefix}**", proxied)
    tab.goto(f"{prefix}docs")
    # Not wait_for_function, because it evaluates strings in the page, which the page's policy forbids.
    assert tab.evaluate("window.started")
    assert tab.evaluate("window.given.spec.servers") == [{"url": prefix}]
    assert tab.evaluate("Object.keys(window.given.spec.paths).includes('/v1/models')")
    assert tab.evaluate("document.querySelector(window.given.dom_id) !== null")


def test_only_the_pinned_script_may_run(lab: Lab, tab: Page) -> None:
    headers = {"access-control-allow-origin": "*"}
    altered = "window.altered = true"
    tab.route(ELSEWHERE, lambda it: it.fulfill(body=altered, content_type="text/javascript", headers=headers))
    with tab.expect_console_message(lambda message: "integrity" in message.text):
        tab.goto(f"{lab.url}/docs")
    assert tab.evaluate("window.altered === undefined")


def test_without_internet_access_the_page_names_what_is_missing(lab: Lab, tab: Page) -> None:
    tab.route(ELSEWHERE, lambda route: route.abort())
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(error.message))
    tab.goto(f"{lab.url}/docs")
    assert "Swagger UI" in tab.inner_text("body")
    tab.click("text=openapi.json")
    assert tab.url == f"{lab.url}/openapi.json"
    assert not problems


FRAMING = """async (address) => {
    const frame = Object.assign(document.createElement("iframe"), {src: address});
    const loaded = new Promise((done) => { frame.onload = done; });
    document.body.append(frame);
    await loaded;
    try { return frame.contentDocument.title; } catch { return "out of reach"; }
}"""


@pytest.mark.parametrize("path", ["", "docs"])
def test_pages_of_the_same_origin_may_frame_them(lab: Lab, tab: Page, path: str) -> None:
    """Behind jupyter-server-proxy, JupyterLab has the same origin as the server."""
    tab.route(ELSEWHERE, lambda route: route.abort())
    outside = "<!doctype html><title>outside</title><body>"
    tab.route(f"{lab.url}/lab", lambda route: route.fulfill(body=outside, content_type="text/html"))
    tab.goto(f"{lab.url}/lab")
    assert tab.evaluate(FRAMING, f"{lab.url}/{path}") == "LMX Lab"


def test_text_in_the_page_is_escaped(lab: Lab, tab: Page) -> None:
    def written(route: Route) -> None:
        answer = httpx2.get(f"{lab.url}/docs")
        injected = "<img src=x onerror='window.ran = 1'><script>window.ran = 1</script>"
        added = f"{injected}<script src={lab.url}/v1/models></script>"
        route.fulfill(body=answer.text + added, headers=dict(answer.headers))

    tab.route(ELSEWHERE, lambda route: route.abort())
    tab.route(f"{lab.url}/docs", written)
    refused: list[str] = []
    tab.on(
        "console", lambda message: refused.append(message.text) if "Content Security Policy" in message.text else None
    )
    tab.goto(f"{lab.url}/docs")
    assert tab.evaluate("window.ran === undefined")
    assert len([text for text in refused if "script" in text]) >= 3
