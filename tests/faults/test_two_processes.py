"""Tests of two processes that download, convert, load and delete the same model at the same time."""

import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from tests.support.asking import CHAT, CHAT_WAIT_S, chat_body, refused
from tests.support.commands import serving
from tests.support.hub import REPO, hub_with, instead

pytestmark = pytest.mark.long


@pytest.fixture
def server(tiny, monkeypatch):
    with hub_with(tiny.path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@contextmanager
def two_servers(home, *arguments):
    """Start two servers at the same time and wait until both are ready."""
    with ExitStack() as stack:
        started = [stack.enter_context(serving(home, "--port", "0", *arguments)) for _ in range(2)]
        yield [
            stack.enter_context(httpx2.Client(base_url=f"http://127.0.0.1:{each.port}", timeout=CHAT_WAIT_S))
            for each in started
        ]


def test_a_model_that_two_servers_need_is_downloaded_once_and_can_be_deleted_while_loaded(tmp_path, server):
    body = chat_body(model=REPO)
    with two_servers(tmp_path, "--model", REPO) as servers:
        first, second = servers
        assert Counter(name for name, _ in server.requests) == dict.fromkeys(server.files, 1)
        texts = [each.post(CHAT, json=body).json()["choices"][0]["message"]["content"] for each in servers]
        assert texts[0] == texts[1]
        # One server deletes the files; the other has loaded the model.
        assert first.post("/admin/models/unload").status_code == 200
        shutil.rmtree(tmp_path / "hub/hub/models--org--tiny")
        server.faults["api"] = instead(b"no hub any more")
        assert second.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == texts[1]
        assert [model["loaded"] for model in second.get("/admin/models").json()["models"]] == [True]
        assert first.get("/admin/models").json()["models"] == []
        for each in servers:
            refused(each.post("/admin/models/load", json={"model": REPO}), 404, "model-not-found")
        assert second.post(CHAT, json=body).status_code == 200
        server.faults.clear()
        assert first.post("/admin/models/load", json={"model": REPO}).status_code == 200
        assert first.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == texts[0]


CONVERT = """
import sys
from pathlib import Path
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
seen = []
print("ready", flush=True)
sys.stdin.readline()
entry = Catalog(Settings(home=Path(sys.argv[1]), disk_reserve_bytes=0)).convert(sys.argv[2], seen.append)
print(entry.path, sum(progress.stage == "convert" and not progress.done_bytes for progress in seen))
"""


def test_a_file_that_two_processes_convert_at_the_same_time_is_converted_once(tmp_path, tiny_gguf):
    command = [sys.executable, "-c", CONVERT, str(tmp_path), str(tiny_gguf)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate(timeout=CHAT_WAIT_S)
        outputs.append(output.split())
        assert process.returncode == 0
    (model,) = [path for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")]
    assert sorted(outputs) == [[str(model), "0"], [str(model), "1"]]
    assert list((tmp_path / "models/.tmp").iterdir()) == []
