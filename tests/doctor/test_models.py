"""Tests of the checks for models on disk and for the hub."""

from __future__ import annotations

import http.server
import socket
import threading
import time

from lmx_lab.doctor.models import check_hub, check_models, find_connection_problem
from lmx_lab.settings import Settings
from tests.doctor.findings import EXPLAINED_NOTE, finding_about, summary


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

    def do_HEAD(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_: object) -> None:
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
