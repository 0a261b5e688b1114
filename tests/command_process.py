"""Run ``lmx-lab`` in a process of its own, and send requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

from tests.command_line import WAIT_S, environment


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
        found = re.search(r"ready at http://127\.0\.0\.1:(\d+)", self.wait_for("ready at"))
        assert found
        return int(found[1])

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; return the exit status and the text on standard error."""
        self.process.send_signal(number)
        assert self.process.stderr is not None
        return self.process.wait(WAIT_S), self.process.stderr.read()

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
