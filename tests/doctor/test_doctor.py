"""Tests of ``lmx-lab doctor`` and of its checks of the machine, the models, the ports, the daemon and Jupyter."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import venv

import huggingface_hub.constants
import mlx.core as mx
import pytest

from lmx_lab import doctor
from lmx_lab.doctor import compute, models
from lmx_lab.doctor.daemon_files import check_daemon_files
from lmx_lab.doctor.jupyter import check_kernel, check_proxy
from lmx_lab.doctor.machine import check_disk, check_python
from lmx_lab.doctor.models import check_hub, check_models, find_connection_problem
from lmx_lab.doctor.ports import check_labs, check_port
from lmx_lab.notebook.lab import Lab
from lmx_lab.running import running_labs
from lmx_lab.settings import Settings
from tests.support.commands import WAIT_S, run_command, serving
from tests.support.daemons import serving as daemon_serving
from tests.support.gguf import with_values
from tests.support.jupyter import jupyter_server
from tests.support.labs import serving as lab_serving
from tests.support.sockets import answering, free_port, whole
from tests.support.waiting import until, until_listening

EXPLAINED_NOTE = ("note", True, True)
EXPLAINED_FAULT = ("bad", True, True)


def finding_about(topic, findings):
    """Return the only finding with this topic."""
    (finding,) = [finding for finding in findings if finding.topic == topic]
    return finding


def summary(finding):
    """Return the verdict, whether the finding explains the consequence, and whether it has a remedy."""
    return finding.verdict, bool(finding.means), bool(finding.remedy)


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


def test_a_check_that_fails_is_a_finding_and_the_others_run(tmp_path, monkeypatch):
    def fail(_):
        raise OSError("the disk failed")

    monkeypatch.setattr(models, "Catalog", fail)
    names = {topic: doctor.CHECKS[topic] for topic in (*doctor.WAITING, "models", "daemon")}
    names |= {"device": "no_such_package:check", "engines": "no_such_package:f"}
    findings = doctor.run_checks(Settings(home=tmp_path), measure=True, names=names)
    for topic, reason in (
        ("device", "No module named 'no_such_package'"),
        ("engines", "No module named 'no_such_package'"),
        ("models", "the disk failed"),
    ):
        finding = finding_about(topic, findings)
        assert (finding.verdict, finding.found) == ("bad", reason)
    assert finding_about("daemon", findings).verdict == "fine"


# What MLX computes with


def test_the_device_is_a_fault_if_mlx_cpu_has_replaced_the_library_for_gpus(monkeypatch):
    (usual,) = compute.check_device(Settings())
    assert usual.verdict == ("note" if mx.default_device() == mx.cpu else "fine")
    monkeypatch.setattr(compute, "replaced_cuda_package", lambda: "mlx-cuda-13==0.32.4")
    (fault,) = compute.check_device(Settings())
    assert (fault.verdict, fault.found) == ("bad", f"{usual.found}, although mlx-cuda-13==0.32.4 is installed")
    assert fault.remedy == "pip install --force-reinstall --no-deps mlx-cuda-13==0.32.4"


# Python and the disk


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10, 14), "bad"), ((3, 11, 0), "fine"), ((3, 13, 9), "fine"), ((3, 15, 0), "note")]
)
def test_a_python_version_that_is_not_tested_is_reported(version, verdict):
    finding = check_python(version)
    assert summary(finding) == (verdict, verdict != "fine", verdict != "fine")


def test_a_disk_without_room_for_a_model_is_bad(tmp_path):
    finding = finding_about("disk", check_disk(Settings(home=tmp_path, disk_reserve_bytes=2**50)))
    assert summary(finding) == EXPLAINED_FAULT
    assert re.fullmatch(rf"[\d.]+ GB free for {tmp_path}", finding.found)
    assert "not even the smallest starter" in finding.means
    assert "LMX_LAB_HOME" in finding.remedy


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


def test_a_missing_model_folder_is_bad(tmp_path):
    finding = next(check_models(Settings(home=tmp_path, model_folders=(tmp_path / "no where",))))
    assert finding.verdict == "bad"
    assert f"{tmp_path}/no where" in finding.found
    assert f"mkdir -p '{tmp_path}/no where'" in finding.remedy


def test_what_is_wrong_with_models_that_can_be_loaded_is_noted(tmp_path, tiny, tiny_gguf):
    settings = Settings(home=tmp_path)
    shutil.copytree(tiny.path, settings.models_folder / "tuned")
    (settings.models_folder / "tuned/adapters").mkdir()
    (settings.models_folder / "tuned/adapters/adapter_config.json").write_text("{}")
    with_values(tiny_gguf, settings.models_folder / "old.gguf", {"tokenizer.ggml.pre": None})
    old, tuned, listed = check_models(settings)
    assert (old.verdict, tuned.verdict, listed.found) == ("note", "note", "old.gguf, tuned")
    assert "(tokenizer.ggml.pre)" in old.found
    assert "the LoRA adapter beside the weights (in adapters) is not applied" in tuned.found


def test_the_hub_is_not_contacted_if_the_environment_or_a_setting_forbids_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = finding_about("hub", check_hub(Settings(home=tmp_path)))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    off = finding_about("hub", check_hub(Settings(home=tmp_path, downloads=False)))
    assert (summary(offline), offline.remedy) == (EXPLAINED_NOTE, "unset HF_HUB_OFFLINE")
    assert (summary(off), off.remedy) == (EXPLAINED_NOTE, "unset LMX_LAB_DOWNLOADS")


@pytest.mark.parametrize(
    ("status", "problem"),
    [("200 OK", None), ("401 No", None), ("404 No", None), ("502 Bad Gateway", "status 502")],
)
def test_a_hub_that_answers_is_reachable_and_a_gateway_error_is_a_problem(status, problem):
    with answering(whole("", status=status)) as hub:
        assert find_connection_problem(hub.url, 20.0) == problem


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
        only = finding_about("labs", check_labs(Settings(home=tiny_home)))
        assert f"{one.url} (process {os.getpid()}" in only.found
        assert finding_about("port", check_port(Settings(port=one.server.port))).verdict == "fine"
        with Lab(Settings(home=tiny_home, port=0), loop="thread") as other:
            other.start()
            finding = finding_about("labs", check_labs(Settings(home=tiny_home)))
            for lab in (one, other):
                assert f"{lab.url} (process {os.getpid()}: " in finding.found
            assert "kill" not in finding.remedy
            elsewhere = finding_about("labs", check_labs(Settings(home=tiny_home / "other")))
            assert elsewhere.found == "no lab of this home is running"
    assert summary(finding) == EXPLAINED_NOTE


def test_the_command_is_found_on_any_port(tmp_path):
    command = [sys.executable, "-m", "lmx_lab", "serve", "--model", "echo", "--port", "0"]
    with subprocess.Popen(
        command, env={**os.environ, "LMX_LAB_HOME": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            ready = next(line for line in process.stdout if "is ready at" in line)
            finding = finding_about("labs", check_labs(Settings(home=tmp_path)))
            assert f"(process {process.pid}: " in finding.found
            assert finding.found.split()[4] in ready
        finally:
            process.kill()


@pytest.mark.parametrize("spelling", ["{home}/", "{home}/link", "."], ids=["slash", "link", "relative"])
def test_a_lab_is_counted_however_its_home_is_spelled(spelling, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    home = f"LMX_LAB_HOME={spelling.format(home=tmp_path)}"
    with serving(tmp_path, "--port", "0", before=("env", home)) as server:
        # The port listens before the lab is recorded.
        until(lambda: running_labs(tmp_path))
        (finding,) = check_labs(Settings(home=tmp_path))
        assert finding.found.startswith(f"one lab is running, http://127.0.0.1:{server.port} ")


# Kernels of notebooks and jupyter-server-proxy


@pytest.fixture
def kernel_file(tmp_path, monkeypatch):
    """The kernel specification that Jupyter finds before all others."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    return folder / "kernel.json"


def specification(python):
    return json.dumps({"argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "P"})


def test_a_kernel_of_another_python_without_lmx_lab_is_bad(tmp_path, kernel_file):
    other = tmp_path / "other"
    venv.create(other, with_pip=False)
    kernel_file.write_text(specification(f"{other}/bin/python"))
    (finding,) = check_kernel(Settings())
    assert (finding.topic, summary(finding)) == ("kernel", EXPLAINED_FAULT)
    assert f"new notebooks run {other}/bin/python" in finding.found
    assert sys.executable in finding.found
    assert "-m ipykernel install --user --name python3" in finding.remedy


@pytest.mark.parametrize(
    ("content", "found"),
    [(specification("/no/such/python"), "starts /no/such/python, which does not run"), ("{}", "names no program")],
)
def test_a_kernel_that_cannot_start_is_bad(kernel_file, content, found):
    kernel_file.write_text(content)
    (finding,) = check_kernel(Settings())
    assert (finding.topic, summary(finding)) == ("kernel", EXPLAINED_FAULT)
    assert f"{kernel_file} {found}" in finding.found


@pytest.mark.parametrize("python", ["python", sys.executable])
def test_a_kernel_of_this_python_is_fine(kernel_file, python):
    kernel_file.write_text(specification(python))
    findings = [(each.topic, each.verdict) for each in check_kernel(Settings())]
    assert findings == [("kernel", "fine"), ("ipykernel", "fine")]


def test_an_ipykernel_that_is_too_old_is_bad(tmp_path, monkeypatch):
    """Its metadata comes first on the path, before that of the installed version."""
    old = tmp_path / "ipykernel-6.29.5.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: ipykernel\nVersion: 6.29.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    finding = finding_about("ipykernel", check_kernel(Settings()))
    assert summary(finding) == EXPLAINED_FAULT
    assert "6.29.5" in finding.found
    assert "-m pip install -U 'ipykernel>=7" in finding.remedy


@pytest.mark.long
@pytest.mark.parametrize("proxy", [True, False])
def test_a_running_jupyter_server_is_checked_for_the_proxy(tmp_path, monkeypatch, proxy):
    for name in ("RUNTIME", "CONFIG", "DATA"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    extensions = {"jupyter_server_proxy": proxy, "jupyterlab": False, "jupyter_lsp": False}
    options = [f"--ServerApp.jpserver_extensions={name}={enabled}" for name, enabled in extensions.items()]
    options += [f"--ServerApp.root_dir={tmp_path}", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    with jupyter_server(tmp_path, *options, "--ServerApp.terminals_enabled=False") as server:
        (finding,) = check_proxy(Settings(), answer_s=WAIT_S)
        assert f"(process {server.pid})" in finding.found
        assert finding.verdict == ("fine" if proxy else "note")
        if not proxy:
            assert summary(finding) == EXPLAINED_NOTE, finding.found
            assert f"{sys.executable} -m pip install jupyter-server-proxy" in finding.remedy
            # On JupyterHub the lab cannot be reached without it.
            monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/you/")
            assert [each.verdict for each in check_proxy(Settings(), answer_s=WAIT_S)] == ["bad"]
