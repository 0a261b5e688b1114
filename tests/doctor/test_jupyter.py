"""Tests of the checks for the kernels of notebooks and for jupyter-server-proxy."""

import contextlib
import json
import subprocess
import sys
import threading
import venv

import psutil
import pytest

from lmx_lab.doctor.jupyter import check_kernel, check_proxy
from lmx_lab.settings import Settings
from tests.doctor.findings import EXPLAINED_FAULT, EXPLAINED_NOTE, finding_about, summary
from tests.support.commands import WAIT_S
from tests.support.waiting import until_listening


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


@contextlib.contextmanager
def jupyter_server(folder, *, proxy):
    """Run a real Jupyter server, which writes its address into ``JUPYTER_RUNTIME_DIR``."""
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
            until_listening(json.loads(written.read_text())["port"])
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


@pytest.mark.long
@pytest.mark.parametrize("proxy", [True, False])
def test_a_running_jupyter_server_is_checked_for_the_proxy(tmp_path, monkeypatch, proxy):
    for name in ("RUNTIME", "CONFIG", "DATA"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    with jupyter_server(tmp_path, proxy=proxy) as server:
        (finding,) = check_proxy(Settings(), answer_s=WAIT_S)
        assert f"(process {server.pid})" in finding.found
        assert finding.verdict == ("fine" if proxy else "note")
        if not proxy:
            assert summary(finding) == EXPLAINED_NOTE, finding.found
            assert f"{sys.executable} -m pip install jupyter-server-proxy" in finding.remedy
            # On JupyterHub the lab cannot be reached without it.
            monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/you/")
            assert [each.verdict for each in check_proxy(Settings(), answer_s=WAIT_S)] == ["bad"]
