"""The ten most likely problems, each really there: ``lmx-lab doctor`` names it, and the command that mends it."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import psutil
import pytest

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.doctor import Finding, jupyter
from lmx_lab.doctor.daemon_files import examine_daemon_files
from lmx_lab.doctor.finding import Verdict
from lmx_lab.doctor.jupyter import examine_kernel, examine_proxy
from lmx_lab.doctor.machine import examine_disk, python_finding
from lmx_lab.doctor.ports import examine_labs, examine_port
from lmx_lab.doctor.sources import examine_hub, examine_models, unreachable
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.notebook import Lab
from lmx_lab.settings import Settings
from tests.browser.jupyterlab import free_port
from tests.command_line import WAIT_S, environment, run_command
from tests.daemon.running_daemon import serving as daemon_serving
from tests.flows.conftest import serving as lab_serving

KILLED = """import http.server, sys
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()"""
MOUNT = "mount -t tmpfs -o size=16m none {folder} && exec {python} -c '{look}'"
LOOK = """
import json
from dataclasses import asdict
from lmx_lab.doctor.machine import examine_disk
from lmx_lab.settings import Settings
print(json.dumps([asdict(finding) for finding in examine_disk(Settings.read())]))
"""


def of(findings: Iterator[Finding], topic: str) -> Finding:
    """The only one of this topic."""
    (finding,) = [finding for finding in findings if finding.topic == topic]
    return finding


def parts(finding: Finding) -> tuple[Verdict, bool, bool]:
    """Its verdict, and whether it says what it means and what mends it."""
    return finding.verdict, bool(finding.means), bool(finding.remedy)


def test_what_is_broken_is_one_line_with_its_remedy_and_exit_status_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: no model, a port that is taken, a hub that does not answer, a slow BLAS."""
    # Made of HF_ENDPOINT when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environ = {
            "LMX_LAB_PORT": str(taken.getsockname()[1]),
            "LMX_LAB_BLAS": "off",
        }
        plain = run_command(tmp_path, "doctor", environ=environ)
    assert (plain.status, plain.stderr) == (1, "")
    lines = {line[5:].partition(":")[0]: line for line in plain.stdout.splitlines()}
    assert lines["port"].startswith("bad  port: 127.0.0.1:")
    assert f"process {os.getpid()}" in lines["port"]
    assert lines["blas"].endswith(
        "; models on MLX answer ten times slower than this machine could; mend it: unset LMX_LAB_BLAS"
    )
    assert lines["models"].endswith("mend it: lmx-lab pull smollm2-135m")
    assert "cannot be reached from here (Connection refused)" in lines["hub"]
    assert [topic for topic, line in lines.items() if line.startswith("bad")] == ["port"]


def test_no_model_names_the_command_that_fetches_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    finding = of(examine_models(Settings(home=tmp_path)), "models")
    assert parts(finding) == ("note", True, True)
    assert finding.remedy == "lmx-lab pull smollm2-135m"


def test_a_folder_with_models_that_is_not_there_is_named(tmp_path: Path) -> None:
    finding = next(examine_models(Settings(home=tmp_path, model_folders=(tmp_path / "no where",))))
    assert finding.verdict == "bad"
    assert f"{tmp_path}/no where" in finding.found
    assert f"mkdir -p '{tmp_path}/no where'" in finding.remedy


# --- ports


def test_the_program_that_has_the_port_is_named(tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", KILLED, str(port)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        wait_until_taken(port)
        finding = of(examine_port(Settings(port=port)), "port")
        holder.kill()
    assert parts(finding) == ("note", True, True)
    assert f"127.0.0.1:{port} is taken by process {holder.pid}: " in finding.found
    assert f"kill {holder.pid}" in finding.remedy


def wait_until_taken(port: int) -> None:
    pause = threading.Event()
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        pause.wait(0.02)


def test_two_labs_are_named_with_their_addresses_processes_and_homes(tiny_home: Path) -> None:
    with lab_serving(tiny_home, None) as one:
        near = bind("127.0.0.1", one.port + 1, explicit=False)
        port = near.getsockname()[1]
        near.close()
        assert f"{one.url} (process {os.getpid()}" in of(examine_labs(Settings(port=one.port)), "labs").found
        assert of(examine_port(Settings(port=one.port)), "port").verdict == "fine"
        with Lab(Settings(home=tiny_home, port=port), loop="thread") as other:
            other.start()
            finding = of(examine_labs(Settings(port=one.port)), "labs")
            for lab in (one, other):
                assert re.search(rf"{lab.url} \(process {os.getpid()}: .+, home [^)]+\)", finding.found)
    assert parts(finding) == ("note", True, True)


# --- the disk


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can mount a small disk")
def test_a_disk_without_room_for_a_model_is_bad(tmp_path: Path) -> None:
    command = MOUNT.format(folder=tmp_path, python=sys.executable, look=LOOK)
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("this container may not mount anything")
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command],
        capture_output=True, text=True, timeout=WAIT_S, env=environment(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (disk,) = json.loads(done.stdout)
    assert disk["verdict"] == "bad"
    assert disk["found"] == f"0.0 GB free for {tmp_path}"
    assert "not even the smallest starter" in disk["means"]
    assert "LMX_LAB_HOME" in disk["remedy"]


def test_a_reserve_that_leaves_no_room_for_a_model_is_bad(tmp_path: Path) -> None:
    finding = of(examine_disk(Settings(home=tmp_path, disk_reserve_bytes=2**50)), "disk")
    assert parts(finding) == ("bad", True, True)


# --- the daemon's files


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with daemon_serving(tmp_path) as daemon:
        yield daemon


def test_a_token_that_others_may_read_is_bad(daemon: Daemon) -> None:
    assert [finding.verdict for finding in examine_daemon_files(daemon.settings)] == ["fine"]
    state = daemon.folder / "state.json"
    state.chmod(0o644)
    daemon.folder.chmod(0o755)
    folder, file = examine_daemon_files(daemon.settings)
    assert {parts(folder), parts(file)} == {("bad", True, True)}
    assert (folder.remedy, file.remedy.partition(",")[0]) == (f"chmod 700 {daemon.folder}", f"chmod 600 {state}")
    assert daemon.token not in file.text


def test_a_state_file_that_is_none_is_bad(tmp_path: Path) -> None:
    folder = tmp_path / "daemon"
    folder.mkdir(mode=0o700)
    assert of(examine_daemon_files(Settings(home=tmp_path)), "daemon").found == "none runs"
    (folder / "state.json").touch(mode=0o600)
    finding = of(examine_daemon_files(Settings(home=tmp_path)), "daemon")
    assert parts(finding) == ("bad", True, True)
    assert finding.remedy == f"rm {folder / 'state.json'}"


# --- the hub


def test_a_hub_that_is_not_there_or_that_nobody_is_to_ask_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = of(examine_hub(Settings(home=tmp_path)), "hub")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    off = of(examine_hub(Settings(home=tmp_path, downloads=False)), "hub")
    assert (parts(offline), offline.remedy) == (("note", True, True), "unset HF_HUB_OFFLINE")
    assert (parts(off), off.remedy) == (("note", True, True), "unset LMX_LAB_DOWNLOADS")


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_hub_that_answers_is_there_and_one_that_says_nothing_is_given_up_in_time() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_port}"
        assert [unreachable(f"{url}/{status}", 20.0) for status in (200, 401, 404, 502)] == [None] * 3 + ["status 502"]
        hub.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert unreachable(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        assert time.monotonic() - began < 10


# --- Python and its kernels


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10, 14), "bad"), ((3, 11, 0), "fine"), ((3, 13, 9), "fine"), ((3, 15, 0), "note")]
)
def test_a_python_that_was_not_tried_is_told(version: tuple[int, int, int], verdict: str) -> None:
    finding = python_finding(version)
    assert parts(finding) == (verdict, verdict != "fine", verdict != "fine")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what a new notebook's kernel is, before all others."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    return folder / "kernel.json"


def starts(python: str) -> str:
    return json.dumps({"argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "P"})


def test_a_kernel_of_another_python_without_the_lab_is_bad(tmp_path: Path, kernel: Path) -> None:
    other = tmp_path / "other"
    venv.create(other, with_pip=False)
    kernel.write_text(starts(f"{other}/bin/python"))
    (finding,) = examine_kernel(Settings())
    assert (finding.topic, parts(finding)) == ("kernel", ("bad", True, True))
    assert f"new notebooks run {other}/bin/python" in finding.found
    assert sys.executable in finding.found
    assert "-m ipykernel install --user --name python3" in finding.remedy


def test_a_kernel_that_does_not_start_is_bad_and_one_of_this_python_is_fine(kernel: Path) -> None:
    kernel.write_text(starts("/no/such/python"))
    assert [(each.topic, each.verdict) for each in examine_kernel(Settings())] == [("kernel", "bad")]
    for python in ("python", sys.executable):
        kernel.write_text(starts(python))
        both = [(each.topic, each.verdict) for each in examine_kernel(Settings())]
        assert both == [("kernel", "fine"), ("ipykernel", "fine")]


def test_an_ipykernel_that_is_too_old_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its metadata, before that of the one which is installed."""
    old = tmp_path / "ipykernel-6.29.5.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: ipykernel\nVersion: 6.29.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    finding = of(examine_kernel(Settings()), "ipykernel")
    assert parts(finding) == ("bad", True, True)
    assert "6.29.5" in finding.found
    assert "-m pip install -U 'ipykernel>=7" in finding.remedy


# --- the Jupyter server


@contextlib.contextmanager
def jupyter_server(folder: Path, *, proxy: bool) -> Iterator[psutil.Process]:
    """A real one, with or without jupyter-server-proxy; it writes its address into ``JUPYTER_RUNTIME_DIR``."""
    command = [
        *(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}"),
        *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--ServerApp.terminals_enabled=False"),
        f"--ServerApp.jpserver_extensions=jupyter_server_proxy={proxy}",
        *("--ServerApp.jpserver_extensions=jupyterlab=False", "--ServerApp.jpserver_extensions=jupyter_lsp=False"),
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            pause = threading.Event()
            while not list((folder / "runtime").glob(f"jpserver-{process.pid}.json")):
                assert process.poll() is None, (folder / "log").read_text()
                pause.wait(0.05)
            (written,) = (folder / "runtime").glob(f"jpserver-{process.pid}.json")
            wait_until_taken(json.loads(written.read_text())["port"])
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


@pytest.mark.parametrize("proxy", [True, False])
def test_a_jupyter_server_without_the_proxy_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: bool
) -> None:
    for name in ("RUNTIME", "CONFIG", "DATA"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setattr(jupyter, "ANSWER_S", WAIT_S)
    with jupyter_server(tmp_path, proxy=proxy) as server:
        (finding,) = examine_proxy(Settings())
        assert f"(process {server.pid})" in finding.found
        assert finding.verdict == ("fine" if proxy else "note")
        if not proxy:
            assert parts(finding) == ("note", True, True), finding.found
            assert f"{sys.executable} -m pip install jupyter-server-proxy" in finding.remedy
            # On a Hub it is the only way in.
            monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/you/")
            assert [each.verdict for each in examine_proxy(Settings())] == ["bad"]
