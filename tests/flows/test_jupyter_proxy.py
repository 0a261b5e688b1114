"""Tests with a real Jupyter server and jupyter-server-proxy, for a lab on the same machine and one in a kernel."""

import json
import re
import socket
from dataclasses import dataclass
from urllib.parse import urljoin

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from lmx_lab import urls
from lmx_lab.errors import UnreachableError
from lmx_lab.notebook.lab import attach
from tests.support.asking import ENDLESS, echo_body
from tests.support.jupyter import execute, jupyter_server, printed
from tests.support.labs import PACE, manager_of, serving, wait_until_idle

pytestmark = pytest.mark.slow

BASE = "/user/name/"
TOKEN = "not-a-secret"
AUTH = {"authorization": f"token {TOKEN}"}
CHAT = "v1/chat/completions"
SSE = {"accept": "text/event-stream"}
FOREIGN = "hub.example"


@dataclass(frozen=True, kw_only=True)
class Jupyter:
    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}{BASE}"

    def run(self, code):
        """Run code in a new kernel of this server, which is kept, and return its output."""
        made = httpx2.post(f"{self.url}api/kernels", json={"name": "python3"}, headers=AUTH)
        return printed(execute(self.url, AUTH, made.json()["id"], code))


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory):
    """Run a Jupyter server as on a Hub, with a base path and with a public host name that it does not know."""
    home = tmp_path_factory.mktemp("jupyter")
    options = {
        "ServerApp.port": 0,
        "ServerApp.base_url": BASE,
        "ServerApp.root_dir": home,
        "ServerApp.allow_remote_access": True,
        "IdentityProvider.token": TOKEN,
    }
    # Only the tested extension is enabled, because the others take seconds to start.
    config = {"ServerApp": {"jpserver_extensions": {"jupyterlab": False, "notebook_shim": False, "jupyter_lsp": False}}}
    (home / "config").mkdir()
    (home / "config" / "jupyter_server_config.json").write_text(json.dumps(config))
    with jupyter_server(home, *(f"--{name}={value}" for name, value in options.items())) as server:
        yield Jupyter(port=server.port)


@pytest.fixture(scope="module")
def lab(jupyter, echo_home):
    """Run a lab as if it was started in a terminal of the Jupyter server, which sets its address in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_SERVER_URL", jupyter.url)
        with serving(echo_home, "echo", slots=1, echo_tokens_per_s=PACE) as lab:
            yield lab


@pytest.fixture(scope="module")
def page(jupyter, lab):
    return urls.proxied_url(jupyter.url, lab.server.port)


@pytest.fixture
def http(page):
    """Return a client that is logged in to Jupyter."""
    with httpx2.Client(base_url=page, headers=AUTH) as client:
        yield client


@pytest.fixture(scope="module")
def in_kernel(jupyter, tmp_path_factory):
    """Run a lab in a kernel of the Jupyter server, with which it ends, and return its port and its path."""
    home = str(tmp_path_factory.mktemp("home"))
    code = f"""
import json, lmx_lab
lab = lmx_lab.launch(port=0, loop="thread", home={home!r})
print("found", json.dumps({{"port": lab.server.port, "path": lab.server.addresses.proxy_path}}))
"""
    return json.loads(jupyter.run(code).rpartition("found ")[2])


@pytest.fixture
def kernel_port(in_kernel):
    return int(in_kernel["port"])


@pytest.mark.long
def test_pages_and_whole_answers_are_proxied(http, jupyter):
    assert http.get("healthz").json() == {"status": "ok"}
    page = {"origin": f"http://127.0.0.1:{jupyter.port}"}
    answer = http.post(CHAT, json=echo_body(model="default"), headers=page)
    assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("path", ["about", "docs"])
def test_links_of_pages_work_below_the_prefix(http, path):
    shown = http.get(path)
    # The policy is that of our server, and Jupyter has not added its own.
    assert shown.headers["content-security-policy"].count("frame-ancestors 'self'") == 1
    assert shown.headers["content-security-policy"].startswith("default-src 'none'")
    found = [link for link in re.findall(r'href="([^"]*)"', shown.text) if not link.startswith("https://")]
    assert "openapi.json" in found
    answers = [http.get(urljoin(str(shown.url), link)) for link in found]
    assert [answer.status_code for answer in answers] == [200] * len(found)
    assert all(answer.headers["x-lmx-lab"] for answer in answers)


def test_a_lab_of_another_jupyter_server_can_only_be_read(http, lab):
    """This Jupyter server did not start the process of the lab, so its callers are not known to be logged in."""
    refused = http.post("admin/models/unload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin-forbidden")
    assert {record["path"] for record in http.get("admin/models").json()["models"]} == {
        record.id for record in lab.models()
    }


def test_clients_that_are_not_logged_in_to_jupyter_are_refused(page, lab):
    assert httpx2.post(f"{page}admin/models/unload").status_code == 403
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"{page.replace('http', 'ws')}v1/chat/stream", proxy=None)
    assert manager_of(lab).snapshot.model is not None


def test_an_answer_is_streamed_while_it_is_generated(http, lab):
    body = {**echo_body(model="default"), "stream": True}
    with connect(f"{lab.url.replace('http', 'ws')}/v1/chat/stream", proxy=None) as other:
        other.send(json.dumps(echo_body(**ENDLESS)))
        other.recv()
        with http.stream("POST", CHAT, json=body, headers=SSE) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            # Another request has the only slot, so only a comment can have been sent.
            assert manager_of(lab).snapshot.queued_requests == 1
            other.close()
            rest = [line for line in lines if line]
    assert first == ": queued"
    assert rest[-1] == "data: [DONE]"


def test_endless_events_are_proxied(http):
    with http.stream("GET", "admin/events", headers=SSE) as answer:
        first = next(answer.iter_lines())
    assert json.loads(first.removeprefix("data: "))["type"] == "throughput"


def test_the_websocket_is_proxied_and_closing_it_cancels_the_generation(page, jupyter, lab):
    before = manager_of(lab).snapshot.totals.output_tokens
    origin = f"http://127.0.0.1:{jupyter.port}"
    address = f"{page.replace('http', 'ws')}v1/chat/stream"
    with connect(address, additional_headers=AUTH, origin=origin, proxy=None) as client:
        client.send(json.dumps(echo_body(**ENDLESS)))
        assert json.loads(client.recv())["token"]
    wait_until_idle(lab)
    assert 0 < manager_of(lab).snapshot.totals.output_tokens - before < ENDLESS["max_tokens"]


def test_a_lab_in_a_kernel_accepts_the_host_name_of_jupyter(jupyter, kernel_port):
    page = urls.proxied_url(jupyter.url, kernel_port)
    client_headers = {**AUTH, "host": FOREIGN}
    assert httpx2.get(f"{page}healthz", headers=client_headers).status_code == 200
    # The proxy of a Hub adds these headers.
    forwarded = {"origin": f"https://{FOREIGN}", "x-forwarded-for": "192.0.2.1", "x-forwarded-host": FOREIGN}
    own = httpx2.post(f"{page}admin/models/unload", headers={**client_headers, **forwarded})
    other = httpx2.post(f"{page}admin/models/unload", headers={**client_headers, "origin": "https://evil.example"})
    assert (own.status_code, other.status_code) == (200, 403)
    assert other.json()["error"]["code"] == "origin-forbidden"
    address = f"ws://{FOREIGN}{BASE}proxy/{kernel_port}/v1/chat/stream"
    origin = f"https://{FOREIGN}"
    connection = socket.create_connection(("127.0.0.1", jupyter.port))
    with connect(address, sock=connection, additional_headers=AUTH, origin=origin, proxy=None) as client:
        client.send(json.dumps(echo_body()))
        assert json.loads(client.recv())["error"]["code"] == "no-model-loaded"


def test_a_kernel_knows_the_path_at_which_jupyter_shows_its_server(in_kernel):
    assert in_kernel["path"] == f"{BASE}proxy/{in_kernel['port']}/"


def test_other_host_names_of_this_machine_are_refused(kernel_port):
    """The request has the same Host and all headers that a page could forge, but is not from the Jupyter server."""
    forged = {"x-proxycontextpath": f"{BASE}proxy/{kernel_port}", "x-forwarded-host": FOREIGN, "host": FOREIGN}
    direct = httpx2.post(f"http://127.0.0.1:{kernel_port}/admin/models/unload", headers=forged)
    assert (direct.status_code, direct.json()["error"]["code"]) == (421, "host-forbidden")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_notebook_page_may_call_a_lab_in_its_kernel_directly(jupyter, kernel_port, name):
    address = f"http://127.0.0.1:{kernel_port}/admin/models/unload"
    page = {"origin": f"http://{name}:{jupyter.port}"}
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    preflight = httpx2.options(address, headers={**page, **wanted})
    answer = httpx2.post(address, json={}, headers=page)
    assert (preflight.status_code, answer.status_code) == (200, 200)
    for response in (preflight, answer):
        assert response.headers["access-control-allow-origin"] == page["origin"]


@pytest.mark.parametrize("origin", ["http://127.0.0.1:1", "https://evil.example", "null", "vscode-webview://abc"])
def test_other_pages_are_refused_and_cannot_read_the_error(kernel_port, origin):
    address = f"http://127.0.0.1:{kernel_port}/admin/models/unload"
    wanted = {"access-control-request-method": "POST"}
    for answer in (
        httpx2.options(address, headers={"origin": origin, **wanted}),
        httpx2.post(address, json={}, headers={"origin": origin}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin-forbidden")
        assert "access-control-allow-origin" not in answer.headers


def test_a_lab_behind_jupyter_can_be_attached_with_its_token(jupyter, lab):
    url = f"{jupyter.url}proxy/{lab.server.port}/"
    with attach(url, api_key=TOKEN) as attached:
        assert attached.chat("hi", max_tokens=5, temperature=0).text == lab.chat("hi", max_tokens=5, temperature=0).text
        assert [record.id for record in attached.models() if record.loaded] == ["echo"]
    with pytest.raises(UnreachableError, match="login"):
        attach(url)
    for other in (f"{jupyter.url}proxy/1/", jupyter.url):
        with pytest.raises(UnreachableError):
            attach(other, api_key=TOKEN)
