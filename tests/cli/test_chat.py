"""``lmx-lab chat``, with a daemon in this process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lmx_lab.client import DaemonClient
from lmx_lab.daemon.daemon import Daemon
from tests.command_line import Running, run_command
from tests.daemon.scripted import STALL, Gate, Scripted, calls, refuses, says, token


@pytest.fixture
def ran(daemon: Daemon) -> list[str]:
    """The arguments of each call of a tool that needs a permission."""
    ran: list[str] = []

    @daemon.tool
    def note(text: str) -> str:
        """Write it down."""
        ran.append(text)
        return "written"

    return ran


def cancelled_turns(home: Path) -> int:
    return run_command(home, "events", "--json", "--types", "turn.done").stdout.count('"cancelled"')


@pytest.mark.usefixtures("hello")
def test_an_answer_is_printed_alone_and_what_it_has_cost_beside_it(tmp_path: Path, daemon: Daemon) -> None:
    done = run_command(tmp_path, "chat", "Say", "hello.")
    assert (done.status, done.stdout) == (0, "Hello there.\n"), done.stderr
    assert "2 tokens" in done.stderr


@pytest.mark.usefixtures("hello")
def test_the_next_chat_goes_on_with_the_session_unless_a_new_one_is_wanted(
    tmp_path: Path, daemon: Daemon, upstream: Scripted
) -> None:
    for arguments in (["one"], ["two"], ["three", "--new"], ["four", "--session", "mine"]):
        assert run_command(tmp_path, "chat", *arguments).status == 0
    histories = [[said["content"] for said in body["messages"]] for body in upstream.bodies]
    assert histories == [["one"], ["one", "Hello there.", "two"], ["three"], ["four"]]


@pytest.mark.usefixtures("hello")
def test_the_session_of_the_last_chat_may_be_gone(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    assert run_command(tmp_path, "chat", "one", "--session", "s").status == 0
    daemon.run(daemon.services.turns.delete_session("s"))
    done = run_command(tmp_path, "chat", "two")
    assert done.status == 0
    assert "gone" in done.stderr
    assert len(upstream.bodies[-1]["messages"]) == 1


@pytest.mark.usefixtures("hello")
def test_what_is_for_a_new_session_is_refused_where_there_is_one(
    tmp_path: Path, daemon: Daemon, upstream: Scripted
) -> None:
    first = run_command(tmp_path, "chat", "one", "--session", "s", "--system", "be brief")
    assert first.status == 0, first.stderr
    second = run_command(tmp_path, "chat", "two", "--session", "s", "--system", "be long")
    assert second.status == 2
    assert "session s is there already" in second.stderr
    assert [len(body["messages"]) for body in upstream.bodies] == [2]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("session", ["", "two words", "../x"])
def test_what_is_no_id_of_a_session_is_said(tmp_path: Path, upstream: Scripted, session: str) -> None:
    for arguments in (["chat", "hello"], ["events"]):
        done = run_command(tmp_path, *arguments, "--session", session)
        assert (done.status, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"session_id is {session!r}; it can have 1 to 64 letters" in done.stderr
    assert upstream.bodies == []


@pytest.mark.usefixtures("hello")
def test_a_last_chat_that_cannot_be_remembered_is_answered_nevertheless(tmp_path: Path, daemon: Daemon) -> None:
    (tmp_path / "chat.json").mkdir()
    done = run_command(tmp_path, "chat", "hello")
    assert (done.status, done.stdout) == (0, "Hello there.\n"), done.stderr


def test_letters_that_the_output_has_not_are_written_out(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    upstream.then(says("é"))
    done = run_command(tmp_path, "chat", "hello", encoding="ascii")
    assert (done.status, done.stdout) == (0, "\\xe9\n"), done.stderr


@pytest.mark.usefixtures("hello")
def test_the_question_may_come_on_standard_input(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    asked = run_command(tmp_path, "chat", stdin="from a pipe")
    assert (asked.status, asked.stdout) == (0, "Hello there.\n")
    assert upstream.bodies[0]["messages"][0]["content"] == "from a pipe"


@pytest.mark.parametrize("question", ["", "  "])
def test_no_question_is_said(tmp_path: Path, daemon: Daemon, question: str) -> None:
    done = run_command(tmp_path, "chat", question)
    assert done.status == 2
    assert "there is no question" in done.stderr


def test_without_a_daemon_it_says_how_one_is_started(tmp_path: Path) -> None:
    for command in (["chat", "hello"], ["events"]):
        done = run_command(tmp_path, *command)
        assert done.status == 1
        assert "lmx-lab daemon" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("hello")
def test_an_address_needs_its_token(tmp_path: Path, daemon: Daemon) -> None:
    done = run_command(tmp_path, "chat", "hello", "--url", daemon.url)
    assert done.status == 2
    assert "LMX_LAB_DAEMON_TOKEN" in done.stderr
    given = {"LMX_LAB_DAEMON_TOKEN": daemon.token}
    asked = run_command(tmp_path, "chat", "hello", "--url", daemon.url, environ=given)
    assert (asked.status, asked.stdout) == (0, "Hello there.\n"), asked.stderr


def test_what_fails_ends_with_its_code(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    upstream.then(refuses(503, "no-model-loaded", "load one first"))
    done = run_command(tmp_path, "chat", "hello")
    assert (done.status, done.stdout) == (1, "")
    assert "no-model-loaded" in done.stderr


def test_a_tool_that_needs_a_yes_is_denied_where_nobody_can_be_asked(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    for allow, status in (([], "denied"), (["--allow"], "ok")):
        upstream.then(calls(("note", {"text": "a"})), says("Done."))
        done = run_command(tmp_path, "chat", "write", "--new", *allow)
        assert (done.status, done.stdout) == (0, "Done.\n"), done.stderr
        assert f"note: {status}" in done.stderr
    assert ran == ["a"]


CHAT = ("chat", "hello", "--session", "s")


def interrupt_after_a_piece(chat: Running) -> None:
    chat.wait_for("Hel")
    chat.send_signal(signal.SIGINT)


def test_an_interrupt_cancels_the_turn_and_keeps_what_was_written(
    tmp_path: Path, daemon: Daemon, upstream: Scripted
) -> None:
    upstream.then([token("Hel"), STALL])
    done = run_command(tmp_path, *CHAT, meanwhile=interrupt_after_a_piece)
    assert (done.status, done.stdout.strip()) == (130, "Hel")
    assert "cancelled" in done.stderr
    assert "Traceback" not in done.stderr
    assert cancelled_turns(tmp_path) == 1


def test_a_turn_whose_output_has_no_reader_is_cancelled(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    gate = Gate()
    upstream.then([token("Hel"), gate, token("lo"), STALL])

    def leave(chat: Running) -> None:
        chat.wait_for("Hel")
        chat.close_output()
        gate.open()

    done = run_command(tmp_path, *CHAT, meanwhile=leave)
    assert (done.status, done.stderr) == (1, "")
    assert cancelled_turns(tmp_path) == 1


def test_a_chat_says_that_its_turn_waits_for_others(tmp_path: Path, daemon: Daemon, upstream: Scripted) -> None:
    upstream.then([token("Hel"), STALL])

    def interrupt(terminal: Running) -> None:
        terminal.wait_for("1 before it")
        terminal.send_signal(signal.SIGINT)

    with DaemonClient(daemon.url, token=daemon.token) as client, client.session("s").stream("first") as first:
        next(event for event in first if event.event == "turn.token")
        assert run_command(tmp_path, *CHAT, terminal=True, meanwhile=interrupt).status == 130


def test_a_conversation_asks_in_a_terminal_before_a_tool_runs(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    upstream.then(calls(("note", {"text": "b"})), says("Done."), says("Bye."))

    def converse(terminal: Running) -> None:
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

    assert run_command(tmp_path, "chat", terminal=True, meanwhile=converse).status == 0
    assert ran == ["b"]


def test_neither_what_was_typed_before_nor_the_end_of_the_input_lets_a_tool_run(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    gate = Gate()
    upstream.then([token("Well"), gate, *calls(("note", {"a)\nAllow b(": "b"}))], says("Done."))

    def answer_nothing(terminal: Running) -> None:
        terminal.wait_for("Well")
        terminal.type("y\n")
        terminal.wait_for("y\r\n")
        gate.open()
        assert "\nAllow b(" not in terminal.wait_for("Allow it?")
        terminal.type("\x04")
        terminal.wait_for("denied")
        terminal.wait_for("Done.")

    assert run_command(tmp_path, "chat", "write it", terminal=True, meanwhile=answer_nothing).status == 0
    assert ran == []


def test_a_question_about_a_tool_is_seen_though_the_answer_goes_into_a_file(
    tmp_path: Path, ran: list[str], upstream: Scripted
) -> None:
    upstream.then(calls(("note", {"text": "b"})), says("Done."))

    def allow(terminal: Running) -> None:
        terminal.wait_for("Allow it?")
        terminal.type("y\n")

    answer = tmp_path / "answer"
    with answer.open("wb") as out:
        assert run_command(tmp_path, "chat", "write it", stdout=out, terminal=True, meanwhile=allow).status == 0
    assert answer.read_text() == "Done.\n"
