"""``lmx-lab chat`` and ``lmx-lab events``, as a shell sees them, before a daemon in this process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from lmx_lab.cli import commands
from lmx_lab.cli.entry import run
from lmx_lab.cli.event_printer import as_json
from lmx_lab.cli.terminal import line, shown
from lmx_lab.client import DaemonClient
from lmx_lab.daemon.daemon import Daemon
from lmx_lab.errors import LabError
from lmx_lab.wire.event_stream import Envelope
from tests.daemon.face import serving
from tests.daemon.scripted import STALL, Gate, Scripted, calls, refuses, says, token
from tests.test_cli import WAIT_S, Serving, environment, lmx_lab


@pytest.fixture
def upstream() -> Iterator[Scripted]:
    with Scripted() as upstream:
        yield upstream


@pytest.fixture
def daemon(tmp_path: Path, upstream: Scripted) -> Iterator[Daemon]:
    with serving(tmp_path, upstream=upstream.url) as daemon:
        yield daemon


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands that run in this process, where nothing has to be imported again."""
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))


@pytest.fixture
def hello(upstream: Scripted) -> None:
    """What the model says, always."""
    upstream.then(says("Hello", " there."))


@pytest.fixture
def ran(daemon: Daemon) -> list[str]:
    """What a tool was called with that needs somebody's yes."""
    ran: list[str] = []

    @daemon.tool
    def note(text: str) -> str:
        """Write it down."""
        ran.append(text)
        return "written"

    return ran


# --- chat


@pytest.mark.usefixtures("hello")
def test_an_answer_is_printed_alone_and_what_it_has_cost_beside_it(tmp_path: Path, daemon: Daemon) -> None:
    done = lmx_lab(tmp_path, "chat", "Say", "hello.")
    assert (done.returncode, done.stdout) == (0, "Hello there.\n"), done.stderr
    assert "2 tokens" in done.stderr


@pytest.mark.usefixtures("hello")
def test_the_next_chat_goes_on_with_the_session_unless_a_new_one_is_wanted(
    tmp_path: Path, daemon: Daemon, upstream: Scripted
) -> None:
    for arguments in (["one"], ["two"], ["three", "--new"], ["four", "--session", "mine"]):
        assert lmx_lab(tmp_path, "chat", *arguments).returncode == 0
    histories = [[said["content"] for said in body["messages"]] for body in upstream.bodies]
    assert histories == [["one"], ["one", "Hello there.", "two"], ["three"], ["four"]]


@pytest.mark.usefixtures("hello")
def test_the_session_of_the_last_chat_may_be_gone(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    assert lmx_lab(tmp_path, "chat", "one", "--session", "s").returncode == 0
    daemon.run(daemon.services.turns.delete_session("s"))
    done = lmx_lab(tmp_path, "chat", "two")
    assert done.returncode == 0
    assert "gone" in done.stderr
    assert len(upstream.bodies[-1]["messages"]) == 1


@pytest.mark.usefixtures("hello")
def test_what_is_for_a_new_session_is_refused_where_there_is_one(
    tmp_path: Path, daemon: Daemon, upstream: Scripted
) -> None:
    first = lmx_lab(tmp_path, "chat", "one", "--session", "s", "--system", "be brief")
    assert first.returncode == 0, first.stderr
    second = lmx_lab(tmp_path, "chat", "two", "--session", "s", "--system", "be long")
    assert second.returncode == 2
    assert "session s is there already" in second.stderr
    assert [len(body["messages"]) for body in upstream.bodies] == [2]


@pytest.mark.usefixtures("at_home", "daemon")
@pytest.mark.parametrize("session", ["", "two words", "../x"])
def test_what_is_no_id_of_a_session_is_said(
    upstream: Scripted, capsys: pytest.CaptureFixture[str], session: str
) -> None:
    for arguments in (["chat", "hello"], ["events"]):
        assert run([*arguments, "--session", session]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert f"session_id is {session!r}; it can have 1 to 64 letters" in said.err
    assert upstream.bodies == []


@pytest.mark.usefixtures("hello")
def test_a_last_chat_that_cannot_be_remembered_is_answered_nevertheless(tmp_path: Path, daemon: Daemon) -> None:
    (tmp_path / "chat.json").mkdir()
    done = lmx_lab(tmp_path, "chat", "hello")
    assert (done.returncode, done.stdout) == (0, "Hello there.\n"), done.stderr


def test_letters_that_the_output_has_not_are_written_out(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    upstream.then(says("é"))
    command = [sys.executable, "-m", "lmx_lab", "chat", "hello"]
    ascii_only = {**environment(tmp_path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=ascii_only, check=False)
    assert (done.returncode, done.stdout) == (0, "\\xe9\n"), done.stderr


@pytest.mark.usefixtures("hello")
def test_the_question_may_come_on_standard_input(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    command = [sys.executable, "-m", "lmx_lab", "chat"]
    asked = subprocess.run(
        command,
        input="from a pipe",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=environment(tmp_path),
        check=True,
    )
    assert asked.stdout == "Hello there.\n"
    assert upstream.bodies[0]["messages"][0]["content"] == "from a pipe"


@pytest.mark.parametrize("question", ["", "  "])
def test_no_question_is_said(tmp_path: Path, daemon: Daemon, question: str) -> None:
    done = lmx_lab(tmp_path, "chat", question)
    assert done.returncode == 2
    assert "there is no question" in done.stderr


def test_without_a_daemon_it_says_how_one_is_started(tmp_path: Path) -> None:
    for command in (["chat", "hello"], ["events"]):
        done = lmx_lab(tmp_path, *command)
        assert done.returncode == 1
        assert "lmx-lab daemon" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("hello")
def test_an_address_needs_its_token(tmp_path: Path, daemon: Daemon) -> None:
    done = lmx_lab(tmp_path, "chat", "hello", "--url", daemon.url)
    assert done.returncode == 2
    assert "LMX_LAB_DAEMON_TOKEN" in done.stderr
    command = [sys.executable, "-m", "lmx_lab", "chat", "hello", "--url", daemon.url]
    given = {**environment(tmp_path), "LMX_LAB_DAEMON_TOKEN": daemon.token}
    asked = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=given, check=False)
    assert (asked.returncode, asked.stdout) == (0, "Hello there.\n"), asked.stderr


def test_what_fails_ends_with_its_code(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    upstream.then(refuses(503, "no-model-loaded", "load one first"))
    done = lmx_lab(tmp_path, "chat", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no-model-loaded" in done.stderr


def test_a_tool_that_needs_a_yes_is_denied_where_nobody_can_be_asked(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    for allow, status in (([], "denied"), (["--allow"], "ok")):
        upstream.then(calls(("note", {"text": "a"})), says("Done."))
        done = lmx_lab(tmp_path, "chat", "write", "--new", *allow)
        assert (done.returncode, done.stdout) == (0, "Done.\n"), done.stderr
        assert f"note: {status}" in done.stderr
    assert ran == ["a"]


def chatting(home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "lmx_lab", "chat", "hello", "--session", "s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home),
    )


def test_an_interrupt_cancels_the_turn_and_keeps_what_was_written(
    tmp_path: Path, daemon: Daemon, upstream: Scripted
) -> None:
    upstream.then([token("Hel"), STALL])
    chat = chatting(tmp_path)
    assert chat.stdout is not None
    assert chat.stdout.read(3) == b"Hel"
    chat.send_signal(signal.SIGINT)
    _, said = chat.communicate(timeout=WAIT_S)
    assert chat.returncode == 130
    assert b"cancelled" in said
    assert b"Traceback" not in said
    assert lmx_lab(tmp_path, "events", "--json", "--types", "turn.done").stdout.count('"cancelled"') == 1


def test_a_turn_of_which_nobody_reads_the_answer_is_cancelled(
    tmp_path: Path, daemon: Daemon, upstream: Scripted
) -> None:
    gate = Gate()
    upstream.then([token("Hel"), gate, token("lo"), STALL])
    with chatting(tmp_path) as chat:
        assert chat.stdout is not None
        assert chat.stdout.read(3) == b"Hel"
        chat.stdout.close()
        gate.open()
        assert chat.wait(WAIT_S) == 1
        assert chat.stderr is not None
        assert chat.stderr.read() == b""
    assert lmx_lab(tmp_path, "events", "--json", "--types", "turn.done").stdout.count('"cancelled"') == 1


def test_a_chat_says_that_its_turn_waits_for_others(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    upstream.then([token("Hel"), STALL])
    with chatting(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.read(3) == b"Hel"
        with chatting(tmp_path) as second:
            assert second.stderr is not None
            assert b"1 before it" in second.stderr.readline()
            second.send_signal(signal.SIGINT)
            assert second.wait(WAIT_S) == 130
        first.send_signal(signal.SIGINT)


def test_a_conversation_asks_in_a_terminal_before_a_tool_runs(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    upstream.then(calls(("note", {"text": "b"})), says("Done."), says("Bye."))
    with Terminal(tmp_path, "chat") as terminal:
        terminal.wait_for("> ")
        terminal.type("write it\n")
        assert "note(text='b')" in terminal.wait_for("Allow it?")
        terminal.type("y\n")
        terminal.wait_for("Done.")
        terminal.wait_for("> ")
        terminal.type("bye\n")
        terminal.wait_for("Bye.")
        # Before its prompt a terminal makes something else of it.
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT_S) == 0
    assert ran == ["b"]


def test_neither_what_was_typed_before_nor_the_end_of_the_input_lets_a_tool_run(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    gate = Gate()
    upstream.then([token("Well"), gate, *calls(("note", {"a)\nAllow b(": "b"}))], says("Done."))
    with Terminal(tmp_path, "chat", "write it") as terminal:
        terminal.wait_for("Well")
        terminal.type("y\n")
        terminal.wait_for("y\r\n")
        gate.open()
        assert "\nAllow b(" not in terminal.wait_for("Allow it?")
        terminal.type("\x04")
        terminal.wait_for("denied")
        terminal.wait_for("Done.")
        assert terminal.process.wait(WAIT_S) == 0
    assert ran == []


def test_a_question_about_a_tool_is_seen_though_the_answer_goes_into_a_file(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    upstream.then(calls(("note", {"text": "b"})), says("Done."))
    answer = tmp_path / "answer"
    with answer.open("wb") as out, Terminal(tmp_path, "chat", "write it", stdout=out) as terminal:
        terminal.wait_for("Allow it?")
        terminal.type("y\n")
        assert terminal.process.wait(WAIT_S) == 0
    assert answer.read_text() == "Done.\n"


class Terminal:
    """A command that has a terminal."""

    def __init__(self, home: Path, *arguments: str, stdout: IO[bytes] | None = None) -> None:
        self._own, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmx_lab", *arguments],
            stdin=theirs,
            stdout=stdout or theirs,
            stderr=theirs,
            env={**environment(home), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str) -> str:
        """What came, up to this text."""
        while text not in self._unread:
            self._unread += os.read(self._own, 4096).decode()
        before, _, self._unread = self._unread.partition(text)
        return before

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


# --- events


@pytest.mark.usefixtures("hello")
def test_the_newest_events_are_printed_as_lines_for_people_or_programs(tmp_path: Path, daemon: Daemon) -> None:
    assert lmx_lab(tmp_path, "chat", "hello", "--session", "s").returncode == 0
    people = lmx_lab(tmp_path, "events", "--tail", "2").stdout.splitlines()
    assert "message.done s" in people[0]
    assert "Hello there." in people[0]
    assert "turn.done s" in people[1]
    programs = lmx_lab(tmp_path, "events", "--json", "--after", "0", "--session", "s").stdout.splitlines()
    events = [json.loads(text) for text in programs]
    assert [event["event"] for event in events][:2] == ["session.created", "turn.queued"]
    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})


@pytest.mark.usefixtures("at_home", "daemon")
@pytest.mark.parametrize("more", [[], ["--follow"], ["--after", "0"]], ids=" ".join)
def test_a_session_that_does_not_exist_is_said(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert run(["events", "--session", "nosuch", *more]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("session-not-found: ")
    assert "nosuch" in said.err


@pytest.mark.usefixtures("at_home")
def test_what_happened_in_a_session_that_was_deleted_is_told_as_long_as_it_is_kept(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonClient(daemon.url, token=daemon.token) as client:
        client.session("gone")
        client.delete_session("gone")
    assert run(["events", "--session", "gone"]) == 0
    said = capsys.readouterr()
    assert "session.deleted gone" in said.out
    assert said.err == ""


@pytest.mark.usefixtures("hello")
def test_a_kind_that_does_not_exist_is_said(tmp_path: Path, daemon: Daemon) -> None:
    done = lmx_lab(tmp_path, "events", "--types", "turn.nope")
    assert done.returncode == 2
    assert "turn.nope" in done.stderr


@pytest.mark.usefixtures("hello")
def test_following_goes_on_over_a_restart(tmp_path: Path, upstream: Scripted) -> None:
    with contextlib.ExitStack() as stack:
        with serving(tmp_path, upstream=upstream.url):
            following = Serving(tmp_path, "--follow", "--after", "0", "--types", "session.created", command="events")
            stack.callback(following.close)
            assert lmx_lab(tmp_path, "chat", "one", "--session", "first").returncode == 0
            following.wait_for("first")
        with serving(tmp_path, upstream=upstream.url):
            assert lmx_lab(tmp_path, "chat", "two", "--session", "second").returncode == 0
            following.wait_for("second")
            status, said = following.end(signal.SIGINT)
    assert status == 0
    assert "connected again" in said
    assert following.output.count("session.created first") == following.output.count("session.created second") == 1


@pytest.mark.usefixtures("hello")
def test_a_reader_that_has_enough_is_no_error(tmp_path: Path, daemon: Daemon) -> None:
    for number in range(3):
        assert lmx_lab(tmp_path, "chat", str(number)).returncode == 0
    command = f"{sys.executable} -m lmx_lab events --after 0 --json | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=WAIT_S, env=environment(tmp_path), check=False
    )
    assert json.loads(done.stdout)["seq"] == 1
    assert done.stderr == ""


# --- text on a terminal


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("Grüße, 你好 🙂", "Grüße, 你好 🙂"),
        ("\x1b[2Jgone\x07", "\\x1b[2Jgone\\x07"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("back\rspace\x08", "back\\rspace\\x08"),
        ("\u200d joins", "\u200d joins"),
    ],
)
def test_text_of_models_does_nothing_to_a_terminal(text: str, safe: str) -> None:
    assert shown(text) == safe


def test_json_is_ascii_and_says_the_same() -> None:
    said = {"text": "\x9b2J é \u202e", "nothing": None}
    event = Envelope(event="new.kind", seq=1, at="2026-11-21T10:00:00.123Z", stream_id="stm", data=said)
    assert as_json(event).isascii()
    assert Envelope.model_validate_json(as_json(event)) == event


def test_what_a_server_says_in_an_error_does_nothing_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise LabError("gone\x1b[2J")

    monkeypatch.setattr(commands, "app", fail)
    assert run() == 1
    assert "gone\\x1b[2J" in capsys.readouterr().err


def test_a_line_is_one_line() -> None:
    assert line("a\n b" + "c" * 200, most=10) == "a bcccccc…"
