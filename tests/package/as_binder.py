"""``make binder``: Binder's steps in an environment of their own, then its notebooks under a Hub's prefix.

Everything lies under ``build/binder``. The limits of memory and CPU are told as a Hub tells them; where control groups
of version 1 can be made, memory is really limited. Prints what each step took; ends with 1 if a notebook failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from tests.package.jupyter_front import Front, NotebookError

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "build" / "binder"
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
# What Binder's base image has before it reads a repository, as far as it matters here.
BASE = ("jupyterhub", "jupyterlab", "notebook")
PREFIX = "/user/someone/"
CPUS = 2
LOOK_S = 0.1
START_S = 300.0
STOP_S = 30.0
OPENED = "notebooks/00_quickstart.ipynb"
NOTEBOOKS = (
    OPENED,
    "notebooks/01_models.ipynb",
    "notebooks/02_metrics.ipynb",
    "notebooks/03_rerank.ipynb",
    "notebooks/04_daemon.ipynb",
)


class PeakMemory:
    """Of a process and all its descendants, in bytes: proportional shares, so that nothing counts twice."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def take(self) -> int:
        """The highest since the last call."""
        most, self._most = self._most, 0
        return most

    def now(self) -> int:
        total = 0
        with contextlib.suppress(psutil.Error):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
        return total

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._most = max(self._most, self.now())


@dataclass(kw_only=True)
class Session:
    """What stands for the image and the container that runs it."""

    folder: Path
    memory_bytes: int
    rows: list[tuple[str, float, int]] = field(default_factory=list)
    """Step, seconds, peak bytes."""

    @property
    def repository(self) -> Path:
        return self.folder / "home" / "repository"

    @property
    def environ(self) -> dict[str, str]:
        """Nothing of the one who builds but the way to the package index."""
        kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "LANG", "LC_"))}
        proxies = {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy")}
        path = os.pathsep.join((str(self.folder / "env" / "bin"), "/usr/local/bin", "/usr/bin", "/bin"))
        return {**kept, **proxies, "HOME": str(self.folder / "home"), "PATH": path, "PIP_NO_CACHE_DIR": "1"}

    def step(self, name: str, *command: str | Path) -> None:
        """Run it in the repository, and note what it took."""
        started = time.monotonic()
        with (
            subprocess.Popen(command, cwd=self.repository, env=self.environ) as process,
            PeakMemory(process.pid) as peak,
        ):
            code = process.wait()
            self.note(name, started, peak.take())
        if code:
            sys.exit(f"{name} ended with {code}")

    def note(self, name: str, started: float, peak_bytes: int) -> None:
        seconds = time.monotonic() - started
        self.rows.append((name, seconds, peak_bytes))
        print(f"-- {name}: {seconds:.0f} s, {peak_bytes / 1e6:.0f} MB at its peak", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", default=NOTEBOOKS, help="paths in the repository")
    parser.add_argument("--memory-gib", type=float, default=2.0)
    parser.add_argument("--together", action="store_true", help="leave each kernel running while the next one works")
    parser.add_argument("--built", action="store_true", help="take the environment of the last run")
    parser.add_argument("--folder", type=Path, default=TARGET)
    chosen = parser.parse_args(arguments)
    session = Session(folder=chosen.folder.absolute(), memory_bytes=round(chosen.memory_gib * 2**30))
    if not chosen.built:
        build(session)
    failed = run(session, chosen.notebooks, together=chosen.together)
    report(session)
    return 1 if failed else 0


def build(session: Session) -> None:
    shutil.rmtree(session.folder, ignore_errors=True)
    copy_checkout(session.repository)
    python = session.folder / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    session.step("environment", sys.executable, "-m", "venv", session.folder / "env")
    session.step("what Binder has", *pip, *BASE)
    session.step("requirements.txt", *pip, "-r", "binder/requirements.txt")
    session.step("pip check", python, "-m", "pip", "check")
    session.step("postBuild", "binder/postBuild")


def copy_checkout(target: Path) -> None:
    """What git knows of, and what it would not ignore, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run(session: Session, notebooks: Sequence[str], *, together: bool) -> list[str]:
    """The notebooks one after the other, each in a kernel of its own; the names of those that failed."""
    failed = []
    with limited(session.memory_bytes) as join, serving(session, join) as (front, peak):
        front.require_page(f"lab/tree/{OPENED}")
        for path in notebooks:
            started = time.monotonic()
            try:
                shown = front.run_notebook(session.repository, path)
                check_links(front, shown.kernel)
            except NotebookError as error:
                failed.append(path)
                print(f"{path}: {error}", file=sys.stderr)
            session.note(path, started, peak.take())
            if not together:
                front.end_kernels()
                # What the ended kernel took is no part of the next one's.
                peak.take()
    return failed


def check_links(front: Front, kernel: str) -> None:
    """The lab's own link for the browser leads through the proxy to the lab's pages, and only there."""
    link = front.value(kernel, "lmx_lab.current().proxy_url")
    if not link.startswith(f"{PREFIX}proxy/"):
        raise NotebookError(f"the lab's link is {link!r}")
    for page in ("", "docs", "openapi.json"):
        front.require_page(f"{link.removeprefix(PREFIX)}{page}")


@contextlib.contextmanager
def limited(memory_bytes: int) -> Iterator[tuple[str, ...]]:
    """A command that runs another one within the limit; nothing where no control group can be made."""
    try:
        group = Path(tempfile.mkdtemp(prefix="lmx-lab-binder-", dir=MEMORY_GROUPS))
        (group / "memory.limit_in_bytes").write_text(str(memory_bytes))
    except OSError as error:
        print(f"-- memory is measured but not limited: {error}")
        yield ()
        return
    try:
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        facts = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        print(f"-- processes ended for memory: {facts.get('oom_kill', 'unknown')}")
    finally:
        group.rmdir()


@contextlib.contextmanager
def serving(session: Session, join: Sequence[str]) -> Iterator[tuple[Front, PeakMemory]]:
    """JupyterLab as Binder starts it, but for the Hub's login."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    token = secrets.token_hex(16)
    told = {
        "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
        "JUPYTERHUB_USER": "someone",
        "JUPYTER_TOKEN": token,
        "MEM_LIMIT": str(session.memory_bytes),
        "CPU_LIMIT": str(float(CPUS)),
    }
    options = (f"--ServerApp.base_url={PREFIX}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0")
    command = [*join, "binder/start", "jupyter", "lab", "--no-browser", "--allow-root", *options]
    started = time.monotonic()
    log = session.folder / "server.log"
    with log.open("wb") as output:
        server = start(command, session, told, output.fileno())
    front = Front(url=f"http://127.0.0.1:{port}{PREFIX}", token=token)
    try:
        with PeakMemory(server.pid) as peak:
            deadline = time.monotonic() + START_S
            while not front.answers():
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"JupyterLab did not start:\n{log.read_text()}")
                time.sleep(LOOK_S)
            session.note("start", started, peak.take())
            yield front, peak
            front.end_kernels()
    finally:
        family = descendants(server.pid)
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        server.kill()
        server.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, STOP_S)


def descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def start(command: Sequence[str], session: Session, told: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=session.repository, env=session.environ | told, stdout=output, stderr=output)


def report(session: Session) -> None:
    wide = max(len(name) for name, _, _ in session.rows)
    print(f"\n{'step':<{wide}}  seconds  peak MB")
    for name, seconds, peak in session.rows:
        print(f"{name:<{wide}}  {seconds:7.0f}  {peak / 1e6:7.0f}")


if __name__ == "__main__":
    sys.exit(main())
