"""Tests of the checks for the port of a lab and for running labs."""

import os
import subprocess
import sys

import pytest

from lmx_lab.doctor.ports import check_labs, check_port
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.notebook import Lab
from lmx_lab.settings import Settings
from tests.doctor.findings import EXPLAINED_NOTE, finding_about, summary
from tests.support.commands import serving
from tests.support.labs import serving as lab_serving
from tests.support.sockets import free_port
from tests.support.waiting import until_listening

LISTEN = """import http.server, sys
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()"""


def test_the_program_that_took_the_port_is_named():
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", LISTEN, str(port)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        until_listening(port)
        finding = finding_about("port", check_port(Settings(port=port)))
        holder.kill()
    assert summary(finding) == EXPLAINED_NOTE
    assert f"127.0.0.1:{port} is taken by process {holder.pid}: " in finding.found
    assert "kill" not in finding.remedy


def test_two_labs_of_this_home_are_listed_with_addresses_and_processes(tiny_home):
    with lab_serving(tiny_home, None) as one:
        near = bind("127.0.0.1", one.port + 1, explicit=False)
        port = near.getsockname()[1]
        near.close()
        only = finding_about("labs", check_labs(Settings(port=one.port)))
        assert f"{one.url} (process {os.getpid()}" in only.found
        assert finding_about("port", check_port(Settings(port=one.port))).verdict == "fine"
        with Lab(Settings(home=tiny_home, port=port), loop="thread") as other:
            other.start()
            finding = finding_about("labs", check_labs(Settings(port=one.port)))
            for lab in (one, other):
                assert f"{lab.url} (process {os.getpid()}: " in finding.found
            assert "kill" not in finding.remedy
            elsewhere = finding_about("labs", check_labs(Settings(port=one.port, home=tiny_home / "other")))
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
