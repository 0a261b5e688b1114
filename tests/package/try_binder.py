"""Run Binder's build steps in a separate environment, then its notebooks below a JupyterHub path: ``make binder``.

All files are under ``build/binder``. The memory and CPU limits are in environment variables, as JupyterHub sets them;
if control groups (version 1) can be created, memory is really limited. Prints the time and peak memory of each step.
The exit status is 1 if a notebook failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

import httpx2
import psutil

from tests.support.jupyter import NotebookError, execute, printed

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "build" / "binder"
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
# The packages of Binder's base image that matter here.
BASE = ("jupyterhub", "jupyterlab", "notebook")
PREFIX = "/user/someone/"
CPUS = 2
POLL_S = 0.1
START_S = 300.0
STOP_S = 30.0
FIRST_NOTEBOOK = "notebooks/00_quickstart.ipynb"
NOTEBOOKS = (
    FIRST_NOTEBOOK,
    "notebooks/01_models.ipynb",
    "notebooks/02_metrics.ipynb",
    "notebooks/03_rerank.ipynb",
    "notebooks/04_daemon.ipynb",
)


@dataclass(frozen=True, kw_only=True)
class JupyterBrowser:
    """A client of a Jupyter server."""

    url: str
    """Address of the server, with its base path and a trailing slash."""
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"token {self.token}"}

    def server_is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}api", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False

    def require_page(self, path: str) -> None:
        """Check that a page exists and needs the token.

        Raises:
            NotebookError: the page does not exist, or is shown without the token.
        """
        page = httpx2.get(f"{self.url}{path}", headers=self.headers, timeout=30)
        if page.status_code != 200:
            raise NotebookError(f"{path} is answered with {page.status_code}")
        anonymous = httpx2.get(f"{self.url}{path}", timeout=30)
        if anonymous.status_code not in (302, 403):
            raise NotebookError(f"{path} is answered with {anonymous.status_code} without a token")

    def run_notebook(self, root: Path, path: str) -> str:
        """Run all cells of a notebook in a new kernel, which keeps running, and return the kernel's id.

        Raises:
            NotebookError: a cell raised an exception, or the kernel died.
        """
        body = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        created = httpx2.post(f"{self.url}api/sessions", json=body, headers=self.headers, timeout=60)
        kernel: str = created.json()["kernel"]["id"]
        for cell in json.loads((root / path).read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                execute(self.url, self.headers, kernel, "".join(cell["source"]))
        return kernel

    def value(self, kernel: str, expression: str) -> str:
        """Return the text of an expression, evaluated in a kernel."""
        return printed(execute(self.url, self.headers, kernel, f"print({expression})")).strip()

    def end_kernels(self) -> None:
        with httpx2.Client(base_url=self.url, headers=self.headers, timeout=60) as http:
            for session in http.get("api/sessions").json():
                http.delete(f"api/sessions/{session['id']}")


class PeakMemory:
    """Measure the memory of a process and its descendants, in bytes, as proportional shares (PSS)."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def take_peak(self) -> int:
        """Return the highest value since the last call."""
        peak_bytes, self._peak = self._peak, 0
        return peak_bytes

    def current(self) -> int:
        total = 0
        with contextlib.suppress(psutil.Error):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
        return total

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self._peak = max(self._peak, self.current())


@dataclass(kw_only=True)
class Environment:
    """A folder in place of Binder's image, and the limits of its container."""

    folder: Path
    memory_bytes: int
    rows: list[tuple[str, float, int]] = field(default_factory=list)
    """Name, duration in seconds and peak memory in bytes of each step."""

    @property
    def repository(self) -> Path:
        return self.folder / "home" / "repository"

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables, which inherit only the settings of the package index."""
        kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "LANG", "LC_"))}
        proxies = {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy")}
        path = os.pathsep.join((str(self.folder / "env" / "bin"), "/usr/local/bin", "/usr/bin", "/bin"))
        return {**kept, **proxies, "HOME": str(self.folder / "home"), "PATH": path, "PIP_NO_CACHE_DIR": "1"}

    def step(self, name: str, *command: str | Path) -> None:
        """Run a command in the repository, and add a row with its time and peak memory."""
        started = time.monotonic()
        with (
            subprocess.Popen(command, cwd=self.repository, env=self.environ) as process,
            PeakMemory(process.pid) as peak,
        ):
            code = process.wait()
            self.add_row(name, started, peak.take_peak())
        if code:
            sys.exit(f"{name} failed with exit status {code}")

    def add_row(self, name: str, started: float, peak_bytes: int) -> None:
        seconds = time.monotonic() - started
        self.rows.append((name, seconds, peak_bytes))
        print(f"-- {name}: {seconds:.0f} s, {peak_bytes / 1e6:.0f} MB at peak", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", default=NOTEBOOKS, help="paths in the repository")
    parser.add_argument("--memory-gib", type=float, default=2.0)
    parser.add_argument("--together", action="store_true", help="leave each kernel running while the next one works")
    parser.add_argument("--built", action="store_true", help="use the environment of the last run")
    parser.add_argument("--folder", type=Path, default=TARGET)
    chosen = parser.parse_args(arguments)
    environment = Environment(folder=chosen.folder.absolute(), memory_bytes=round(chosen.memory_gib * 2**30))
    if not chosen.built:
        build(environment)
    failed = run(environment, chosen.notebooks, together=chosen.together)
    report(environment)
    return 1 if failed else 0


def build(environment: Environment) -> None:
    shutil.rmtree(environment.folder, ignore_errors=True)
    copy_checkout(environment.repository)
    python = environment.folder / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    environment.step("environment", sys.executable, "-m", "venv", environment.folder / "env")
    environment.step("packages of Binder", *pip, *BASE)
    environment.step("requirements.txt", *pip, "-r", "binder/requirements.txt")
    environment.step("pip check", python, "-m", "pip", "check")
    environment.step("postBuild", "binder/postBuild")


def copy_checkout(target: Path) -> None:
    """Copy all files of the working tree that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run(environment: Environment, notebooks: Sequence[str], *, together: bool) -> list[str]:
    """Run the notebooks one after the other, each in its own kernel; return the paths of those that failed."""
    failed = []
    with limit_memory(environment.memory_bytes) as prefix, serve(environment, prefix) as (browser, peak):
        browser.require_page(f"lab/tree/{FIRST_NOTEBOOK}")
        for path in notebooks:
            started = time.monotonic()
            try:
                check_links(browser, browser.run_notebook(environment.repository, path))
            except NotebookError as error:
                failed.append(path)
                print(f"{path}: {error}", file=sys.stderr)
            environment.add_row(path, started, peak.take_peak())
            if not together:
                browser.end_kernels()
                # Do not count the memory of the ended kernel for the next one.
                peak.take_peak()
    return failed


def check_links(browser: JupyterBrowser, kernel: str) -> None:
    """Check that the lab's link for the browser leads through the proxy to the lab's pages."""
    link = browser.value(kernel, "lmx_lab.current().proxy_url")
    if not link.startswith(f"{PREFIX}proxy/"):
        raise NotebookError(f"the lab's link is {link!r}")
    for page in ("", "docs", "openapi.json"):
        browser.require_page(f"{link.removeprefix(PREFIX)}{page}")


@contextlib.contextmanager
def limit_memory(memory_bytes: int) -> Iterator[tuple[str, ...]]:
    """Yield a command prefix that limits memory; it is empty if no control group can be created."""
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
        print(f"-- processes killed for lack of memory: {facts.get('oom_kill', 'unknown')}")
    finally:
        group.rmdir()


@contextlib.contextmanager
def serve(environment: Environment, prefix: Sequence[str]) -> Iterator[tuple[JupyterBrowser, PeakMemory]]:
    """Start JupyterLab as Binder does, but without JupyterHub's login."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    token = secrets.token_hex(16)
    variables = {
        "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
        "JUPYTERHUB_USER": "someone",
        "JUPYTER_TOKEN": token,
        "MEM_LIMIT": str(environment.memory_bytes),
        "CPU_LIMIT": str(float(CPUS)),
    }
    options = (f"--ServerApp.base_url={PREFIX}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0")
    command = [*prefix, "binder/start", "jupyter", "lab", "--no-browser", "--allow-root", *options]
    started = time.monotonic()
    log = environment.folder / "server.log"
    with log.open("wb") as output:
        environ = environment.environ | variables
        server = subprocess.Popen(command, cwd=environment.repository, env=environ, stdout=output, stderr=output)
    browser = JupyterBrowser(url=f"http://127.0.0.1:{port}{PREFIX}", token=token)
    try:
        with PeakMemory(server.pid) as peak:
            deadline = time.monotonic() + START_S
            while not browser.server_is_ready():
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"JupyterLab did not start:\n{log.read_text()}")
                time.sleep(POLL_S)
            environment.add_row("start", started, peak.take_peak())
            yield browser, peak
            browser.end_kernels()
    finally:
        processes = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        server.kill()
        server.wait()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, STOP_S)


def report(environment: Environment) -> None:
    wide = max(len(name) for name, _, _ in environment.rows)
    print(f"\n{'step':<{wide}}  seconds  peak MB")
    for name, seconds, peak in environment.rows:
        print(f"{name:<{wide}}  {seconds:7.0f}  {peak / 1e6:7.0f}")


if __name__ == "__main__":
    sys.exit(main())
