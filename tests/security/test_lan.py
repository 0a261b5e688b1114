"""Tests with another machine on the network: two network namespaces with a virtual cable, the servers in one and a
client in the other."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from lmx_lab.wire.daemon import StateFile
from tests.support.commands import Serving, serving

pytestmark = pytest.mark.long
WAIT_S = 60
SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
# One process sends all requests: each is a method, a URL, JSON or null, and headers.
ASKING = """
import http.client, json, sys, urllib.parse
answers = []
for method, url, content, headers in json.load(sys.stdin):
    to = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(to.hostname, to.port, timeout=60)
    body = None if content is None else json.dumps(content)
    connection.request(method, f"{to.path}?{to.query}", body, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    text = response.read().decode()
    is_json = "json" in response.getheader("Content-Type", "")
    answers.append([response.status, json.loads(text) if is_json else text])
    connection.close()
json.dump(answers, sys.stdout)
"""


@dataclass(frozen=True)
class Machine:
    """A network namespace, which exists as long as the process that created it."""

    holder: subprocess.Popen[bytes]

    def command(self, *words):
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *words]

    def run(self, *words):
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=WAIT_S, check=False)
        if done.returncode:
            pytest.skip(f"no cable can be laid between network namespaces here: {done.stderr.strip()}")

    def ask(self, *questions):
        done = subprocess.run(
            self.command(sys.executable, "-I", "-S", "-c", ASKING),
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
            check=True,
        )
        return [(status, body) for status, body in json.loads(done.stdout)]


@contextlib.contextmanager
def machine():
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # Its output comes from inside the namespace.
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        if holder.stdout.readline() != b"\n":
            pytest.skip("this user may not make network namespaces")
        yield Machine(holder)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


@pytest.fixture(scope="module")
def lan():
    """Return the server's machine and another one, which are connected."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]} here")
    with machine() as here, machine() as there:
        here.run("ip", "link", "add", "lan0", "type", "veth", "peer", "name", "lan0", "netns", str(there.holder.pid))
        for each, address in ((here, SERVER), (there, CLIENT)):
            each.run("ip", "address", "add", f"{address}/24", "dev", "lan0")
            for name in ("lo", "lan0"):
                each.run("ip", "link", "set", name, "up")
        yield here, there


@pytest.fixture(scope="module")
def served(lan, tiny_home, tmp_path_factory):
    """Start all servers and return their URLs. They start in parallel, which takes as long as one."""
    here, _ = lan
    common = ("--host", "0.0.0.0", "--port", "0")
    daemon_home = tmp_path_factory.mktemp("daemon-home")
    running = {
        "usual": Serving(tiny_home, *common, "--model", "tiny", before=here.command()),
        # On an IPv6 socket, which also accepts IPv4.
        "admin": Serving(
            tiny_home, "--host", "::", "--port", "0", "--lan-admin", "--api-key", "lan-key", before=here.command()
        ),
        "daemon": Serving(daemon_home, *common, command="daemon", before=here.command()),
    }
    try:
        urls = {name: f"http://{SERVER}:{each.port}" for name, each in running.items()}
        state = StateFile.model_validate_json((daemon_home / "daemon" / "state.json").read_bytes())
        yield urls, state.token
    finally:
        for each in running.values():
            each.close()


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def test_another_machine_can_chat_and_list_models_but_change_nothing(lan, served, tiny):
    url = served[0]["usual"]
    answers = lan[1].ask(
        ("POST", f"{url}/v1/chat/completions", CHAT, {}),
        ("GET", f"{url}/admin/models", None, {}),
        ("GET", f"{url}/admin/models/plan?model=tiny", None, {}),
        ("POST", f"{url}/admin/models/load", {"model": "tiny-two"}, {}),
        ("POST", f"{url}/admin/models/load", {"model": str(tiny.path)}, {}),
        ("POST", f"{url}/admin/models/unload", None, {}),
        ("POST", f"{url}/admin/models/unload", {"model": "tiny"}, {"X-Forwarded-For": "127.0.0.1"}),
        ("POST", f"{url}/admin/trace", {"trace": {"kind": "hooks"}}, {}),
        ("POST", f"{url}/v1/chat/completions", {**CHAT, "model": str(tiny.path)}, {}),
        ("GET", f"{url}/readyz", None, {}),
    )
    assert [status for status, _ in answers] == [200, 200, 403, 403, 403, 403, 403, 403, 404, 200]
    assert {body["error"]["code"] for status, body in answers if status == 403} == {"admin-forbidden"}


def on_loopback(url):
    """Return the URL of the same server for programs on its own machine."""
    return url.replace(SERVER, "127.0.0.1")


def test_callers_on_the_same_machine_are_local_only_through_loopback(lan, served):
    url, load = served[0]["usual"], {"model": "tiny"}
    port = url.rpartition(":")[2]
    name = socket.gethostname()
    others = [SERVER, name, name.upper(), f"{name}.local"]
    answers = lan[0].ask(
        ("POST", f"{on_loopback(url)}/admin/models/load", load, {}),
        ("POST", f"{on_loopback(url)}/admin/models/load", load, {"Host": f"LOCALHOST:{port}"}),
        ("POST", f"{on_loopback(url)}/admin/models/load", load, {"X-Forwarded-For": "127.0.0.1"}),
        ("POST", f"{url}/admin/models/load", load, {}),
        ("POST", f"{url}/admin/models/load", load, {"Host": f"localhost:{port}"}),
        *(("POST", f"{on_loopback(url)}/admin/models/load", load, {"Host": f"{each}:{port}"}) for each in others),
        *(("GET", f"{on_loopback(url)}/admin/models", None, {"Host": f"{each}:{port}"}) for each in others),
        ("GET", f"{on_loopback(url)}/admin/models", None, {"Host": f"localhost.:{port}"}),
    )
    expected = [200, 200, 403, 403, 403, *[403] * len(others), *[200] * len(others), 421]
    assert [status for status, _ in answers] == expected


def test_callers_on_loopback_with_the_key_are_local_for_any_host(lan, served, tiny):
    """Over IPv4 on an IPv6 socket, where the address is ``::ffff:127.0.0.1``, and over IPv6."""
    url, by_path = served[0]["admin"], {"model": str(tiny.path)}
    port = url.rpartition(":")[2]
    right = {"Authorization": "Bearer lan-key", "Host": f"{SERVER}:{port}"}
    answers = lan[0].ask(
        ("POST", f"{on_loopback(url)}/admin/models/load", by_path, right),
        ("POST", f"http://[::1]:{port}/admin/models/load", by_path, right),
        ("POST", f"{on_loopback(url)}/admin/models/load", by_path, {**right, "Authorization": "Bearer x"}),
        ("POST", f"{url}/admin/models/load", by_path, right),
        ("POST", f"{on_loopback(url)}/admin/models/unload", None, right),
    )
    assert [status for status, _ in answers] == [200, 200, 401, 404, 200]


def test_another_machine_receives_no_paths(lan, served, tiny, tmp_path):
    """Also if the operator loaded a model by its path, which is then its id."""
    url = served[0]["usual"]
    model = tmp_path / "in a folder" / "my-tiny"
    shutil.copytree(tiny.path, model)
    own = lan[0].ask(
        ("POST", f"{on_loopback(url)}/admin/models/load", {"model": str(model)}, {}),
        ("GET", f"{on_loopback(url)}/admin/models", None, {}),
        ("GET", f"{on_loopback(url)}/readyz", None, {}),
    )
    chat = {**CHAT, "model": "my-tiny"}
    answers = lan[1].ask(
        ("GET", f"{url}/admin/models", None, {}),
        ("GET", f"{url}/v1/models", None, {}),
        ("GET", f"{url}/v1/models/my-tiny", None, {}),
        ("GET", f"{url}/readyz", None, {}),
        ("GET", f"{url}/metrics", None, {}),
        ("GET", f"{url}/openapi.json", None, {}),
        ("POST", f"{url}/v1/chat/completions", chat, {}),
        ("POST", f"{url}/v1/chat/completions", {**chat, "stream": True}, {}),
        ("POST", f"{url}/v1/completions", {"model": "default", "prompt": "a", "max_tokens": 1}, {}),
        ("POST", f"{url}/v1/chat/completions", {**CHAT, "model": "tiny-two"}, {}),
        ("POST", f"{url}/v1/chat/completions", {**CHAT, "model": "nothing"}, {}),
        ("POST", f"{url}/v1/embeddings", {"model": "default", "input": "a"}, {}),
        ("GET", f"{url}/api/tags", None, {}),
        ("GET", f"{url}/api/ps", None, {}),
        ("POST", f"{url}/api/show", {"model": "my-tiny"}, {}),
        ("GET", f"{url}/props", None, {}),
    )
    assert own[0][1]["model"] == own[2][1]["model"] == str(model)
    assert {str(model), str(tiny.path)} <= {each["path"] for each in own[1][1]["models"]}
    assert [status for status, _ in answers] == [*[200] * 9, 503, 404, 503, *[200] * 4]
    assert all(each["path"] == each["id"] for each in answers[0][1]["models"])
    assert answers[3][1]["model"] == answers[6][1]["model"] == "my-tiny"
    for _, body in answers:
        for folder in (tmp_path, tiny.path.parent):
            assert str(folder) not in str(body)
    (back,) = lan[0].ask(("POST", f"{on_loopback(url)}/admin/models/load", {"model": "tiny"}, {}))
    assert back[0] == 200


@pytest.mark.parametrize(("name", "path"), [("usual", "/healthz"), ("daemon", "/v3/health")])
def test_added_and_removed_addresses_are_detected(lan, served, name, path):
    here, there = lan
    url = served[0][name]
    later = "10.77.8.1"
    question = ("GET", f"{url}{path}", None, {"Host": url.replace(SERVER, later).removeprefix("http://")})

    def status_becomes(wanted):
        deadline = time.monotonic() + WAIT_S
        while there.ask(question)[0][0] != wanted:
            if time.monotonic() > deadline:
                return False
            # Each request starts a process.
            time.sleep(0.25)
        return True

    assert there.ask(question)[0][0] == 421
    here.run("ip", "address", "add", f"{later}/24", "dev", "lan0")
    assert status_becomes(200)
    here.run("ip", "address", "del", f"{later}/24", "dev", "lan0")
    assert status_becomes(421)


def test_with_lan_admin_another_machine_loads_and_unloads_but_not_by_path(lan, served, tiny):
    url, key = served[0]["admin"], {"Authorization": "Bearer lan-key"}
    answers = lan[1].ask(
        ("POST", f"{url}/admin/models/load", {"model": "tiny-two"}, {}),
        ("POST", f"{url}/admin/models/load", {"model": "tiny-two"}, key),
        ("POST", f"{url}/admin/models/load", {"model": str(tiny.path)}, key),
        ("POST", f"{url}/admin/models/load", {"model": "org/name-of-the-hub"}, key),
        ("GET", f"{url}/admin/models/plan?model=tiny-two", None, key),
        ("GET", f"{url}/admin/models/plan?model={tiny.path}", None, key),
        ("GET", f"{url}/admin/models/plan?model=org/name-of-the-hub", None, key),
        ("POST", f"{url}/admin/models/unload", None, key),
    )
    assert [status for status, _ in answers] == [401, 200, 404, 404, 200, 404, 404, 200]


def test_a_dns_name_of_the_lan_address_is_rejected_for_other_machines(lan, served):
    url = served[0]["usual"]
    port = url.rpartition(":")[2]
    strange = [{"Host": f"{name}:{port}"} for name in ("evil.example", "127.0.0.1.evil.example", "10.77.0.11")]
    answers = lan[1].ask(*(("GET", f"{url}/v1/models", None, host) for host in strange))
    assert [status for status, _ in answers] == [421] * len(strange)
    (another,) = lan[1].ask(("POST", f"{url}/v1/chat/completions", CHAT, {"Origin": f"http://{CLIENT}"}))
    assert another[0] == 403


def test_the_daemon_needs_its_token_from_other_machines(lan, served):
    urls, token = served
    url, right = urls["daemon"], {"Authorization": f"Bearer {token}"}
    answers = lan[1].ask(
        ("GET", f"{url}/v3/health", None, {}),
        ("GET", f"{url}/v3/sessions", None, {}),
        ("POST", f"{url}/v3/sessions", {}, {"Authorization": "Bearer x"}),
        ("POST", f"{url}/v3/mcp/servers", {"name": "evil", "command": "sh"}, {}),
        ("GET", f"{url}/v3/sessions", None, right),
    )
    assert [status for status, _ in answers] == [200, 401, 401, 401, 200]


def discover(on, home):
    environment = {**os.environ, "LMX_LAB_HOME": str(home), "COLUMNS": "200"}
    command = on.command(sys.executable, "-m", "lmx_lab", "discover", "--seconds", "2")
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment)


def test_announced_labs_are_found_by_another_machine(lan, served, tmp_path):
    """Two labs of one name are told apart, and labs that are not announced are not found."""
    here, there = lan
    options = ("--host", "0.0.0.0", "--port", "0", "--announce", "--announce-name", "kitchen")
    with contextlib.ExitStack() as stack:
        names = []
        for on, more in ((here, ("--model", "echo")), (there, ("--api-key", "lan-key"))):
            server = stack.enter_context(serving(tmp_path, *options, *more, before=on.command()))
            names += re.findall(r"announced on the LAN as (.+)", server.wait_for("announced on the LAN as "))
        found = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < 2 and time.monotonic() < deadline:
            found = [line.split() for line in discover(there, tmp_path).stdout.splitlines()[1:]]
    assert names == ["kitchen", "kitchen-2"]
    assert [line[0] for line in found] == names
    assert found[0][1].startswith(f"http://{SERVER}:")
    assert found[0][2:] == ["echo", "no"]
    assert found[1][1].startswith(f"http://{CLIENT}:")
    assert found[1][2:] == ["yes"]


def test_without_a_network_the_error_says_so(tmp_path):
    with machine() as alone:
        done = discover(alone, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "this machine has no network connection" in done.stderr
    assert "Errno" not in done.stderr
