"""Tests that the pages of the notebook may call the server, as panels do when the kernel does not respond."""

import json
import os

import httpx2
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.addresses import Addresses, find_notebook_server
from lmx_lab.notebook.lab import Lab
from lmx_lab.settings import Settings
from tests.support.labs import serving

WEBVIEW = "vscode-webview://1k2j3h4g5f6d"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
UNLOAD = "/admin/models/unload"


@pytest.fixture(scope="module")
def in_vscode(echo_home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSCODE_PID", "1")
        with serving(echo_home, None, api_key="s3cret") as lab:
            yield lab


def test_a_webview_of_vs_code_may_call_the_server(in_vscode):
    address, page = f"{in_vscode.url}{UNLOAD}", {"origin": WEBVIEW}
    answers = [
        httpx2.options(address, headers={**page, **PREFLIGHT}),
        httpx2.post(address, json={}, headers={**page, "authorization": "Bearer s3cret"}),
        httpx2.post(address, json={}, headers=page),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 401]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {WEBVIEW}


def test_the_host_name_of_a_proxy_is_accepted(monkeypatch):
    monkeypatch.setenv("LMX_LAB_PROXY_URL", "https://lab.example/{port}/")
    policy = Addresses(settings=Settings(), port=8400).policy()
    assert "lab.example:80" in policy.hosts
    assert "https://lab.example" in policy.origins


def test_an_invalid_proxy_address_is_refused_at_the_start(monkeypatch):
    monkeypatch.setenv("LMX_LAB_PROXY_URL", "lab.example")
    with pytest.raises(InvalidRequestError, match=r"LMX_LAB_PROXY_URL is 'lab\.example'"):
        Lab(Settings(port=0))


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ({"pid": os.getppid(), "url": "http://localhost:8888/b/"}, "http://localhost:8888/b/"),
        # Left by an earlier process with the same id.
        ({"pid": 1 << 30, "url": "http://localhost:8888/b/"}, None),
        ({"pid": os.getppid()}, None),
        ({"pid": os.getppid(), "url": 7}, None),
        (["http://localhost:8888/b/"], None),
    ],
)
def test_the_jupyter_server_is_the_ancestor_process_that_wrote_its_address(tmp_path, monkeypatch, written, url):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"jpserver-{os.getppid()}.json").write_text(json.dumps(written))
    found = find_notebook_server()
    assert (found.url if found else None) == url


def test_a_missing_or_incomplete_file_means_no_jupyter_server(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    assert find_notebook_server() is None
    (tmp_path / f"jpserver-{os.getppid()}.json").write_text('{"pid": ')
    assert find_notebook_server() is None
