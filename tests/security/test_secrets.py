"""Tests that keys and tokens are in no log, process list, notebook, widget, traceback or response, and that untrusted
text in paths and names does not control terminals."""

import contextlib
import json
import logging
import os
import re
import signal
import sys
import traceback
from pathlib import Path

import httpx2
import psutil
import pytest

from lmx_lab.cli.models import models as list_models
from lmx_lab.cli.terminal import print_error, print_line, print_note
from lmx_lab.client import DaemonClient, LabClient
from lmx_lab.errors import LabError
from lmx_lab.http.uvicorn_server import recent_logs
from lmx_lab.settings import SECRETS as VARIABLES
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.commands import serving
from tests.support.labs import KEY
from tests.support.programs import script_result
from tests.support.sockets import HANDSHAKE, post, send
from tests.support.waiting import until

ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b1m\u202eright-to-left\u2066\r\b"
"""Colors, a window title, a C1 control, bidirectional overrides, a carriage return and a backspace."""
CONTROLS = set("\x1b\x07\x9b\u202e\u2066\r\b")
QUOTED = "%1b%5b31mred%1b%5d0%3btitle%07%c2%9b1m%e2%80%aeright%0a2026-01-01%20INFO%20forged%0d"


def found(secret, *texts):
    return [str(text)[:200] for text in texts if secret in str(text)]


class RecordingHandler(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.seen = []

    def emit(self, record):
        self.seen += [self.format(record), repr(record.args), str(record.msg)]


@contextlib.contextmanager
def listening(*names):
    """Yield all log records, with the loggers at level DEBUG."""
    handler = RecordingHandler()
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.DEBUG)
    try:
        yield handler.seen
    finally:
        for name, level in levels.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(level)


@pytest.mark.slow
def test_the_key_is_in_no_log_or_response_of_the_server(keyed_lab):
    port, right = keyed_lab.server.port, ("Authorization", f"Bearer {KEY}")
    with listening("uvicorn.error", "uvicorn.access", "lmx_lab", "asyncio") as logged:
        answers = [
            send(port, f"GET {path}", more).body
            for path in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/admin/models", f"/nothing?token={KEY}")
            for more in ([right], [], [("Authorization", f"Bearer x{KEY}")], [("Authorization", f"Basic {KEY}")])
        ]
        for path in ("/v1/chat/stream", f"/v1/chat/stream?token={KEY}", f"/v1/chat/stream?api_key={KEY}"):
            answers += [send(port, f"GET {path}", [*HANDSHAKE, *more]).body for more in ([right], [])]
    assert logged, "the requests were logged"
    assert found(KEY, *logged, *recent_logs(), *answers) == []


@pytest.mark.slow
def test_the_token_is_in_no_log_response_or_repr_of_the_daemon(daemon):
    token = daemon.token
    queries = {"": 401, f"?token={token}": 101, f"?a=%22&%74oken={token}": 400, f"?token={token}x": 401}
    right, foreign = ("Authorization", f"Bearer {token}"), ("Origin", "http://evil.example")
    with listening("uvicorn.error", "uvicorn.access", "lmx_lab", "asyncio") as logged:
        answers = [send(daemon.port, f"GET /v3/events{query}", HANDSHAKE) for query in queries]
        assert [answer.status for answer in answers] == list(queries.values())
        for more in ([right], [right, foreign]):
            answers.append(send(daemon.port, "GET /v3/events", [*HANDSHAKE, *more]))
        for path in ("/v3/daemon", "/v3/openapi.json", "/v3/events?after=0"):
            answers.append(send(daemon.port, f"GET {path}", [right]))
    assert any('"WebSocket /v3/events?' in line for line in logged), "the handshakes were logged"
    files = [path.read_text(errors="replace") for path in daemon.folder.glob("daemon.log*")]
    shown = [repr(daemon), repr(vars(daemon)), repr(daemon.settings)]
    assert found(token, *logged, *recent_logs(), *answers, *files, *shown) == []


def test_the_key_is_in_no_repr_panel_or_report(keyed_lab, tmp_path):
    shown_ones = [keyed_lab, keyed_lab.settings, vars(keyed_lab), vars(keyed_lab.server), keyed_lab.server.services]
    texts = [repr(each) for each in shown_ones] + [str(keyed_lab.settings)]
    panel = keyed_lab.panel("models", "metrics", "chat", "rerank")
    for each in (panel, *panel.children):
        bundle = each._repr_mimebundle_()
        texts += [json.dumps(each.get_state(), default=repr), json.dumps(bundle, default=repr), repr(each)]
    texts.append(Path(keyed_lab.report(tmp_path / "report.html")).read_text())
    assert len("".join(texts)) > 10_000
    assert found(KEY, *texts) == []


def test_the_key_is_in_no_repr_or_error_of_a_client(keyed_lab, daemon):
    texts = []
    wrong = KEY[::-1]
    with LabClient(keyed_lab.url, api_key=KEY) as client, LabClient(keyed_lab.url, api_key=wrong) as refused:
        texts += [repr(client), repr(vars(client)), repr(refused)]
        for ask in (lambda: client.load("no-such-model"), refused.models):
            try:
                ask()
            except LabError as exc:
                texts += [repr(exc), "".join(traceback.format_exception(exc, chain=True))]
    assert len(texts) > 5
    with DaemonClient(daemon.url, token=daemon.token) as client_of_daemon:
        texts += [repr(client_of_daemon)]
        try:
            client_of_daemon.read_session("no-such-session")
        except LabError as exc:
            texts += [repr(exc), "".join(traceback.format_exception(exc, chain=True))]
    assert found(KEY, *texts) == found(wrong, *texts) == found(daemon.token, *texts) == []


SECRETS = {
    "LMX_LAB_API_KEY": "key-of-the-server",
    "LMX_LAB_UPSTREAM_API_KEY": "key-of-the-upstream",
    "LMX_LAB_DAEMON_TOKEN": "token-of-the-daemon",
    "HF_TOKEN": "token-of-the-hub",
}


@pytest.fixture
def debugged(monkeypatch):
    """Return a function that runs the server in a program that has all keys in its environment."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return lambda home, model: serving(home, "--port", "0", "--model", model, "--log-level", "debug")


@pytest.mark.long
def test_child_processes_have_no_keys_in_arguments_or_environment(debugged, tiny_home, tiny_gguf):
    with debugged(tiny_home, str(tiny_gguf)) as server:
        url, headers = f"http://127.0.0.1:{server.port}", {"authorization": "Bearer key-of-the-server"}
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = httpx2.post(
            f"{url}/v1/chat/completions", json={**body, "response_format": schema}, headers=headers, timeout=60
        )
        assert answer.status_code == 200, answer.text
        own = psutil.Process(server.process.pid)
        children = own.children(recursive=True)
        names = {
            "/".join(Path(part).parts[-2:]) for child in children for part in child.cmdline() if part.endswith(".py")
        }
        assert names >= {"llama_cpp/worker.py", "tokenizing/template_worker.py", "grammar/worker.py"}
        texts = [f"{child.cmdline()} {child.environ()}" for child in children] + [str(own.cmdline())]
        assert [secret for secret in SECRETS.values() if found(secret, *texts)] == []


@pytest.mark.long
@pytest.mark.slow
def test_requested_paths_do_not_control_the_terminal_of_the_server(debugged, tmp_path):
    with debugged(tmp_path, "echo") as server:
        port, right = server.port, ("Authorization", "Bearer key-of-the-server")
        for path in (f"/{QUOTED}", f"/v1/models/{QUOTED}", f"/v1/chat/completions/{QUOTED}", f"/docs?{QUOTED}"):
            assert send(port, f"GET {path}", [right]).status < 500
            send(port, f"GET {path}", [right, *HANDSHAKE])
            json_called = [right, ("Content-Type", "application/json"), ("User-Agent", ESCAPES[:5])]
            assert send(port, f"POST {path}", json_called, b"{").status < 500
        body = {"model": ESCAPES, "messages": [{"role": "user", "content": "x"}]}
        for name in (ESCAPES, f"echo\n2026-01-01 INFO forged{ESCAPES}"):
            assert post(port, "/v1/chat/completions", {**body, "model": name}, [right]).status == 404
            assert post(port, "/admin/models/load", {"model": name}, [right]).status == 404
        status, errors = server.end(signal.SIGTERM)
        assert status == 0
        assert not set(errors + server.output) & CONTROLS
        assert not [line for line in errors.splitlines() if line.startswith("2026-01-01")]
        assert [secret for secret in SECRETS.values() if found(secret, errors, server.output)] == []


LAUNCHED = """
import logging, lmx_lab
lab = lmx_lab.launch(port=0, home={home!r})
logging.getLogger("lmx_lab.server.websocket").warning("refused: %s", {text!r})
lab.stop()
"""


@pytest.mark.long
@pytest.mark.slow
def test_requested_paths_do_not_control_the_terminal_of_a_script(tmp_path):
    text = f"{ESCAPES}\n2026-01-01 INFO forged"
    done = script_result(LAUNCHED.format(home=str(tmp_path), text=text))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "refused" in line]
    assert "forged" in line
    assert not set(done.stderr.replace("\n", "")) & CONTROLS


def test_all_documented_keys_are_treated_as_secrets():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    named = set(re.findall(r"`([A-Z_]+(?:KEY|TOKEN))`", page.read_text(encoding="utf-8")))
    assert {"LMX_LAB_COMPARE_API_KEY", "HF_TOKEN"} <= named <= VARIABLES


@pytest.mark.slow
def test_an_mcp_server_receives_its_configured_environment_but_no_token(daemon, tmp_path):
    seen = tmp_path / "seen"
    # It writes its arguments and environment to a file and exits.
    code = f"import json, os, sys; open({str(seen)!r}, 'w').write(json.dumps([sys.argv, dict(os.environ)]))"
    config = {"name": "curious", "transport": "stdio", "command": sys.executable, "args": ["-c", code]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LMX_LAB_API_KEY", KEY)
        headers = {"authorization": f"Bearer {daemon.token}"}
        answer = httpx2.post(f"{daemon.url}/v3/mcp/servers", json=config, headers=headers, timeout=60)
        assert answer.status_code < 500, answer.text
    until(lambda: seen.exists() and seen.read_text() != "")
    given = seen.read_text()
    assert found(daemon.token, given) == found(KEY, given) == []


# Terminals


def test_text_of_model_files_and_servers_does_not_control_the_terminal(tmp_path, echo_home, monkeypatch, capsys):
    source = echo_home / "models" / "other"
    folder = tmp_path / "models" / "odd"
    folder.mkdir(parents=True)
    for path in source.iterdir():
        os.link(path, folder / path.name) if path.name != "config.json" else None
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"mode": ESCAPES, "bits": 4}}))
    assert ESCAPES in str(Catalog(Settings(home=tmp_path)).resolve("odd").quantization)
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    list_models()
    print_line(ESCAPES)
    print_note(ESCAPES)
    print_error(LabError(ESCAPES))
    printed = "".join(capsys.readouterr())
    assert "odd" in printed
    assert printed.count("\\x1b[31mred") == 4
    assert not set(printed) & CONTROLS
