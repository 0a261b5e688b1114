"""Tests of exit statuses, invalid arguments, interrupts and output that cannot be written; never with a traceback."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lmx_lab.cli import app as application
from lmx_lab.cli.app import run
from lmx_lab.cli.event_printer import as_line_of_json
from lmx_lab.cli.serve import Serve
from lmx_lab.errors import LabError
from lmx_lab.wire.events import Envelope
from tests.support.commands import CLOSED, SIGNALS, WAIT_S, environment, run_command, signal_at

COMMANDS = ("serve", "daemon", "chat", "events", "bench", "pull", "models", "doctor")
PROGRAM = [sys.executable, "-m", "lmx_lab"]
BLOCKS = "import sys\nprint('importing', flush=True)\nsys.stdin.read()\n"
FULL = Path("/dev/full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sreve", "no such command 'sreve'. Did you mean 'serve'? See lmx-lab --help"),
        ("run smollm2-135m", "no such command 'run'. Did you mean 'lmx-lab chat -m MODEL'? See lmx-lab --help"),
        ("list", "no such command 'list'. Did you mean 'lmx-lab models'? See lmx-lab --help"),
        ("--nope", "no such option: --nope. See lmx-lab --help"),
        (
            "serve --prot 1",
            "no such option: --prot (Possible options: --host, --otel, --port). See lmx-lab serve --help",
        ),
        ("serve --port many", "--port is 'many'; it must be a whole number. See lmx-lab serve --help"),
        ("serve --port", "option '--port' requires an argument. See lmx-lab serve --help"),
        ("serve --swap=yes", "option '--swap' does not take a value. See lmx-lab serve --help"),
        ("bench --rate 'fast\n'", "--rate is 'fast\\n'; it must be a number. See lmx-lab bench --help"),
        ("serve -x", "no such option: -x. See lmx-lab serve --help"),
        ("pull", "missing argument 'model'. See lmx-lab pull --help"),
        (
            "models one 'two\x1b[2J\n'",
            r"got unexpected extra argument(s) (one two\x1b[2J\x0a). See lmx-lab models --help",
        ),
        ("chat hello --token t", "--token"),
        ("serve --memory-limit -1", "--memory-limit is -1; give GB"),
        ("serve --memory-limit inf", "--memory-limit is inf; give GB"),
        ("serve --prefix-cache nan", "--prefix-cache is nan; give GB"),
        ("serve --prefix-cache -1", "--prefix-cache is -1; give GB"),
        ("serve --host http://127.0.0.1", "--host is 'http://127.0.0.1'; give an address"),
        ("serve --port 70000", "port is 70000"),
        ("serve --port 0 --log-level loud", "log_level"),
        ("serve --port 0 --cors-origin *", "cors_origins"),
        ("serve --queue-limit -1", "queue_limit is -1"),
        ("serve --idle-unload 0", "idle_unload_s is 0"),
        ("serve --request-timeout nan", "request_timeout_s is nan"),
        ("serve --port 0 --models {file}", "model_folders: {file} is not a folder"),
        ("daemon --host 127.0.0.1:8401", "--host is '127.0.0.1:8401'; give an address"),
        ("daemon --host 'two words'", "--host is 'two words'; give an address"),
        ("daemon --port 70000", "daemon_port is 70000"),
        ("daemon --port 0 --cors-origin *", "cors_origins"),
        ("daemon --port 0 --upstream ftp://nowhere", "upstream: 'ftp://nowhere' is not the address"),
        ("daemon --port 0 --upstream http://user:secret@127.0.0.1", "upstream: the address has a name or a password"),
        ("daemon --upstream junk", "upstream: 'junk' has neither http:// nor a port"),
        ("daemon --port 0 --mcp-config /no/such/file", "/no/such/file"),
        ("events --after -1", "--after is -1; give 0"),
    ],
)
def test_an_invalid_command_line_is_one_line_with_the_next_step(tmp_path, arguments, message):
    file = tmp_path / "model.gguf"
    file.touch()
    ended = run_command(tmp_path, *shlex.split(arguments.format(file=file)))
    assert (ended.status, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"invalid-request: {message.format(file=file)}")
    assert "secret" not in ended.stderr
    assert not (tmp_path / "daemon").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        ("pull no-such", "model-not-found", ""),
        ("serve --port 0 --model no-such", "model-not-found", "loading no-such\n"),
        ("serve --port 0 --model tiny --memory-limit 0.001", "oom-unloaded", "loading tiny\n"),
        ("chat hello", "no-model-loaded", ""),
    ],
)
def test_a_failure_is_one_line_with_its_code(tiny_home, arguments, code, printed):
    # A lab of this machine may use the default port.
    ended = run_command(tiny_home, *arguments.split(), environ={"LMX_LAB_PORT": "9"})
    assert (ended.status, ended.stdout, ended.stderr.count("\n")) == (1, printed, 1)
    assert ended.stderr.startswith(f"{code}: ")


def test_without_arguments_the_help_is_printed(capsys):
    assert run([]) == 2
    shown = capsys.readouterr()
    assert "Exit status: 0" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("arguments", ["serve --port 0", "models", "bench --model m", "pull m"])
def test_a_missing_folder_with_models_is_an_error(tmp_path, arguments):
    nowhere = tmp_path / "nowhere"
    environ = {"LMX_LAB_MODEL_FOLDERS": f"{tmp_path}:{nowhere}"}
    ended = run_command(tmp_path, *arguments.split(), environ=environ)
    assert (ended.status, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"invalid-request: model_folders: {nowhere} is not a folder")


def test_an_unused_token_of_the_environment_is_reported(tmp_path):
    ended = run_command(tmp_path, "events", environ={"LMX_LAB_DAEMON_TOKEN": "t"})
    note, failed = ended.stderr.splitlines()
    assert ended.status == 1
    assert note.startswith("LMX_LAB_DAEMON_TOKEN is not used")
    assert failed.startswith("unreachable: no daemon of this user is running")


@pytest.mark.slow
def test_the_help_of_a_program_names_every_command(tmp_path):
    done = subprocess.run(
        [*PROGRAM, "--help"], capture_output=True, text=True, timeout=WAIT_S, env=environment(tmp_path), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in COMMANDS)


def test_ctrl_c_during_the_import_of_typer_has_no_traceback(tmp_path):
    """A module whose import never ends stands for the 0.2 s that the real one takes."""
    (tmp_path / "typer.py").write_text(BLOCKS)
    named = {**environment(tmp_path), "PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([*PROGRAM, "--help"], stdin=pipe, stdout=pipe, stderr=pipe, env=named) as process:
        assert process.stderr is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert process.stderr.read() == b""


def test_ctrl_c_during_the_imports_of_a_command_has_no_traceback(tmp_path, monkeypatch):
    (tmp_path / "psutil.py").write_text(BLOCKS)
    monkeypatch.syspath_prepend(tmp_path)
    for module in list(sys.modules):
        if module.partition(".")[0] == "psutil" or f"{module}.".startswith("lmx_lab.doctor."):
            monkeypatch.delitem(sys.modules, module)
    reading, writing = os.pipe()

    interrupt = signal_at("importing", signal.SIGINT)
    try:
        ended = run_command(tmp_path, "doctor", stdin=reading, meanwhile=interrupt)
    finally:
        os.close(reading)
        os.close(writing)
    assert (ended.status, ended.stdout, ended.stderr) == (130, "importing\n", "")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_a_full_disk_is_one_line_and_a_failure(tmp_path, arguments):
    with FULL.open("wb") as full:
        ended = run_command(tmp_path, *arguments, stdout=full)
        assert (ended.status, ended.stderr) == (1, "the output cannot be written: No space left on device\n")
        assert run_command(tmp_path, *arguments, stdout=full, stderr=full).status == 1


@pytest.mark.slow
def test_a_command_runs_with_closed_streams(tmp_path):
    command = f"{shlex.join(PROGRAM)} --version <&- >&- 2>&-"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=WAIT_S, env=environment(tmp_path), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_command_runs_with_one_closed_stream(tmp_path, closed):
    ended = run_command(tmp_path, "--version", **{closed: CLOSED})
    assert (ended.status, ended.stderr) == (0, "")
    assert ended.stdout.startswith("lmx-lab ") == (closed == "stderr")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_a_closed_pipe_prints_nothing(tmp_path, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = run_command(tmp_path, *arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (ended.status, ended.stderr) == (1, "")


def test_an_os_error_is_one_line_and_a_traceback_only_on_request(monkeypatch, capsys):
    def refused(_):
        Path("/dev/null/model").read_bytes()

    monkeypatch.setattr(application, "app", refused)
    assert run(["models"]) == 1
    assert capsys.readouterr().err == "Not a directory: /dev/null/model\n"
    monkeypatch.setenv("LMX_LAB_LOG_LEVEL", "debug")
    assert run(["models"]) == 1
    assert "Traceback" in capsys.readouterr().err


# --- help


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_valid_examples_and_exit_statuses(tmp_path, name):
    command = typer.main.get_command(application.app).commands[name]
    examples = [line for line in command.epilog.splitlines() if line.startswith(f"  lmx-lab {name}")]
    assert examples
    for example in examples:
        # The example ends before its explanation, or before a pipe.
        arguments = shlex.split(example.split("   ")[0].partition(" | ")[0])[2:]
        # The names are stored in the command, which other tests use.
        command.make_context(name, arguments or [], help_option_names=["--help", "-h"])
    assert "Exit status: 0" in command.epilog
    assert max(len(line) for line in command.epilog.splitlines() if line.startswith("  ")) <= 78


def test_the_options_of_the_server_are_in_sections_and_readable_at_80_columns(tmp_path):
    shown = run_command(tmp_path, "serve", "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [*(f"{title}:" for title in Serve.sections), "Options:"]
    assert shown.partition("\nOptions:\n")[2].split()[:2] == ["-h,", "--help"], "an option without a section"
    assert "  --port <int>           Port; 0 for any free one. By default 8400, or the\n" in shown


def test_the_help_has_examples_without_markup(capsys):
    assert run(["bench", "--help"]) == 0
    output = capsys.readouterr().out
    assert "pip install 'lmx-lab[lab]'" in output
    assert "lmx-lab bench --model smollm2-135m" in [line.strip() for line in output.splitlines()]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_shows_options_as_they_are_typed(capsys, name):
    """A switch takes no value, and an option that can be repeated takes one value at a time."""
    assert run([name, "-h"] if name else ["-h"]) == 0
    output = capsys.readouterr().out
    assert "--help" in output
    assert "<bool>" not in output
    assert "list[" not in output.partition("Options")[2]


def test_nothing_is_broken_on_this_machine(tiny_home):
    result = run_command(tiny_home, "doctor", "--json")
    assert (result.status, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["broken"] == 0
    assert {*document["findings"][0]} == {"topic", "verdict", "found", "means", "remedy"}
    topics = {finding["topic"] for finding in document["findings"]}
    assert {"python", "kernel", "mlx", "device", "memory", "blas", "disk", "models", "hub", "port", "labs"} <= topics


def test_an_event_as_json_is_ascii_and_can_be_parsed():
    data = {"text": "\x9b2J é \u202e", "nothing": None}
    event = Envelope(event="new.kind", seq=1, at="2026-11-21T10:00:00.123Z", stream_id="stm", data=data)
    assert as_line_of_json(event).isascii()
    assert Envelope.model_validate_json(as_line_of_json(event)) == event


def test_control_characters_in_an_error_are_escaped(monkeypatch, capsys):
    def fail(_):
        raise LabError("gone\x1b[2J")

    monkeypatch.setattr(application, "app", fail)
    assert run() == 1
    assert "gone\\x1b[2J" in capsys.readouterr().err


def state():
    root = logging.getLogger()
    streams = (sys.stdin, sys.stdout, sys.stderr)
    files = [(os.fstat(number).st_dev, os.fstat(number).st_ino) for number in range(3)]
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return dict(os.environ), Path.cwd(), sys.argv, streams, files, handlers, [*root.handlers], root.level


def test_a_command_leaves_the_process_of_the_tests_as_it_was(tmp_path, monkeypatch):
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
