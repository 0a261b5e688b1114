"""Tests of ``lmx-lab doctor`` as a whole, on machines with real problems."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

import huggingface_hub.constants

from lmx_lab import doctor
from lmx_lab.doctor import models
from lmx_lab.settings import Settings
from tests.doctor.findings import finding_about
from tests.support.commands import run_command


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


def test_a_check_that_cannot_be_imported_is_a_finding_and_the_others_run(tmp_path, monkeypatch):
    names = {topic: doctor.CHECKS[topic] for topic in (*doctor.WAITING, "daemon")}
    monkeypatch.setattr(doctor, "CHECKS", {**names, "device": "no_such_package:check", "engines": "no_such_package:f"})
    findings = doctor.run_checks(Settings(home=tmp_path), measure=True)
    for topic in ("device", "engines"):
        finding = finding_about(topic, findings)
        assert (finding.verdict, finding.found) == ("bad", "No module named 'no_such_package'")
    assert finding_about("daemon", findings).verdict == "fine"


def test_an_error_in_a_check_is_a_finding_and_the_others_run(tmp_path, monkeypatch):
    def fail(_: Settings) -> NoReturn:
        raise OSError("the disk failed")

    names = {topic: doctor.CHECKS[topic] for topic in (*doctor.WAITING, "models", "engines")}
    monkeypatch.setattr(doctor, "CHECKS", names)
    monkeypatch.setattr(models, "Catalog", fail)
    finding = finding_about("models", doctor.run_checks(Settings(home=tmp_path)))
    assert (finding.verdict, finding.found) == ("bad", "the disk failed")
