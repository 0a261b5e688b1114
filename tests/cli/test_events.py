"""Tests of ``lmx-lab events``, with a daemon in this process."""

import json
import re
import signal

import pytest

from lmx_lab.client import DaemonClient
from tests.support.commands import run_command
from tests.support.daemons import serving, settled, write_tokens


@pytest.mark.usefixtures("hello")
def test_the_newest_events_are_printed_as_text_or_json(tmp_path, daemon):
    assert run_command(tmp_path, "chat", "hello", "--session", "s").status == 0
    people = run_command(tmp_path, "events", "--tail", "2").stdout.splitlines()
    assert "message.done s" in people[0]
    assert "Hello there." in people[0]
    assert "turn.done s" in people[1]
    programs = run_command(tmp_path, "events", "--json", "--after", "0", "--session", "s").stdout.splitlines()
    events = [json.loads(text) for text in programs]
    assert [event["event"] for event in events][:2] == ["session.created", "turn.queued"]
    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})


def test_an_event_is_one_short_line_and_the_pieces_of_a_message_are_one_event(tmp_path, daemon):
    session = "a-session-with-a-long-name"
    with DaemonClient(daemon.url, token=daemon.token) as client:
        client.session(session)
    write_tokens(daemon, 20, session, "first line\nsecond line " + 300 * "x")
    done = run_command(tmp_path, "events", "--after", "0", "--session", session)
    created, token = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ \d\d:\d\d:\d\d session\.created a-session-wi a-session-with-a-long-name .*idle", created)
    assert re.fullmatch(r"\d+ \d\d:\d\d:\d\d turn\.token a-session-wi first line.*second line x+…", token)
    assert len(token) == 200


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("more", [[], ["--follow"], ["--after", "0"]], ids=" ".join)
def test_a_missing_session_is_an_error(tmp_path, more):
    done = run_command(tmp_path, "events", "--session", "nosuch", *more)
    assert (done.status, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("session-not-found: ")
    assert "nosuch" in done.stderr


def test_events_of_a_deleted_session_are_printed_while_they_are_in_the_log(tmp_path, daemon):
    with DaemonClient(daemon.url, token=daemon.token) as client:
        client.session("gone")
        client.delete_session("gone")
    done = run_command(tmp_path, "events", "--session", "gone")
    assert (done.status, done.stderr) == (0, "")
    assert "session.deleted gone" in done.stdout


@pytest.mark.usefixtures("hello")
def test_an_unknown_type_is_an_error(tmp_path, daemon):
    done = run_command(tmp_path, "events", "--types", "turn.nope")
    assert done.status == 2
    assert "turn.nope" in done.stderr


@pytest.mark.slow
def test_following_continues_over_a_restart(tmp_path):
    def restart(following):
        make_session(first, "first")
        following.wait_for("first")
        # The first events are read from the log, before the command subscribes to new ones.
        assert settled(first, lambda: len(first.services.subscribers) == 1)
        first.stop(mode="now")
        with serving(tmp_path) as second:
            make_session(second, "second")
            following.wait_for("second")
            following.send_signal(signal.SIGINT)

    with serving(tmp_path) as first:
        arguments = ("--follow", "--after", "0", "--types", "session.created")
        done = run_command(tmp_path, "events", *arguments, meanwhile=restart)
    assert done.status == 0
    assert "connected again" in done.stderr
    assert done.stdout.count("session.created first") == done.stdout.count("session.created second") == 1


def make_session(daemon, name):
    with DaemonClient(daemon.url, token=daemon.token) as client:
        client.session(name)


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_causes_no_error_message(tmp_path, daemon):
    # More than fits into a pipe.
    write_tokens(daemon, 1000)
    lines = []

    def read_one_line(events):
        lines.append(events.wait_for("\n"))
        events.close_output()

    done = run_command(tmp_path, "events", "--after", "0", "--json", meanwhile=read_one_line)
    assert json.loads(lines[0])["seq"] == 1
    assert (done.status, done.stderr) == (1, "")
