"""Tests of ``lmx-lab doctor`` as a whole, and of its checks of the machine, the models, the ports and the daemon."""

import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import huggingface_hub.constants
import mlx.core as mx
import pytest

from lmx_lab import doctor
from lmx_lab.doctor import compute, models
from lmx_lab.doctor.daemon_files import check_daemon_files
from lmx_lab.doctor.machine import check_disk, check_python
from lmx_lab.doctor.models import check_hub, check_models, find_connection_problem
from lmx_lab.doctor.ports import check_labs, check_port
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.notebook import Lab
from lmx_lab.settings import Settings
from tests.doctor.findings import EXPLAINED_FAULT, EXPLAINED_NOTE, finding_about, summary
from tests.support.commands import WAIT_S, environment, run_command, serving
from tests.support.daemons import serving as daemon_serving
from tests.support.labs import serving as lab_serving
from tests.support.sockets import free_port
from tests.support.waiting import until_listening


def test_every_problem_is_one_line_with_a_remedy_and_a_fault_is_exit_status_one(tmp_path, monkeypatch):
    """The machine has no model, a taken port, a hub that does not answer and a slow BLAS."""
    # huggingface_hub reads HF_ENDPOINT only once, when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environ = {
            "LMX_LAB_PORT": str(taken.getsockname()[1]),
            "LMX_LAB_BLAS": "off",
        }
        result = run_command(tmp_path, "doctor", environ=environ)
    assert (result.status, result.stderr) == (1, "")
    lines = {line[5:].partition(":")[0]: line for line in result.stdout.splitlines()}
    assert lines["port"].startswith("bad  port: 127.0.0.1:")
    assert f"process {os.getpid()}" in lines["port"]
    assert lines["blas"].endswith("; MLX models run ten times slower than this machine allows; fix: unset LMX_LAB_BLAS")
    assert lines["models"].endswith("fix: lmx-lab pull smollm2-135m")
    assert "cannot be reached from here (Connection refused)" in lines["hub"]
    assert [topic for topic, line in lines.items() if line.startswith("bad")] == ["port"]


def test_a_check_that_cannot_be_imported_is_a_finding_and_the_others_run(tmp_path):
    names = {topic: doctor.CHECKS[topic] for topic in (*doctor.WAITING, "daemon")}
    names |= {"device": "no_such_package:check", "engines": "no_such_package:f"}
    findings = doctor.run_checks(Settings(home=tmp_path), measure=True, names=names)
    for topic in ("device", "engines"):
        finding = finding_about(topic, findings)
        assert (finding.verdict, finding.found) == ("bad", "No module named 'no_such_package'")
    assert finding_about("daemon", findings).verdict == "fine"


def test_an_error_in_a_check_is_a_finding_and_the_others_run(tmp_path, monkeypatch):
    def fail(_):
        raise OSError("the disk failed")

    names = {topic: doctor.CHECKS[topic] for topic in (*doctor.WAITING, "models", "engines")}
    monkeypatch.setattr(models, "Catalog", fail)
    finding = finding_about("models", doctor.run_checks(Settings(home=tmp_path), names=names))
    assert (finding.verdict, finding.found) == ("bad", "the disk failed")


# What MLX computes with


def test_the_device_is_a_fault_if_mlx_cpu_has_replaced_the_library_for_gpus(monkeypatch):
    (usual,) = compute.check_device(Settings())
    assert usual.verdict == ("note" if mx.default_device() == mx.cpu else "fine")
    monkeypatch.setattr(compute, "replaced_cuda_package", lambda: "mlx-cuda-13==0.32.4")
    (fault,) = compute.check_device(Settings())
    assert (fault.verdict, fault.found) == ("bad", f"{usual.found}, although mlx-cuda-13==0.32.4 is installed")
    assert fault.remedy == "pip install --force-reinstall --no-deps mlx-cuda-13==0.32.4"


# Python and the disk


MOUNT = "mount -t tmpfs -o size=16m none {folder} && exec {python} -c '{script}'"
CHECK_DISK = """
import json
from dataclasses import asdict
from lmx_lab.doctor.machine import check_disk
from lmx_lab.settings import Settings
print(json.dumps([asdict(finding) for finding in check_disk(Settings.read())]))
"""


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10, 14), "bad"), ((3, 11, 0), "fine"), ((3, 13, 9), "fine"), ((3, 15, 0), "note")]
)
def test_a_python_version_that_is_not_tested_is_reported(version, verdict):
    finding = check_python(version)
    assert summary(finding) == (verdict, verdict != "fine", verdict != "fine")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can mount a small disk")
def test_a_disk_without_room_for_a_model_is_bad(tmp_path):
    command = MOUNT.format(folder=tmp_path, python=sys.executable, script=CHECK_DISK)
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


def test_a_disk_reserve_that_leaves_no_room_for_a_model_is_bad(tmp_path):
    finding = finding_about("disk", check_disk(Settings(home=tmp_path, disk_reserve_bytes=2**50)))
    assert summary(finding) == EXPLAINED_FAULT


# The daemon's folder


@pytest.fixture
def daemon(tmp_path):
    with daemon_serving(tmp_path) as daemon:
        yield daemon


def test_a_token_that_other_users_can_read_is_bad(daemon):
    assert [finding.verdict for finding in check_daemon_files(daemon.settings)] == ["fine"]
    state = daemon.folder / "state.json"
    state.chmod(0o644)
    daemon.folder.chmod(0o755)
    folder, file = check_daemon_files(daemon.settings)
    assert {summary(folder), summary(file)} == {EXPLAINED_FAULT}
    assert (folder.remedy, file.remedy.partition(",")[0]) == (f"chmod 700 {daemon.folder}", f"chmod 600 {state}")
    assert daemon.token not in file.text


def test_an_invalid_state_file_is_bad(tmp_path):
    folder = tmp_path / "daemon"
    folder.mkdir(mode=0o700)
    assert finding_about("daemon", check_daemon_files(Settings(home=tmp_path))).found == "no daemon is running"
    (folder / "state.json").touch(mode=0o600)
    finding = finding_about("daemon", check_daemon_files(Settings(home=tmp_path)))
    assert summary(finding) == EXPLAINED_FAULT
    assert finding.remedy == f"rm {folder / 'state.json'}"


# Models and the hub


def test_without_a_model_the_remedy_is_the_command_that_downloads_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    finding = finding_about("models", check_models(Settings(home=tmp_path)))
    assert summary(finding) == EXPLAINED_NOTE
    assert finding.remedy == "lmx-lab pull smollm2-135m"


def test_a_missing_model_folder_is_bad(tmp_path):
    finding = next(check_models(Settings(home=tmp_path, model_folders=(tmp_path / "no where",))))
    assert finding.verdict == "bad"
    assert f"{tmp_path}/no where" in finding.found
    assert f"mkdir -p '{tmp_path}/no where'" in finding.remedy


def test_the_hub_is_not_contacted_if_the_environment_or_a_setting_forbids_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = finding_about("hub", check_hub(Settings(home=tmp_path)))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    off = finding_about("hub", check_hub(Settings(home=tmp_path, downloads=False)))
    assert (summary(offline), offline.remedy) == (EXPLAINED_NOTE, "unset HF_HUB_OFFLINE")
    assert (summary(off), off.remedy) == (EXPLAINED_NOTE, "unset LMX_LAB_DOWNLOADS")


class HubHandler(http.server.BaseHTTPRequestHandler):
    """Answer with the status in the path of the request."""

    def do_HEAD(self):
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_hub_that_answers_is_reachable_and_a_gateway_error_is_a_problem():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_port}"
        problems = [find_connection_problem(f"{url}/{status}", 20.0) for status in (200, 401, 404, 502)]
        assert problems == [None] * 3 + ["status 502"]
        hub.shutdown()


def test_a_hub_that_does_not_answer_is_a_problem_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert find_connection_problem(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        assert time.monotonic() - began < 10


# The port of a lab and running labs


LISTEN = """import http.server, sys
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()"""


def test_the_program_that_took_the_port_is_named():
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", LISTEN, str(port)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        until_listening(port)
        finding = finding_about("port", check_port(Settings(port=port)))
        holder.kill()
    assert summary(finding) == EXPLAINED_NOTE
    assert f"127.0.0.1:{port} is taken by process {holder.pid}: " in finding.found
    assert "kill" not in finding.remedy


def test_two_labs_of_this_home_are_listed_with_addresses_and_processes(tiny_home):
    with lab_serving(tiny_home, None) as one:
        near = bind("127.0.0.1", one.server.port + 1, explicit=False)
        port = near.getsockname()[1]
        near.close()
        only = finding_about("labs", check_labs(Settings(port=one.server.port)))
        assert f"{one.url} (process {os.getpid()}" in only.found
        assert finding_about("port", check_port(Settings(port=one.server.port))).verdict == "fine"
        with Lab(Settings(home=tiny_home, port=port), loop="thread") as other:
            other.start()
            finding = finding_about("labs", check_labs(Settings(port=one.server.port)))
            for lab in (one, other):
                assert f"{lab.url} (process {os.getpid()}: " in finding.found
            assert "kill" not in finding.remedy
            elsewhere = finding_about("labs", check_labs(Settings(port=one.server.port, home=tiny_home / "other")))
            assert elsewhere.found == "no lab of this home is running"
    assert summary(finding) == EXPLAINED_NOTE


@pytest.mark.parametrize("spelling", ["{home}/", "{home}/link", "."], ids=["slash", "link", "relative"])
def test_a_lab_is_counted_however_its_home_is_spelled(spelling, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    home = f"LMX_LAB_HOME={spelling.format(home=tmp_path)}"
    with serving(tmp_path, "--port", "0", before=("env", home)) as server:
        (finding,) = check_labs(Settings(home=tmp_path, port=server.port))
        assert finding.found.startswith(f"one lab is running, http://127.0.0.1:{server.port} ")
