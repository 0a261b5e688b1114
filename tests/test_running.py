"""Tests of the records of running labs in their home."""

import json
import os
import socket
from threading import Thread

import httpx2
import pytest

from lmx_lab import running
from lmx_lab.notebook import local
from lmx_lab.running import FOLDER, RunningLab, record_lab, running_labs
from tests.support.labs import serving
from tests.support.sockets import free_port


def test_a_lab_is_recorded_while_it_runs(tmp_path):
    assert running_labs(tmp_path) == []
    with serving(tmp_path, None) as lab, serving(tmp_path, None) as other:
        ports = sorted((lab.server.port, other.server.port))
        assert [each.port for each in running_labs(tmp_path)] == ports
        assert {each.pid for each in running_labs(tmp_path)} == {os.getpid()}
        assert {each.url for each in running_labs(tmp_path)} == {lab.url, other.url}
        other.stop()
        assert [each.port for each in running_labs(tmp_path)] == [lab.server.port]
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_no_request_is_answered_before_the_lab_is_recorded(tmp_path, monkeypatch):
    def ask_and_record(home, host, port):
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.get(f"http://{host}:{port}/healthz", timeout=0.5)
        return record_lab(home, host, port)

    monkeypatch.setattr(local, "record_lab", ask_and_record)
    with serving(tmp_path, None) as lab:
        assert httpx2.get(f"{lab.url}/healthz").status_code == 200


def test_records_of_labs_that_have_ended_are_removed_and_those_of_other_machines_kept(tmp_path):
    record_lab(tmp_path, "127.0.0.1", free_port())
    foreign = tmp_path / FOLDER / "elsewhere-8400.json"
    foreign.write_text(json.dumps({"machine": "elsewhere", "host": "127.0.0.1", "port": 8400, "pid": 1}))
    (tmp_path / FOLDER / "damaged.json").write_text("{")
    assert running_labs(tmp_path) == []
    assert sorted(file.name for file in (tmp_path / FOLDER).iterdir()) == ["damaged.json", foreign.name]


def test_a_port_that_does_not_answer_is_not_listed_and_its_record_is_kept(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        remove = record_lab(tmp_path, "127.0.0.1", silent.getsockname()[1])
        assert running_labs(tmp_path) == []
        assert len(list((tmp_path / FOLDER).iterdir())) == 1
    remove()
    remove()
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_the_record_of_a_later_lab_at_the_same_port_is_not_removed(tmp_path):
    with serving(tmp_path, None) as lab:
        (file,) = (tmp_path / FOLDER).iterdir()
        content = json.loads(file.read_bytes()) | {"pid": 1}
        file.write_text(json.dumps(content))
        assert running_labs(tmp_path) == [RunningLab(host="127.0.0.1", port=lab.server.port, pid=1)]
    assert file.exists()


def test_the_record_of_a_later_lab_of_the_same_process_is_not_removed(tmp_path):
    remove, remove_later = (record_lab(tmp_path, "127.0.0.1", 8400) for _ in range(2))
    remove()
    assert len(list((tmp_path / FOLDER).iterdir())) == 1
    remove_later()
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_record_that_was_replaced_since_it_was_read_is_kept(tmp_path, monkeypatch):
    def replace(host, port):
        record_lab(tmp_path, host, port)
        return False

    record_lab(tmp_path, "127.0.0.1", 8400)
    monkeypatch.setattr(running, "is_lab", replace)
    assert running_labs(tmp_path) == []
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


@pytest.mark.parametrize(("status", "kept"), [("429 Too Many Requests", 1), ("404 Not Found", 0)])
def test_the_record_of_a_lab_with_too_many_connections_is_kept(tmp_path, status, kept):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse():
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(f"HTTP/1.1 {status}\r\nx-lmx-lab: 1\r\ncontent-length: 0\r\n\r\n".encode())

        thread = Thread(target=refuse, daemon=True)
        thread.start()
        record_lab(tmp_path, "127.0.0.1", server.getsockname()[1])
        assert running_labs(tmp_path) == []
        thread.join()
    assert len(list((tmp_path / FOLDER).iterdir())) == kept


def test_a_lab_runs_without_a_record_if_its_home_cannot_be_written_to(tmp_path):
    (tmp_path / FOLDER).write_text("a file, not a folder")
    with serving(tmp_path, "echo") as lab:
        assert lab.chat("hello").text
        assert running_labs(tmp_path) == []
