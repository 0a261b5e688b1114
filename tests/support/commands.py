"""Run ``lmx-lab``: in this process with its output recorded, or in a process of its own."""

from __future__ import annotations

import codecs
import contextlib
import http.client
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NoReturn, TextIO, cast

import pytest

from lmx_lab.cli import INTERRUPTED, process, terminal
from lmx_lab.cli.app import run

WAIT_S = 60.0
LOST_OUTPUT = 120
"""Exit status of a Python process whose last output cannot be written."""
CLOSED = -1
"""Used instead of a descriptor: the command starts without that stream, as after ``>&-``."""
KEPT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""``lmx-lab serve`` sets the threshold for the life of its process, unless the environment has one."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a command with this home and a terminal of 80 columns."""
    return {**os.environ, "LMX_LAB_HOME": str(home), "COLUMNS": "80", "HF_HOME": str(home / "hub")}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    status: int
    stdout_bytes: bytes
    stderr_bytes: bytes

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode()

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode()


class Running:
    """A running command, as seen by the second thread, which reads its output, types and sends signals."""

    def __init__(self, reading: int) -> None:
        """
        Args:
            reading: The other end of the command's output. If it is a terminal, what is written to it is typed.
        """
        self._reading = reading
        self._closed = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._at = 0
        self._signalled = False
        self.ended = threading.Event()
        """Set when the command has ended."""
        self.output = ""
        """Everything that was read so far."""

    def wait_for(self, text: str) -> str:
        """Read until this text; return the output between it and the text of the previous call."""
        while (found := self.output.find(text, self._at)) < 0:
            assert self._read(), f"no {text!r} in {self.output!r}"
        before, self._at = self.output[self._at : found], found + len(text)
        return before

    @property
    def port(self) -> int:
        """The port of ``lmx-lab serve``."""
        while not (found := re.search(r"ready at http://127\.0\.0\.1:(\d+)", self.output)):
            assert self._read(), self.output
        return int(found[1])

    def _read(self) -> bool:
        """Read a piece of the output. Returns False at its end."""
        readable, _, _ = select.select([self._reading], [], [], WAIT_S)
        assert readable, f"nothing was written for {WAIT_S:g} s after {self.output!r}"
        # Reading from a terminal that was closed raises an error.
        with contextlib.suppress(OSError):
            if piece := os.read(self._reading, 65_536):
                self.output += self._decoder.decode(piece)
                return True
        return False

    def type(self, text: str) -> None:
        os.write(self._reading, text.encode())

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the main thread, which handles it as a process does."""
        assert not self.ended.is_set(), f"the command has ended: {self.output!r}"
        self._signalled = True
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, number)

    def close_output(self) -> None:
        """Close the other end of the output, so that the command can no longer write to it."""
        if not self._closed:
            self._closed = True
            os.close(self._reading)

    def finish(self, *, failed: bool) -> None:
        """Read the rest of the output. If the test has failed, interrupt the command."""
        if failed and not self._signalled and not self.ended.is_set():
            self.send_signal(signal.SIGINT)
        while not self._closed and self._read():
            pass


Meanwhile = Callable[[Running], None]


def signal_at(text: str, number: signal.Signals) -> Meanwhile:
    """Return a function that sends a signal as soon as the command has written this text."""

    def send(running: Running) -> None:
        running.wait_for(text)
        running.send_signal(number)

    return send


def run_command(
    home: Path,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    stdin: int | str = "",
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    encoding: str = "utf-8",
    meanwhile: Meanwhile | None = None,
    terminal: bool = False,
) -> Ended:
    """Run a command in this process.

    Args:
        environ: Additional environment variables.
        stdin: Content of the standard input, or its descriptor; not used with a terminal.
        stdout: File or descriptor for standard output, or ``CLOSED``; by default the output is returned.
        stderr: The same for standard error.
        encoding: Encoding of standard output.
        meanwhile: Called on another thread while the command runs, to read the output.
        terminal: Give the command a terminal, whose other end ``meanwhile`` reads and types to.
    """
    assert threading.current_thread() is threading.main_thread(), "signals are handled in the main thread"
    named = {**environment(home), **KEPT_MALLOC, **({"TERM": "dumb"} if terminal else {}), **(environ or {})}
    with contextlib.ExitStack() as stack:
        said, failed, typed = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        if isinstance(stdin, str):
            typed.write(stdin.encode())
            typed.seek(0)
        files = (typed if isinstance(stdin, str) else stdin, stdout or said, stderr or failed)
        streams = [file if isinstance(file, int) else file.fileno() for file in files]
        stack.enter_context(_as_in_a_process([*arguments], named))
        if meanwhile is None:
            status = _run(streams, encoding)
            said.seek(0)
            written = said.read()
        else:
            status, written = _run_beside(
                streams, encoding, meanwhile, terminal=terminal, keep_output=stdout is not None
            )
        failed.seek(0)
        return Ended(status=status, stdout_bytes=written, stderr_bytes=failed.read())


def _run_beside(
    streams: list[int], encoding: str, meanwhile: Meanwhile, *, terminal: bool, keep_output: bool
) -> tuple[int, bytes]:
    """Run the command, and call the function on another thread. Its failure is raised here.

    Args:
        keep_output: Leave standard output as it is, also with a terminal.
    """
    reading, own = pty.openpty() if terminal else os.pipe()
    if terminal:
        streams = [own, streams[1] if keep_output else own, own]
    else:
        streams[1] = own
    running, failures = Running(reading), list[BaseException]()

    def beside() -> None:
        try:
            meanwhile(running)
        except BaseException as exc:
            failures.append(exc)
        running.finish(failed=bool(failures))

    thread = threading.Thread(target=beside, name="test beside a command")
    thread.start()
    try:
        status = _run(streams, encoding)
    finally:
        running.ended.set()
        os.close(own)
        thread.join()
        running.close_output()
    if failures:
        raise failures[0]
    return status, running.output.encode()


def _run(streams: list[int], encoding: str) -> int:
    """Run the command with the descriptors 0, 1 and 2 and the streams of ``sys``, as Python sets them at its start."""
    outside = sys.stdin, sys.stdout, sys.stderr
    for stream in outside[1:]:
        stream.flush()
    saved = [os.dup(number) for number in range(3)]
    try:
        for number, descriptor in enumerate(streams):
            if descriptor != CLOSED:
                os.dup2(descriptor, number)
        sys.stdin = _stream(0, "r", encoding)
        sys.stdout = _stream(1, "w", encoding, by_line=os.isatty(1))
        sys.stderr = _stream(2, "w", encoding, "backslashreplace", by_line=True)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if streams[number] == CLOSED:
                getattr(sys, name).close()
                setattr(sys, name, None)
                os.close(number)
        try:
            status = run()
        except KeyboardInterrupt:
            status = INTERRUPTED
        try:
            # Python flushes the output at its end.
            sys.stdout.flush()
        except OSError:
            status = LOST_OUTPUT
        return status
    finally:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.close()
        sys.stdin, sys.stdout, sys.stderr = outside
        for number, descriptor in enumerate(saved):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _stream(number: int, mode: str, encoding: str, errors: str = "strict", *, by_line: bool = False) -> TextIO:
    buffering = 1 if by_line else -1
    return cast(TextIO, open(number, mode, buffering, encoding=encoding, errors=errors, closefd=False))


@contextlib.contextmanager
def _as_in_a_process(arguments: list[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Give the command its own arguments, environment, working folder, signals, logging and consoles."""

    def killed(number: int, frame: object) -> NoReturn:
        raise SystemExit(-number)

    environ_before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    root = logging.getLogger()
    log_handlers = root.handlers
    known = [logger for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    levels = [(logger, logger.level) for logger in (root, *known)]
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(Path.cwd()):
        patch.setattr(sys, "argv", ["lmx-lab", *arguments])
        # Some seconds after a signal it ends the process, which would be the one that runs the tests.
        patch.setattr(process, "_end_late", lambda: None)
        # Otherwise the program would be named after the module that runs the tests.
        patch.setattr(sys.modules["__main__"], "__package__", "", raising=False)
        try:
            _set_environment(environ)
            # Signals that end a process end only the command.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, killed)
            root.handlers = []
            root.setLevel(logging.WARNING)
            yield
        finally:
            for handler in root.handlers:
                handler.close()
            root.handlers = log_handlers
            for logger, level in levels:
                logger.setLevel(level)
            for number, before in handlers.items():
                signal.signal(number, before)
            _set_environment(environ_before)
            # Text that could not be written, and the state that the output is closed, are forgotten.
            for console in (terminal.out, terminal.err):
                console.quiet = True
                console.print()
                console.quiet = False


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


class Serving:
    """``lmx-lab serve``, or another command, in a process of its own, with what it prints."""

    def __init__(self, home: Path, *arguments: str, command: str = "serve", before: Sequence[str] = ()) -> None:
        """
        Args:
            before: Words before the command, such as ``ip netns exec``.
        """
        whole = [*before, str(Path(sys.executable).with_name("lmx-lab")), command, *arguments]
        self.process = subprocess.Popen(
            whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(home)
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, text: str) -> str:
        while text not in self.output:
            line = self._lines.get(timeout=WAIT_S)
            assert line, (self.output, self.process.stderr and self.process.stderr.read())
            self.output += line
        return self.output

    @property
    def port(self) -> int:
        found = re.search(r"ready at http://(?:[\d.]+|\[::1\]):(\d+)", self.wait_for("ready at"))
        assert found, self.output
        return int(found[1])

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; return the exit status and the text on standard error. Then ``output`` is complete."""
        self.process.send_signal(number)
        assert self.process.stderr is not None
        ended = self.process.wait(WAIT_S), self.process.stderr.read()
        self._reader.join()
        while not self._lines.empty():
            self.output += self._lines.get()
        return ended

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._reader.join()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def serving(home: Path, *arguments: str, command: str = "serve", before: Sequence[str] = ()) -> Iterator[Serving]:
    server = Serving(home, *arguments, command=command, before=before)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def request(
    port: int, method: str, path: str, body: object = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        sent = {"content-type": "application/json", **headers}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        yield connection.getresponse()
    finally:
        connection.close()


def status(port: int, path: str, **headers: str) -> int:
    with request(port, "GET", path, **headers) as response:
        return response.status
