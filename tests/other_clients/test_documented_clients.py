"""Run the clients of ``docs/clients.md`` that are installed with the development tools.

``make clients`` runs the others, in an environment of their own.
"""

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.other_clients.clients_page import PAGE, run_section, serve_arguments
from tests.other_clients.try_agents import AGENTS
from tests.support.browser import WAIT_MS, chromium
from tests.support.commands import serving
from tests.support.docs import ROOT, table_rows

pytestmark = pytest.mark.long

PROGRAMS = Path(sys.executable).parent
CAN_CREATE_NAMESPACES = shutil.which("ip") is not None and os.geteuid() == 0
NETWORK = "10.211.84"
"""Network of the two simulated machines."""


@pytest.fixture(scope="module")
def server(starter_home, minilm):
    with serving(starter_home, *serve_arguments(None), "--port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def address(server):
    return {"127.0.0.1:8400": f"127.0.0.1:{server.port}"}


def test_curl_lists_models_and_chats(address, tmp_path):
    printed = run_section("curl", address, tmp_path)
    assert '"id":"smollm2-135m"' in printed
    assert "Paris" in printed
    assert '"object":"chat.completion"' in printed


def test_openai_python_chats_streams_parses_embeds_and_creates_a_response(address, tmp_path):
    printed = run_section("openai-python", address, tmp_path, programs=PROGRAMS)
    whole, streamed, city, vectors, response = printed.splitlines()
    assert whole == streamed == response
    assert "Paris" in whole
    assert re.fullmatch(r"name='.*' inhabitants=-?\d+", city)
    assert vectors == "2 vectors of 384 numbers"


def tiny_model(arguments):
    """Return the arguments with the tiny model, which loads faster; the tests do not look at the text."""
    assert "smollm2-135m" in arguments
    return ["tiny" if each == "smollm2-135m" else each for each in arguments]


# A page in a browser


@pytest.fixture
def tab():
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        yield page


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_pages(folder):
    """Serve the folder as a web site; yield its origin."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{site.server_port}"
        finally:
            site.shutdown()
            thread.join()


def test_a_page_of_an_allowed_origin_streams_an_answer_and_another_page_is_refused(tiny_home, tmp_path, tab):
    refused = []
    with web_pages(tmp_path) as named, web_pages(tmp_path) as other:
        page_server = tiny_model(serve_arguments("A web page"))
        arguments = [named if each == "http://127.0.0.1:3000" else each for each in page_server]
        assert named in arguments
        with serving(tiny_home, *arguments, "--port", "0") as server:
            run_section("A web page", {"127.0.0.1:8400": f"127.0.0.1:{server.port}"}, tmp_path)
            tab.goto(f"{named}/page.html")
            tab.wait_for_function("document.title === 'done'")
            assert tab.inner_text("#answer")
            tab.on("pageerror", lambda error: refused.append(error.message))
            with tab.expect_event("pageerror"):
                tab.goto(f"{other}/page.html")
            assert tab.inner_text("#answer") == ""
            assert server.end(signal.SIGTERM)[0] == 0
    assert refused == ["Failed to fetch"]


# A second machine


@pytest.fixture
def machines():
    """The names of two network namespaces connected by a virtual cable, which stand for two machines on a LAN."""
    if not CAN_CREATE_NAMESPACES:
        pytest.skip("network namespaces need root, and ip from iproute2")
    names = f"lmx{os.getpid()}a", f"lmx{os.getpid()}b"
    with contextlib.ExitStack() as stack:
        for name in names:
            if (created := ip("netns", "add", name)).returncode != 0:
                pytest.skip(f"network namespaces are not permitted here: {created.stderr.strip()}")
            stack.callback(ip, "netns", "del", name)
        first, second = (f"{name} netns {name}" for name in names)
        linked = ip(*f"link add {first} type veth peer {second}".split())
        assert linked.returncode == 0
        for at, name in enumerate(names, 1):
            address = ("addr", "add", f"{NETWORK}.{at}/24", "dev", name)
            for command in (address, ("link", "set", name, "up"), ("link", "set", "lo", "up")):
                assert ip("-n", name, *command).returncode == 0
        yield names


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def test_a_second_machine_chats_and_may_not_unload(tiny_home, tmp_path, machines):
    first, second = (("ip", "netns", "exec", name) for name in machines)
    with serving(tiny_home, *tiny_model(serve_arguments("A second machine")), "--port", "0", before=first) as server:
        announced = re.search(r"on the LAN at http://(\S+)", server.wait_for("on the LAN at"))
        assert announced
        assert announced[1] == f"{NETWORK}.1:{server.port}"
        printed = run_section(
            "A second machine", {"192.168.1.20:8400": announced[1]}, tmp_path, prefix=second, programs=PROGRAMS
        )
        assert '"object":"chat.completion"' in printed
        assert printed.rpartition("}}")[2].strip()
        unload = [
            *("curl", "-s", "-X", "POST", f"http://{announced[1]}/admin/models/unload", "-d", "{}"),
            *("-H", "Content-Type: application/json", "-H", "Authorization: Bearer choose-one"),
        ]
        refused = subprocess.run([*second, *unload], capture_output=True, text=True, check=True)
        assert "admin-forbidden" in refused.stdout
        without_key = subprocess.run([*second, *unload[:-2]], capture_output=True, text=True, check=True)
        assert "unauthorized" in without_key.stdout
        assert server.end(signal.SIGTERM)[0] == 0


# Statements of the page


def test_the_table_has_the_tested_versions_of_agents():
    documented = {row["client"]: row["tried with"] for row in table_rows(PAGE, "client")}
    tested = json.loads((Path(__file__).parent / "agents.json").read_text())["dependencies"]
    assert {
        agent.package: documented[f"[{agent.title}](#{agent.title.lower().replace(' ', '-')})"] for agent in AGENTS
    } == {agent.package: tested[agent.package] for agent in AGENTS}


def test_the_table_has_the_versions_that_are_tested():
    packages = {
        "clients": r"[\w.-]+",
        "all": "openai",
        "openai3": "openai-agents|semantic-kernel",
        "aider": "aider-chat",
        "harnesses": "lm-eval|inspect-ai|llama-benchy",
    }
    tested = json.loads((Path(__file__).parent / "agents.json").read_text())["dependencies"]
    for name, pattern in packages.items():
        text = (ROOT / "tools" / "constraints" / f"{name}.txt").read_text()
        tested |= re.findall(rf"^({pattern})==(\S+)$", text, flags=re.MULTILINE)
    documented = [re.findall(r"([\w-]+) (\d[\d.]*)", row["tried with"]) for row in table_rows(PAGE, "client")]
    named = dict(pair for row in documented for pair in row)
    assert {"openai", "langchain-openai", "llm", "litellm", "instructor"} <= set(named)
    assert named == {name: tested[name] for name in named}
