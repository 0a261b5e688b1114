"""Tests of ``lmx-lab chat``: with a daemon in this process, and without one."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmx_lab.client import DaemonClient
from lmx_lab.notebook.lab import Lab
from lmx_lab.settings import Settings
from tests.support.commands import WAIT_S, Running, environment, run_command, signal_at
from tests.support.model_server import STALL, Gate, calls, refuses, says, token

UNUSED_PORT = 9
"""The port of the discard service, which no program uses."""


@pytest.fixture
def ran(daemon):
    """Return the arguments of each call of a tool that needs a permission."""
    ran = []

    @daemon.tool
    def note(text: str) -> str:
        """Write it down."""
        ran.append(text)
        return "written"

    return ran


def cancelled_turns(home):
    return run_command(home, "events", "--json", "--types", "turn.done").stdout.count('"cancelled"')


@pytest.mark.usefixtures("hello")
def test_the_answer_goes_to_standard_output_and_its_cost_to_standard_error(tmp_path, daemon):
    done = run_command(tmp_path, "chat", "Say", "hello.")
    assert (done.status, done.stdout) == (0, "Hello there.\n"), done.stderr
    assert "2 tokens" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("hello")
def test_the_next_chat_continues_the_session_unless_a_new_one_is_requested(tmp_path, daemon, upstream):
    for arguments in (["one"], ["two"], ["three", "--new"], ["four", "--session", "mine"]):
        assert run_command(tmp_path, "chat", *arguments).status == 0
    histories = [[message["content"] for message in body["messages"]] for body in upstream.bodies]
    assert histories == [["one"], ["one", "Hello there.", "two"], ["three"], ["four"]]


@pytest.mark.slow
@pytest.mark.usefixtures("hello")
def test_a_deleted_session_of_the_last_chat_is_replaced_by_a_new_one(tmp_path, daemon, upstream):
    assert run_command(tmp_path, "chat", "one", "--session", "s").status == 0
    daemon.run(daemon.services.turns.delete_session("s"))
    done = run_command(tmp_path, "chat", "two")
    assert done.status == 0
    assert "deleted" in done.stderr
    assert len(upstream.bodies[-1]["messages"]) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("hello")
def test_options_for_a_new_session_are_refused_for_an_existing_one(tmp_path, daemon, upstream):
    first = run_command(tmp_path, "chat", "one", "--session", "s", "--system", "be brief")
    assert first.status == 0, first.stderr
    second = run_command(tmp_path, "chat", "two", "--session", "s", "--system", "be long")
    assert second.status == 2
    assert "session s exists" in second.stderr
    assert [len(body["messages"]) for body in upstream.bodies] == [2]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("session", ["", "two words", "../x"])
def test_an_invalid_session_id_is_one_line(tmp_path, upstream, session):
    for arguments in (["chat", "hello"], ["events"]):
        done = run_command(tmp_path, *arguments, "--session", session)
        assert (done.status, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"session_id is {session!r}; it must have 1 to 64 letters" in done.stderr
    assert upstream.bodies == []


@pytest.mark.usefixtures("hello")
def test_a_chat_whose_session_cannot_be_stored_is_answered(tmp_path, daemon):
    (tmp_path / "chat.json").mkdir()
    done = run_command(tmp_path, "chat", "hello")
    assert (done.status, done.stdout) == (0, "Hello there.\n"), done.stderr


@pytest.mark.slow
def test_characters_that_the_encoding_lacks_are_escaped(tmp_path, daemon, upstream):
    upstream.then(says("é"))
    done = run_command(tmp_path, "chat", "hello", encoding="ascii")
    assert (done.status, done.stdout) == (0, "\\xe9\n"), done.stderr


@pytest.mark.usefixtures("hello")
def test_the_question_can_be_given_on_standard_input(tmp_path, daemon, upstream):
    ended = run_command(tmp_path, "chat", stdin="from a pipe")
    assert (ended.status, ended.stdout) == (0, "Hello there.\n")
    assert upstream.bodies[0]["messages"][0]["content"] == "from a pipe"


@pytest.mark.parametrize("question", ["", "  "])
def test_a_missing_question_is_an_error(tmp_path, daemon, question):
    done = run_command(tmp_path, "chat", question)
    assert done.status == 2
    assert "there is no question" in done.stderr


def test_without_a_daemon_the_error_says_how_to_start_one(tmp_path):
    for command in (["chat", "--new", "hello"], ["events"]):
        done = run_command(tmp_path, *command)
        assert done.status == 1
        assert "lmx-lab daemon" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("hello")
def test_an_address_needs_its_token(tmp_path, daemon):
    done = run_command(tmp_path, "chat", "hello", "--url", daemon.url)
    assert done.status == 2
    assert "LMX_LAB_DAEMON_TOKEN" in done.stderr
    given = {"LMX_LAB_DAEMON_TOKEN": daemon.token}
    ended = run_command(tmp_path, "chat", "hello", "--url", daemon.url, environ=given)
    assert (ended.status, ended.stdout) == (0, "Hello there.\n"), ended.stderr


def test_a_failed_turn_prints_its_code(tmp_path, daemon, upstream):
    upstream.then(refuses(503, "no-model-loaded", "load one first"))
    done = run_command(tmp_path, "chat", "hello")
    assert (done.status, done.stdout) == (1, "")
    assert "no-model-loaded" in done.stderr


@pytest.mark.slow
def test_a_tool_that_needs_a_permission_is_denied_without_a_terminal(tmp_path, ran, upstream):
    for allow, status in (([], "denied"), (["--allow"], "ok")):
        upstream.then(calls(("note", {"text": "a"})), says("Done."))
        done = run_command(tmp_path, "chat", "write", "--new", *allow)
        assert (done.status, done.stdout) == (0, "Done.\n"), done.stderr
        assert f"note: {status}" in done.stderr
    assert ran == ["a"]


CHAT = ("chat", "hello", "--session", "s")


@pytest.mark.slow
def test_an_interrupt_cancels_the_turn_and_keeps_the_printed_text(tmp_path, daemon, upstream):
    upstream.then([token("Hel"), STALL])
    done = run_command(tmp_path, *CHAT, meanwhile=signal_at("Hel", signal.SIGINT))
    assert (done.status, done.stdout.strip()) == (130, "Hel")
    assert "cancelled" in done.stderr
    assert "Traceback" not in done.stderr
    assert cancelled_turns(tmp_path) == 1


@pytest.mark.slow
def test_a_turn_is_cancelled_if_its_output_was_closed(tmp_path, daemon, upstream):
    gate = Gate()
    upstream.then([token("Hel"), gate, token("lo"), STALL])

    def leave(chat):
        chat.wait_for("Hel")
        chat.close_output()
        gate.open()

    done = run_command(tmp_path, *CHAT, meanwhile=leave)
    assert (done.status, done.stderr) == (1, "")
    assert cancelled_turns(tmp_path) == 1


ON_ITS_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""A program that becomes another one, whose controlling terminal is its standard input. The tests may run under nohup,
which ignores the signal of a closed terminal in all programs that they start.
"""


@pytest.mark.slow
def test_a_closed_terminal_cancels_the_turn_and_ends_the_chat(tmp_path, daemon, upstream):
    upstream.then([token("Hel"), STALL])
    terminal, own = pty.openpty()
    program = [sys.executable, "-c", ON_ITS_TERMINAL, str(Path(sys.executable).with_name("lmx-lab"))]
    chat = subprocess.Popen(
        [*program, "chat", "--session", "s", "--max-tokens", "100"],
        stdin=own, stdout=own, stderr=own, start_new_session=True, env=environment(tmp_path),
    )  # fmt: skip
    os.close(own)
    running = Running(terminal)
    running.wait_for("> ")
    running.type("hello\n")
    running.wait_for("Hel")
    running.close_output()
    assert chat.wait(WAIT_S) == 1, "its output was lost"
    assert cancelled_turns(tmp_path) == 1
    assert upstream.bodies[0]["max_tokens"] == 100


@pytest.mark.slow
def test_a_signal_ends_an_interactive_chat_after_its_turn_was_cancelled(tmp_path, daemon, upstream):
    upstream.then([token("Hel"), STALL])

    def hang_up(chat):
        chat.wait_for("> ")
        chat.type("hello\n")
        signal_at("Hel", signal.SIGHUP)(chat)

    done = run_command(tmp_path, "chat", terminal=True, meanwhile=hang_up)
    assert (done.status, "cancelled" in done.stdout) == (0, True)
    assert cancelled_turns(tmp_path) == 1


@pytest.mark.slow
def test_a_chat_reports_that_its_turn_waits(tmp_path, daemon, upstream):
    upstream.then([token("Hel"), STALL])
    interrupt = signal_at("1 earlier turn", signal.SIGINT)
    with DaemonClient(daemon.url, token=daemon.token) as client, client.session("s").stream("first") as first:
        next(event for event in first if event.event == "turn.token")
        assert run_command(tmp_path, *CHAT, terminal=True, meanwhile=interrupt).status == 130


@pytest.mark.slow
def test_an_interactive_chat_asks_before_a_tool_runs(tmp_path, ran, upstream):
    upstream.then(calls(("note", {"text": "b"})), says("Done."), says("Bye."))

    def converse(terminal):
        terminal.wait_for("> ")
        terminal.type("write it\n")
        assert "note(text='b')" in terminal.wait_for("Allow it?")
        terminal.type("y\n")
        terminal.wait_for("Done.")
        terminal.wait_for("> ")
        terminal.type("bye\n")
        terminal.wait_for("Bye.")
        # Before the prompt, the terminal would not treat this as the end of the input.
        terminal.wait_for("> ")
        terminal.type("\x04")

    assert run_command(tmp_path, "chat", terminal=True, meanwhile=converse).status == 0
    assert ran == ["b"]


@pytest.mark.slow
def test_neither_text_typed_before_nor_the_end_of_the_input_allows_a_tool(tmp_path, ran, upstream):
    gate = Gate()
    upstream.then([token("Well"), gate, *calls(("note", {"a)\nAllow b(": "b"}))], says("Done."))

    def answer_nothing(terminal):
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


@pytest.mark.slow
def test_a_question_about_a_tool_is_visible_if_the_answer_goes_to_a_file(tmp_path, ran, upstream):
    upstream.then(calls(("note", {"text": "b"})), says("Done."))

    def allow(terminal):
        terminal.wait_for("Allow it?")
        terminal.type("y\n")

    answer = tmp_path / "answer"
    with answer.open("wb") as out:
        assert run_command(tmp_path, "chat", "write it", stdout=out, terminal=True, meanwhile=allow).status == 0
    assert answer.read_text() == "Done.\n"


def at_port(port):
    return {"LMX_LAB_PORT": str(port)}


def test_a_named_model_answers_one_question_or_several(tmp_path):
    environ = at_port(UNUSED_PORT)
    done = run_command(tmp_path, "chat", "-m", "echo", "Say", "hello.", environ=environ)
    assert (done.status, done.stdout) == (0, "Say hello.\n"), done.stderr
    assert "in this process" in done.stderr
    assert "first token" in done.stderr

    def converse(terminal):
        for question in ("one", "two"):
            terminal.wait_for("> ")
            terminal.type(f"{question}\n")
            terminal.wait_for("first token")
        terminal.wait_for("> ")
        terminal.type("\x04")

    ended = run_command(tmp_path, "chat", "-m", "echo", terminal=True, meanwhile=converse, environ=environ)
    assert ended.status == 0


def test_a_running_lab_answers_with_its_model(tmp_path):
    with Lab(Settings(home=tmp_path / "lab", port=0), loop="thread") as lab:
        lab.load("echo")
        done = run_command(tmp_path, "chat", "hello", environ=at_port(lab.server.port))
    assert (done.status, done.stdout) == (0, "hello\n"), done.stderr
    assert f"the lab at {lab.url} answers, with echo" in done.stderr


def test_without_a_lab_and_without_a_model_the_error_names_both_remedies(tmp_path):
    done = run_command(tmp_path, "chat", "hello", environ=at_port(UNUSED_PORT))
    assert (done.status, done.stdout) == (1, "")
    assert "lmx-lab chat -m" in done.stderr
    assert "lmx-lab serve" in done.stderr
