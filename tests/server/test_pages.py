"""Tests of the pages for browsers, also behind a proxy, where the server does not know its own address."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urljoin

import httpx2
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from lmx_lab.notebook import Lab
from lmx_lab.server.pages import MEDIA_TYPES, SWAGGER
from tests.browser.axe import serious_violations
from tests.browser.chromium import chromium
from tests.browser.jupyterlab import WAIT_MS
from tests.flows.conftest import serving

ELSEWHERE = re.compile("^https://")
HASHES = re.compile(r"\| `(swagger-ui[^`]+)` \| `([^`]+)` \|")


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


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/about", "/docs"])
def test_all_links_are_relative_and_valid(lab: Lab, path: str) -> None:
    shown = httpx2.get(f"{lab.url}{path}")
    assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
    found = links(shown)
    assert "openapi.json" in found
    assert not [link for link in found if link.startswith("/")]
    assert {httpx2.get(urljoin(str(shown.url), link)).status_code for link in found} == {200}
    assert httpx2.head(f"{lab.url}{path}").status_code == 200
    assert httpx2.post(f"{lab.url}{path}").status_code == 405


@pytest.mark.parametrize("path", ["/about", "/docs"])
def test_pages_need_the_same_permission_as_the_server(tmp_path: Path, path: str) -> None:
    with serving(tmp_path, None, api_key="s3cret") as keyed:
        refused = httpx2.get(f"{keyed.url}{path}")
        shown = httpx2.get(f"{keyed.url}{path}", headers={"authorization": "Bearer s3cret"})
        stranger = httpx2.get(f"{keyed.url}{path}", headers={"host": "evil.example"})
    assert (refused.status_code, shown.status_code, stranger.status_code) == (401, 200, 421)
    assert "s3cret" not in shown.text


def test_the_chat_page_needs_no_key_and_is_cached(tmp_path: Path) -> None:
    """It is the same for all clients. Its requests send the key."""
    with serving(tmp_path, None, api_key="s3cret") as keyed:
        page = httpx2.get(f"{keyed.url}/")
        again = httpx2.get(f"{keyed.url}/", headers={"if-none-match": page.headers["etag"]})
        stranger = httpx2.get(f"{keyed.url}/", headers={"host": "evil.example"})
        found = {link: httpx2.get(urljoin(f"{keyed.url}/", link)) for link in links(page)}
        icons = [icon["src"] for icon in found["manifest.webmanifest"].json()["icons"]]
        images = [httpx2.get(f"{keyed.url}/{icon}") for icon in icons]
    assert (page.status_code, again.status_code, stranger.status_code) == (200, 304, 421)
    assert {link: answer.status_code for link, answer in found.items()} == {
        "favicon.ico": 200,
        "icon-192.png": 200,
        "manifest.webmanifest": 200,
        "about": 401,
    }
    assert {image.content[:8] for image in images} == {b"\x89PNG\r\n\x1a\n"}


def test_without_the_chat_page_the_overview_is_at_the_root(tmp_path: Path) -> None:
    with serving(tmp_path, "echo", page=False) as lab:
        assert "echo is loaded" in httpx2.get(f"{lab.url}/").text
        assert httpx2.get(f"{lab.url}/manifest.webmanifest").status_code == 404
    with serving(tmp_path, None, page=False, api_key="s3cret") as keyed:
        assert httpx2.get(f"{keyed.url}/").status_code == 401


@pytest.mark.slow
def test_the_openapi_document_has_no_pages(lab: Lab) -> None:
    paths = httpx2.get(f"{lab.url}/openapi.json").json()["paths"]
    assert not {"/", "/about", "/docs"} & set(paths)


@pytest.mark.long
def test_routes_can_be_tried_without_internet_access_below_any_path(lab: Lab, tab: Page) -> None:
    """The page is below a path such as ``/user/me/proxy/8400/``, which the document does not contain."""
    prefix = "http://hub.example/user/me/proxy/8400/"
    asked: list[str] = []
    problems: list[str] = []

    def proxied(route: Route) -> None:
        asked.append(path := route.request.url.removeprefix(prefix))
        answer = httpx2.get(f"{lab.url}/{path}")
        headers = {name: text for name, text in answer.headers.items() if name != "content-encoding"}
        route.fulfill(status=answer.status_code, body=answer.content, headers=headers)

    tab.route(ELSEWHERE, lambda route: route.abort())
    tab.route(f"{prefix}**", proxied)
    tab.on("pageerror", lambda error: problems.append(error.message))
    tab.on("requestfailed", lambda request: problems.append(request.url))
    tab.goto(f"{prefix}docs")
    tab.click('[data-path="/v1/models"]')
    tab.click(".try-out__btn")
    tab.click("button.execute")
    tab.wait_for_selector(".live-responses-table")
    assert "v1/models" in asked
    assert not problems


def test_the_files_of_swagger_ui_are_those_of_the_published_package(lab: Lab) -> None:
    hashes = dict(HASHES.findall((SWAGGER / "README.md").read_text()))
    assert set(hashes) == set(MEDIA_TYPES)
    for name, expected in hashes.items():
        for encoding in ("gzip", "identity"):
            answer = httpx2.get(f"{lab.url}/docs/{name}", headers={"accept-encoding": encoding})
            assert base64.b64encode(hashlib.sha384(answer.content).digest()).decode() == expected
            assert answer.headers.get("content-encoding", "identity") == encoding


def test_the_overview_names_the_loaded_model_and_a_request(lab: Lab, tab: Page) -> None:
    problems: list[str] = []
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
def test_the_overview_is_accessible(lab: Lab, tab: Page, theme: Literal["light", "dark"]) -> None:
    tab.emulate_media(color_scheme=theme)
    tab.goto(f"{lab.url}/about")
    assert serious_violations(tab) == []


@pytest.mark.long
def test_the_page_of_routes_is_accessible_also_while_routes_are_tried(lab: Lab, tab: Page) -> None:
    tab.goto(f"{lab.url}/docs")
    tab.wait_for_selector(".opblock")
    assert serious_violations(tab) == []
    for route in ("chat_completions", "get_model"):
        block = tab.locator(f"#operations-inference-inference_{route}")
        block.locator(".opblock-summary-control").click()
        block.locator(".try-out__btn").click()
    tab.locator(".parameters input").fill("echo")
    for button in tab.locator("button.execute").all():
        button.click()
    expect(tab.locator(".live-responses-table tbody td.response-col_status")).to_have_text(["200", "200"])
    tab.locator("section.models .json-schema-2020-12-accordion").first.click()
    assert serious_violations(tab) == []


FRAMING = """async (address) => {
    const frame = Object.assign(document.createElement("iframe"), {src: address});
    const loaded = new Promise((done) => { frame.onload = done; });
    document.body.append(frame);
    await loaded;
    try { return frame.contentDocument.title; } catch { return "out of reach"; }
}"""


@pytest.mark.parametrize("path", ["", "about", "docs"])
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
