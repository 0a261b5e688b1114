"""A sandbox process starts on demand, answers requests, and ends at its limits or with its parent."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from lmx_lab.engine.sandbox_process import (
    SandboxDiedError,
    SandboxProcess,
    SandboxSendError,
    SandboxStartError,
    SandboxTimeoutError,
)

WORKER = """
import os, time
MEMORY_BYTES, CPU_S = 2**30, 5

def handle(request):
    match request.partition(b" "):
        case b"sleep", _, seconds:
            time.sleep(float(seconds))
        case b"fill", _, size:
            len(bytearray(int(size)))
        case b"raise", _, _:
            raise ValueError
        case b"environ", _, name:
            return os.environb.get(name, b"-")
    return b"done " + request
"""


@pytest.fixture
def process(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    process = SandboxProcess(tmp_path / "worker.py", lambda: {"ONLY": "this"})
    yield process
    process.close()


def test_requests_are_answered_by_one_process(process):
    assert [process.request(message, 5) for message in (b"a", b"b")] == [b"done a", b"done b"]
    assert process.starts == 1


def test_the_process_has_only_the_given_environment(process):
    assert process.request(b"environ ONLY", 5) == b"this"
    assert process.request(b"environ PATH", 5) == b"-"


def test_a_request_beyond_its_time_limit_ends_the_process(process):
    with pytest.raises(SandboxTimeoutError, match=r"0\.2 s"):
        process.request(b"sleep 60", 0.2)
    assert process.request(b"again", 5) == b"done again"
    assert process.starts == 2


@pytest.mark.parametrize("request_", [b"raise", b"fill 2000000000"])
def test_a_request_that_crashes_the_process_fails(process, request_):
    with pytest.raises(SandboxDiedError):
        process.request(request_, 5)
    assert process.request(b"again", 5) == b"done again"


def test_a_killed_process_is_reported_and_started_again(process):
    process.request(b"a", 5)
    (child,) = (child for child in psutil.Process().children() if str(process._script) in child.cmdline())
    child.kill()
    child.wait()
    with pytest.raises(SandboxSendError):
        process.request(b"b", 5)
    assert process.request(b"c", 5) == b"done c"


def test_waiting_can_be_interrupted(process):
    def interrupt(waited_s):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.request(b"sleep 60", 60, while_waiting=interrupt)
    assert process.request(b"again", 5) == b"done again"


def test_closing_ends_a_running_request(process):
    process.request(b"a", 5)
    closing = threading.Timer(0.2, process.close)
    closing.start()
    started = time.monotonic()
    with pytest.raises(SandboxDiedError):
        process.request(b"sleep 60", 60)
    assert time.monotonic() - started < 30
    closing.join()
    with pytest.raises(SandboxDiedError, match="closed"):
        process.request(b"b", 5)


def test_the_process_ends_when_its_connection_is_closed(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    process = SandboxProcess(tmp_path / "worker.py", lambda: os.environ)
    assert process.request(b"a", 5) == b"done a"
    process.start().close()
    assert process._process.wait(30) == 0
    process.close()


def test_a_worker_that_cannot_be_loaded_is_a_start_error(tmp_path):
    (tmp_path / "worker.py").write_text("import there_is_no_such_module")
    process = SandboxProcess(tmp_path / "worker.py", lambda: {})
    with pytest.raises(SandboxStartError, match="ended immediately"):
        process.request(b"a", 5)


@pytest.mark.slow
def test_the_process_ends_with_its_parent_during_a_request(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    program = f"""
    import os
    from pathlib import Path
    from lmx_lab.engine.sandbox_process import SandboxProcess

    process = SandboxProcess(Path({str(tmp_path / "worker.py")!r}), lambda: os.environ)
    process.start()
    print(process._process.pid, flush=True)
    process.request(b"sleep 60", 60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=os.environ, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=30)
