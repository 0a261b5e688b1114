"""Tests of ``lmx-lab serve``: output, options and signals."""

import contextlib
import json
import re
import signal
import socket

import pytest

from lmx_lab.urls import qr_half_blocks
from tests.support.commands import request, run_command, signal_at, status

CHAT = "/v1/chat/completions"


def chat(model, text, **more):
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


@pytest.mark.slow
def test_ctrl_c_during_a_generation_ends_with_zero(tmp_path):
    def interrupt(server):
        with request(server.port, "POST", CHAT, chat("echo", "word " * 20, stream=True)) as response:
            assert response.readline().startswith(b"data:")
            server.send_signal(signal.SIGINT)
            assert response.read().endswith(b"data: [DONE]\n\n")

    slowly = {"LMX_LAB_ECHO_TOKENS_PER_S": "40"}
    options = ("--model", "echo", "--context-length", "1000", "--deterministic", "--kv-cache-dtype", "q8_0")
    ended = run_command(tmp_path, "serve", "--port", "0", *options, environ=slowly, meanwhile=interrupt)
    assert (ended.status, ended.stderr) == (0, "")
    assert re.search(r"echo loaded in .* 8 requests at once, of up to 1,000 tokens each; KV cache q8_0\n", ended.stdout)
    assert "stopping\n" in ended.stdout


@pytest.mark.slow
def test_each_request_is_one_line_unless_quiet(tmp_path):
    def ask(server):
        for body in (chat("echo", "three words here"), chat("nothing", "hi"), {"model": "echo"}):
            with request(server.port, "POST", CHAT, body) as response:
                response.read()
        assert status(server.port, "/healthz") == 200
        assert status(server.port, "/nowhere") == 404
        server.send_signal(signal.SIGINT)

    lines = run_command(tmp_path, "serve", "--port", "0", "--model", "echo", meanwhile=ask).stdout.splitlines()
    answered, unknown, invalid, missing = (line for line in lines if "127.0.0.1  " in line)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  127\.0\.0\.1  POST /v1/chat/completions  echo  \d+ tokens in, \d+ out  "
        r"first token in \d+\.\d\d s  [\d.]+ tok/s  stop",
        answered,
    )
    assert "404 Not Found  model-not-found" in unknown
    assert invalid.endswith("POST /v1/chat/completions  400 Bad Request")
    assert missing.endswith("GET /nowhere  404 Not Found")
    quiet = run_command(tmp_path, "serve", "--port", "0", "--model", "echo", "--quiet", meanwhile=ask).stdout
    assert "tok/s" not in quiet


def test_a_load_is_announced_before_it_begins_and_its_duration_is_shown(starter_home):
    stop = signal_at("LMX Lab is ready at ", signal.SIGTERM)
    ended = run_command(starter_home, "serve", "--port", "0", "--model", "smollm2-135m", meanwhile=stop)
    assert (ended.status, ended.stderr) == (0, "")
    first, second, third, *_ = ended.stdout.splitlines()
    assert first == "loading smollm2-135m"
    assert second.startswith("smollm2-135m loaded in ")
    assert "loaded in 0.0 s" not in second
    assert re.search(r"; started in \d+\.\d s\)$", third)


def test_sigterm_during_a_load_ends_with_zero(starter_home):
    stop = signal_at("loading smollm2-135m", signal.SIGTERM)
    ended = run_command(starter_home, "serve", "--port", "0", "--model", "smollm2-135m", meanwhile=stop)
    assert (ended.status, ended.stderr) == (0, "")


def test_a_server_for_the_lan_prints_its_addresses(tmp_path):
    from lmx_lab.notebook.addresses import lan_addresses

    def look(server):
        server.wait_for("no model is loaded yet")
        assert all(f"on the LAN at http://{address}:{server.port}\n" in server.output for address in lan_addresses())
        assert status(server.port, "/healthz") == 200
        server.send_signal(signal.SIGTERM)

    ended = run_command(tmp_path, "serve", "--port", "0", "--host", "0.0.0.0", meanwhile=look)
    assert (ended.status, ended.stderr) == (0, "")
    assert "phones" not in ended.stdout, "a QR code in a file"


def test_a_terminal_shows_the_qr_code_of_the_chat_page(tmp_path, monkeypatch):
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: ["192.0.2.5"])

    def look(server):
        server.wait_for("the chat page for phones:\r\n")
        code = qr_half_blocks(f"http://192.0.2.5:{server.port}").splitlines()
        assert server.wait_for("no model is loaded yet").splitlines() == code
        server.send_signal(signal.SIGTERM)

    ended = run_command(tmp_path, "serve", "--port", "0", "--host", "0.0.0.0", meanwhile=look, terminal=True)
    assert ended.status == 0


def test_a_name_without_an_announcement_is_refused(tmp_path):
    ended = run_command(tmp_path, "serve", "--announce-name", "kitchen")
    assert (ended.status, ended.stdout) == (2, "")
    assert "'kitchen', but announce is not set; add announce=True or --announce" in ended.stderr


@pytest.mark.slow
def test_a_taken_port_that_was_requested_is_one_line_and_exit_status_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = run_command(tmp_path, "serve", "--port", str(other.getsockname()[1]))
    assert (ended.status, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert ended.stderr.startswith("port-taken: port ")


def test_a_taken_default_port_is_replaced_by_the_next_free_one(tmp_path):
    def look(server):
        server.wait_for("port 8400 is in use")
        assert server.port > 8400
        assert status(server.port, "/healthz") == 200
        server.send_signal(signal.SIGTERM)

    with contextlib.ExitStack() as stack:
        # If this fails, another program has the port, which has the same effect.
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", 8400)))
        ended = run_command(tmp_path, "serve", meanwhile=look)
    assert (ended.status, ended.stderr) == (0, "")


def test_a_key_and_an_origin_are_checked(tmp_path):
    def ask(server):
        port = server.port
        assert status(port, "/v1/models") == 401
        assert status(port, "/v1/models", authorization="Bearer secret") == 200
        assert status(port, "/v1/models", authorization="Bearer secret", origin="http://evil.example") == 403
        allowed = {"authorization": "Bearer secret", "origin": "http://localhost:3000"}
        with request(port, "GET", "/v1/models", **allowed) as response:
            assert (response.status, response.headers["access-control-allow-origin"]) == (200, allowed["origin"])
        server.send_signal(signal.SIGTERM)

    arguments = ("--api-key", "secret", "--cors-origin", "http://localhost:3000")
    ended = run_command(tmp_path, "serve", "--port", "0", *arguments, meanwhile=ask)
    assert (ended.status, ended.stderr) == (0, "")


def test_a_model_that_the_chosen_engine_does_not_run_ends_the_start(tmp_path):
    ended = run_command(tmp_path, "serve", "--port", "0", "--model", "echo", "--engine", "llama.cpp")
    assert ended.status == 1
    assert "runs on echo and not on llama.cpp" in ended.stderr
    ended = run_command(tmp_path, "serve", "--port", "0", "--model", "echo", "--context-length", "2000000")
    assert (ended.status, "context_length is 2000000; echo takes 1 to 1048576" in ended.stderr) == (1, True)
    ended = run_command(tmp_path, "serve", "--engine", "mlx")
    assert (ended.status, "--engine is given without --model" in ended.stderr) == (2, True)


def test_with_swap_the_server_loads_the_model_that_a_request_names(tiny_home):
    def ask(server):
        with request(server.port, "POST", CHAT, chat("tiny", "hi", max_tokens=2)) as response:
            assert (response.status, json.load(response)["model"]) == (200, "tiny")
        server.send_signal(signal.SIGTERM)

    flags = ("--swap", "--ttl", "600", "--parallel", "2", "--prefix-cache", "0.01")
    ended = run_command(tiny_home, "serve", "--port", "0", "--model", "echo", *flags, meanwhile=ask)
    assert (ended.status, ended.stderr) == (0, "")
