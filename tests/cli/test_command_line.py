"""Tests of the helper for the tests of commands: a command does not change the process that it runs in."""

import logging
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from lmx_lab.cli import app as application
from tests.support.commands import SIGNALS, run_command


def state():
    root = logging.getLogger()
    streams = (sys.stdin, sys.stdout, sys.stderr)
    files = [(os.fstat(number).st_dev, os.fstat(number).st_ino) for number in range(3)]
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return dict(os.environ), Path.cwd(), sys.argv, streams, files, handlers, [*root.handlers], root.level


def test_a_command_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    def change(_):
        os.environ["LMX_LAB_PORT"] = "1"
        os.chdir("/")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        logging.basicConfig(level="DEBUG", force=True)
        print("written")
        print("failed", file=sys.stderr)

    monkeypatch.setattr(application, "app", change)
    before = state()
    ended = run_command(tmp_path, "models")
    assert (ended.status, ended.stdout, ended.stderr) == (0, "written\n", "failed\n")
    assert state() == before


def test_a_failure_of_the_test_thread_ends_the_command(tmp_path):
    def fail(server):
        server.wait_for("ready at")
        raise ValueError("failed")

    before = state()
    with pytest.raises(ValueError, match="failed"):
        run_command(tmp_path, "serve", "--port", "0", meanwhile=fail)
    assert state() == before


def test_a_signal_that_a_command_does_not_handle_ends_it(tmp_path, monkeypatch):
    def wait(_):
        print("waiting", flush=True)
        pause = threading.Event()
        while True:
            pause.wait(0.01)

    def end(running):
        running.wait_for("waiting")
        running.send_signal(signal.SIGTERM)

    monkeypatch.setattr(application, "app", wait)
    assert run_command(tmp_path, "models", meanwhile=end).status == -signal.SIGTERM


def test_output_that_could_not_be_written_is_not_written_by_the_next_command(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_command(tmp_path, "--version", stdout=writing).status == 1
    finally:
        os.close(writing)
    assert run_command(tmp_path, "--version").stdout.count("lmx-lab") == 1
