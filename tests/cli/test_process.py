"""Tests of signals, which end ``lmx-lab serve`` and ``lmx-lab daemon`` in a few seconds, and of freed memory."""

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.commands import WAIT_S, serving

END_S = 20.0
"""The documentation promises 5 s, but this machine may be busy."""
HANG = """
import os, sys, threading
def hang(what):
    def hanging(*args, **options):
        print("hangs:", what, flush=True)
        threading.Event().wait()
    return hanging
"""
NOTHING_ANSWERS = """
import lmx_lab.weights.catalog, lmx_lab.weights.scanner
lmx_lab.weights.scanner.read_entry = hang("scan")
lmx_lab.weights.catalog.fetch_starter = hang("download")
"""
MLX_HANGS = """
import lmx_lab.engine.mlx.engine
lmx_lab.engine.mlx.engine.load_chat = hang("load")
"""
STEP_HANGS = """
from lmx_lab.engine.mlx.loop import GenerationLoop
step = GenerationLoop.step
def stepping(self, **turn):
    if self.idle:
        step(self, **turn)
    else:
        hang("prefill")()
GenerationLoop.step = stepping
"""
GGUF_HANGS = """
import pathlib
import lmx_lab.engine.llama_cpp.process as process
process.SCRIPT = pathlib.Path(os.environ["STILL"])
"""
STILL = "import sys; sys.stdin.readline(); open(__file__ + '.begun', 'w').close(); sys.stdin.read()"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
LONG = CHAT | {"max_tokens": 1_500, "stream": True}


@contextlib.contextmanager
def hanging(home, code, *arguments):
    """Run ``lmx-lab serve`` with code that lets something hang."""
    program = f"{HANG}{code}\ndel sys.argv[1]\nfrom lmx_lab.cli import main\nmain()\n"
    with serving(home, "--port", "0", *arguments, before=[sys.executable, "-c", program]) as server:
        yield server


class Request:
    """A request whose response is read only on demand."""

    def __init__(self, port, method, path, body=None):
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def until(self, text, wait_s=WAIT_S):
        self._socket.settimeout(wait_s)
        seen = b""
        while text not in seen:
            piece = self._socket.recv(1024)
            assert piece, seen
            seen += piece

    def rest(self):
        pieces = []
        with contextlib.suppress(ConnectionError):
            while piece := self._socket.recv(65536):
                pieces.append(piece)
        return b"".join(pieces)

    def close(self):
        self._socket.close()


@pytest.fixture
def ask():
    with contextlib.ExitStack() as stack:
        yield lambda *args: stack.enter_context(contextlib.closing(Request(*args)))


def stop(server, number):
    """Send a signal; return the exit status and the text on standard error."""
    server.process.send_signal(number)
    return wait(server)


def wait(server):
    return server.process.wait(END_S), server.process.stderr.read()


@pytest.mark.long
@pytest.mark.slow
def test_a_disk_and_a_download_that_hang_delay_neither_requests_nor_the_end(tmp_path, ask):
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.json").write_text("{}")
    with hanging(tmp_path, NOTHING_ANSWERS) as server:
        port = server.port
        ask(port, "GET", "/admin/events").until(b"data:")
        lists = [ask(port, "GET", route) for route in ("/v1/models", "/admin/models") * 20]
        load = ask(port, "POST", "/admin/models/load", {"model": "smollm2-135m"})
        for each in lists:
            each.until(b"has not been read within")
        server.wait_for("hangs: scan")
        server.wait_for("hangs: download")
        ask(port, "POST", "/v1/chat/completions", CHAT).until(b"no-model-loaded")
        status, stderr = stop(server, signal.SIGTERM)
        assert (status, "Traceback" in stderr) == (0, False)
        assert b"was cancelled" in load.rest()


@pytest.mark.long
@pytest.mark.slow
def test_a_load_on_mlx_that_hangs_does_not_delay_the_end(tiny_home, ask):
    with hanging(tiny_home, MLX_HANGS) as server:
        load = ask(server.port, "POST", "/admin/models/load", {"model": "tiny"})
        server.wait_for("hangs: load")
        status, stderr = stop(server, signal.SIGTERM)
        assert (status, "did not end in time" in stderr, "Traceback" in stderr) == (0, False, False)
        assert b"was cancelled" in load.rest()


@pytest.mark.slow
def test_a_load_on_llama_cpp_that_hangs_does_not_delay_the_end(tiny_home, tiny_gguf, tmp_path, *, ask, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(STILL)
    monkeypatch.setenv("STILL", str(script))
    with hanging(tiny_home, GGUF_HANGS) as server:
        load = ask(server.port, "POST", "/admin/models/load", {"model": str(tiny_gguf)})
        begun = Path(f"{script}.begun")
        while not begun.exists():
            assert server.process.poll() is None
        children = psutil.Process(server.process.pid).children(recursive=True)
        status, stderr = stop(server, signal.SIGINT)
        assert (status, "Traceback" in stderr) == (0, False)
        assert b"cancelled" in load.rest()
        assert psutil.wait_procs(children, timeout=END_S)[1] == []


@pytest.mark.long
@pytest.mark.slow
def test_clients_that_do_not_read_and_a_waiting_unload_do_not_delay_the_end(tmp_path, ask, monkeypatch):
    # Slow enough that the answers are not complete before the signal.
    monkeypatch.setenv("LMX_LAB_ECHO_TOKENS_PER_S", "50")
    long, chat = LONG | {"model": "echo"}, CHAT | {"model": "echo"}
    with serving(tmp_path, "--port", "0", "--model", "echo", "--slots", "2") as server:
        port = server.port
        reader, other = ask(port, "POST", "/v1/chat/completions", long), ask(port, "POST", "/v1/chat/completions", long)
        reader.until(b"data:")
        waits = ask(port, "POST", "/v1/chat/completions", long)
        unload = ask(port, "POST", "/admin/models/unload")
        # A chat that the server reads before the unload only waits for a slot.
        while True:
            with contextlib.suppress(TimeoutError):
                ask(port, "POST", "/v1/chat/completions", chat).until(b"being unloaded", wait_s=0.5)
                break
        server.process.send_signal(signal.SIGTERM)
        assert b'data: {"error"' in reader.rest()
        status, stderr = wait(server)
        assert (status, "Traceback" in stderr) == (0, False)
        assert b"no-model-loaded" in waits.rest()
        del other, unload


@pytest.mark.long
@pytest.mark.slow
def test_a_second_signal_ends_a_server_whose_step_hangs_at_once(tiny_home, ask):
    with hanging(tiny_home, STEP_HANGS, "--model", "tiny") as server:
        ask(server.port, "POST", "/v1/chat/completions", LONG)
        server.wait_for("hangs: prefill")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping")
        assert stop(server, signal.SIGINT) == (-signal.SIGINT, "")


# --- freed memory

MAPPED_BLOCKS = """
import ctypes, sys
from lmx_lab.heap import return_large_blocks

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
return_large_blocks()
libc.free(libc.malloc(20 * 2**20))
before = libc.mallinfo2().hblks
libc.malloc(int(sys.argv[1]))
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these thresholds")
@pytest.mark.parametrize(
    ("environ", "size", "mapped"),
    [
        ({}, 2**21, 1),
        ({}, 2**19, 0),
        ({"MALLOC_MMAP_THRESHOLD_": str(2**22)}, 2**21, 0),
        ({"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**22}"}, 2**21, 0),
        # Setting the other threshold fixes this one at glibc's default of 128 KiB.
        ({"MALLOC_TRIM_THRESHOLD_": str(2**22)}, 2**19, 1),
        ({"GLIBC_TUNABLES": f"glibc.malloc.trim_threshold={2**22}"}, 2**19, 1),
    ],
    ids=str,
)
def test_large_blocks_are_returned_to_the_system_unless_the_environment_sets_a_threshold(environ, size, mapped):
    command = [sys.executable, "-c", MAPPED_BLOCKS, str(size)]
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, env=unset | environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{mapped}\n", "")
