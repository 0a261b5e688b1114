"""Tests with a page of another origin in a real browser, and with a DNS name of another site for this machine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.browser import CHROMIUM_ARGUMENTS, chromium
from tests.support.labs import manager_of, serving

pytestmark = pytest.mark.slow
PAGE = b"<!doctype html><meta charset=utf-8><title>evil</title><iframe name=frame hidden></iframe>"
# The answer of the attacker's DNS server.
REBOUND = "--host-resolver-rules=MAP *.evil.example 127.0.0.1"
# The script of the page: the result of each attempt, as far as the page can read it.
TRIES = """async ([base, socket]) => {
    const seen = {};
    const attempt = async (name, path, options) => {
        try {
            const answer = await fetch(base + path, options);
            seen[name] = answer.type === "opaque" ? "opaque" : `${answer.status} ${await answer.text()}`;
        } catch { seen[name] = "refused"; }
    };
    const body = '{"model": "tiny-two"}', post = {method: "POST", body};
    await attempt("read", "/v1/models", {});
    await attempt("json", "/admin/models/load", {...post, headers: {"Content-Type": "application/json"}});
    await attempt("text", "/admin/models/load", {...post, mode: "no-cors"});
    await attempt("form", "/admin/models/unload", {method: "POST", mode: "no-cors", body: new URLSearchParams({a: 1})});
    await attempt("nothing", "/admin/models/unload", {method: "POST", mode: "no-cors"});
    await attempt("silent", "/admin/models/unload", {method: "POST", mode: "no-cors", referrerPolicy: "no-referrer"});
    await attempt("blob", "/admin/models/load", {method: "POST", mode: "no-cors", body: new Blob([body])});
    seen.beacon = String(navigator.sendBeacon(base + "/admin/models/unload", body));
    seen.socket = await new Promise((done) => {
        const socketed = new WebSocket(socket);
        socketed.onopen = () => done("open");
        socketed.onerror = () => done("refused");
    });
    seen.events = await new Promise((done) => {
        const source = new EventSource(base + "/admin/events");
        source.onmessage = (event) => { source.close(); done(event.data); };
        source.onerror = () => { source.close(); done("refused"); };
    });
    seen.script = await new Promise((done) => {
        const script = Object.assign(document.createElement("script"), {src: base + "/v1/models"});
        script.onload = () => done("ran");
        script.onerror = () => done("refused");
        document.body.append(script);
    });
    return seen;
}"""
FRAMING = """async (address) => {
    const frame = Object.assign(document.createElement("iframe"), {src: address});
    const loaded = new Promise((done) => { frame.onload = done; });
    document.body.append(frame);
    await loaded;
}"""
FETCHING = """async (address) => (await fetch(address, {method: "POST", headers: {"x-any": "a"}})).status"""
FORM = """async ([base, sandboxed]) => {
    const form = Object.assign(document.createElement("form"), {
        method: "POST", action: base + "/admin/models/unload", enctype: "text/plain", target: "frame",
    });
    const frame = document.querySelector("iframe");
    const loaded = new Promise((done) => { frame.onload = done; });
    if (sandboxed) {
        frame.setAttribute("sandbox", "allow-scripts allow-forms");
        frame.srcdoc = `<form method=POST action="${form.action}"></form><script>document.forms[0].submit()</script>`;
    } else {
        document.body.append(form);
        form.submit();
    }
    await loaded;
    await new Promise((done) => setTimeout(done, 300));
}"""


class AttackerPage(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format, *args):
        """Log nothing."""


@pytest.fixture(scope="module")
def evil():
    with ThreadingHTTPServer(("127.0.0.1", 0), AttackerPage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tiny_lab(tiny_home):
    """Run a lab with two models, so that a load would be detected."""
    with serving(tiny_home, "tiny", slots=2) as lab:
        yield lab


@pytest.fixture(scope="module")
def browser():
    arguments = [each for each in CHROMIUM_ARGUMENTS if "host-resolver" not in each]
    with chromium([*arguments, REBOUND]) as browser:
        yield browser


@pytest.fixture
def page(browser, evil):
    page = browser.new_page()
    # Another site that the browser considers trustworthy, because browsers restrict requests of others to this machine.
    page.goto(f"http://localhost:{evil}/")
    yield page
    page.close()


@pytest.mark.long
def test_a_page_of_another_origin_reads_and_changes_nothing(page, tiny_lab):
    socket = f"ws://127.0.0.1:{tiny_lab.server.port}/v1/chat/stream"
    seen = page.evaluate(TRIES, [tiny_lab.url, socket])
    assert {name: what for name, what in seen.items() if what != "refused"} == {"beacon": "true"}
    for sandboxed in (False, True):
        page.evaluate(FORM, [tiny_lab.url, sandboxed])
    assert manager_of(tiny_lab).snapshot.model == "tiny"


def test_a_page_of_another_origin_cannot_use_the_daemon_even_with_its_token(page, daemon):
    socket = f"ws://127.0.0.1:{daemon.port}/v3/events?token={daemon.token}"
    seen = page.evaluate(TRIES, [daemon.url, socket])
    assert seen["socket"] == "refused"
    assert {what for name, what in seen.items() if name != "beacon"} == {"refused"}


@pytest.mark.parametrize("path", ["", "docs", "v1/models"])
def test_a_page_of_another_origin_cannot_embed_pages(page, tiny_lab, path):
    """This prevents clickjacking with invisible frames."""
    page.evaluate(FRAMING, f"{tiny_lab.url}/{path}")
    *_, framed = page.frames
    framed.wait_for_url("chrome-error://chromewebdata/")
    assert len(page.frames) == 3, "the page, its own frame and the refused one"


def test_a_page_of_an_allowed_origin_can_fetch(page, evil, tiny_home):
    with serving(tiny_home, None, cors_origins=(f"http://localhost:{evil}",)) as lab:
        assert page.evaluate(FETCHING, f"{lab.url}/admin/models/unload") == 200


@pytest.mark.parametrize("name", ["rebound.evil.example", "127.0.0.1.evil.example"])
def test_dns_rebinding_is_rejected(browser, tiny_lab, name):
    """The attacker's name resolves to the server, so the requests of the page are same-origin."""
    page = browser.new_page()
    base = f"http://{name}:{tiny_lab.server.port}"
    answer = page.goto(f"{base}/v1/models")
    assert (answer.status, answer.json()["error"]["code"]) == (421, "host-forbidden")
    seen = page.evaluate(TRIES, [base, f"ws://{name}:{tiny_lab.server.port}/v1/chat/stream"])
    page.close()
    read = {what[:4] for what in seen.values() if what not in ("refused", "opaque", "true")}
    assert read == {"421 "}
    assert "tiny" not in str(seen)
    assert manager_of(tiny_lab).snapshot.model == "tiny"
