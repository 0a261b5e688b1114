"""Jupyter beside the lab: the Python of its kernels, and jupyter-server-proxy in its server.

A notebook can run in another environment than the one in which this is asked. So each is asked itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from lmx_lab.doctor.finding import Finding
from lmx_lab.settings import Settings

ANSWER_S = 3.0
KERNEL = "python3"
"""The name of the kernel that a new notebook gets."""
PROXY = "jupyter_server_proxy"
LAB = "lmx_lab"
WITHOUT_PROXY = "browsers elsewhere, as on a Hub or on Binder, do not reach the lab through Jupyter"
# For any Python 3.8 or newer.
ASK = """
import importlib.metadata as metadata, importlib.util as util, json, sys
try:
    ipykernel = metadata.version("ipykernel")
except metadata.PackageNotFoundError:
    ipykernel = None
there = {name: util.find_spec(name) is not None for name in sys.argv[1:]}
print(json.dumps({"version": ".".join(map(str, sys.version_info[:3])), "ipykernel": ipykernel, **there}))
"""


# --- the kernel


def examine_kernel(_: Settings) -> Iterator[Finding]:
    """Whether a new notebook finds the lab, and whether its ipykernel is new enough."""
    file = _kernel_file()
    python = _python_of_kernel(file) if file else sys.executable
    try:
        answer = _asked(python)
    except subprocess.TimeoutExpired:
        found = f"{python}, which new notebooks run, did not say within {ANSWER_S:g} s whether it has the lab"
        yield Finding(topic="kernel", verdict="note", found=found, remedy="lmx-lab doctor, when this machine rests")
        return
    install = f"{sys.executable} -m ipykernel install --user --name {KERNEL}"
    if answer is None:
        yield Finding(
            topic="kernel",
            verdict="bad",
            found=f"{file} starts {python}, which does not run",
            means="new notebooks get no kernel",
            remedy=install,
        )
        return
    if not answer[LAB]:
        yield Finding(
            topic="kernel",
            verdict="bad",
            found=f"new notebooks run {python} (Python {answer['version']}), and the lab is in {sys.executable}",
            means="import lmx_lab fails there",
            remedy=f"{install}, or {python} -m pip install 'lmx-lab[lab]'",
        )
        return
    if file is not None or answer["ipykernel"] is not None:
        found = f"new notebooks run {python} (Python {answer['version']}), which has the lab"
        yield Finding(topic="kernel", verdict="fine", found=found)
    yield _ipykernel(python, answer["ipykernel"])


def _ipykernel(python: str, version: str | None) -> Finding:
    least = _least("ipykernel")
    if version is None:
        return Finding(
            topic="ipykernel",
            verdict="note",
            found=f"not installed in {python}",
            means="there are no notebooks without it",
            remedy="pip install 'lmx-lab[lab]'",
        )
    if _numbers(version) >= _numbers(least):
        return Finding(topic="ipykernel", verdict="fine", found=version)
    return Finding(
        topic="ipykernel",
        verdict="bad",
        found=f"{version} in {python} is older than {least}",
        means="a lab on the kernel's own loop was never tried with it, and may not answer while a cell waits",
        remedy=f"{python} -m pip install -U 'ipykernel>={least}'",
    )


def _kernel_file() -> Path | None:
    """The first of that name on Jupyter's path; without one, Jupyter starts its own Python."""
    try:
        from jupyter_core.paths import jupyter_path
    except ImportError:
        return None
    files = [Path(folder) / KERNEL / "kernel.json" for folder in jupyter_path("kernels")]
    return next((file for file in files if file.exists()), None)


def _python_of_kernel(file: Path) -> str:
    """What it starts; a bare ``python`` is the one of the Jupyter server, which is taken to be this one."""
    try:
        command = str(json.loads(file.read_bytes())["argv"][0])
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return "nothing"
    return command if os.path.isabs(command) else sys.executable


def _asked(python: str) -> dict[str, Any] | None:
    """What a Python says of itself; None if it does not run.

    Raises:
        subprocess.TimeoutExpired: it takes too long.
    """
    if python == sys.executable:
        version = ".".join(map(str, sys.version_info[:3]))
        return {"version": version, "ipykernel": _version("ipykernel"), LAB: True}
    try:
        # From a folder that has no packages in it: a kernel's is another one, too.
        done = subprocess.run(
            [python, "-c", ASK, LAB],
            capture_output=True, text=True, check=False, timeout=ANSWER_S, cwd=os.sep,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError):
        return None
    return answer


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _least(package: str) -> str:
    """The oldest version that the lab's own metadata allow."""
    for requirement in metadata.requires("lmx-lab") or ():
        if found := re.match(rf"{package}>=([\d.]+)", requirement):
            return found[1]
    return "0"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


# --- the proxy


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Jupyter server of this user that runs."""

    pid: int
    url: str
    token: str

    @property
    def python(self) -> str:
        """The interpreter as it was called: of a virtual environment, not the one behind its link."""
        try:
            command = psutil.Process(self.pid).cmdline()[:1]
        except psutil.Error:
            command = []
        return command[0] if command and os.path.isabs(command[0]) else "its python"


def examine_proxy(_: Settings) -> Iterator[Finding]:
    here = importlib.util.find_spec(PROXY) is not None
    servers = _servers()
    for server in servers:
        yield _proxy_of(server, here=here)
    if servers:
        return
    if here:
        version = metadata.version("jupyter-server-proxy")
        yield Finding(topic="proxy", verdict="fine", found=f"jupyter-server-proxy {version}; no Jupyter server runs")
    elif importlib.util.find_spec("jupyter_server") is not None:
        yield Finding(
            topic="proxy",
            verdict="note",
            found="jupyter-server-proxy is not installed",
            means=WITHOUT_PROXY,
            remedy=f"{sys.executable} -m pip install jupyter-server-proxy",
        )


def _proxy_of(server: Server, *, here: bool) -> Finding:
    name = f"the Jupyter server at {server.url} (process {server.pid})"
    status = _status(f"{server.url}server-proxy/servers-info", server.token)
    if status == 200:
        return Finding(topic="proxy", verdict="fine", found=f"{name} has jupyter-server-proxy")
    if status != 404:
        said = "does not answer" if status is None else f"answers with status {status}"
        found = f"{name} {said}, so it is not known whether it has jupyter-server-proxy"
        return Finding(topic="proxy", verdict="note", found=found, means=f"without it {WITHOUT_PROXY}")
    elsewhere = f", though {sys.executable} has it" if here and server.python != sys.executable else ""
    # There the proxy is the only way in.
    is_needed = any(name.startswith(("JUPYTERHUB_", "BINDER_")) for name in os.environ)
    return Finding(
        topic="proxy",
        verdict="bad" if is_needed else "note",
        found=f"{name} has no jupyter-server-proxy{elsewhere}",
        means=WITHOUT_PROXY,
        remedy=f"{server.python} -m pip install jupyter-server-proxy, and start that server anew",
    )


def _servers() -> list[Server]:
    try:
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return []
    found = []
    for file in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json")):
        try:
            said = json.loads(file.read_bytes())
            server = Server(pid=int(said["pid"]), url=str(said["url"]), token=str(said.get("token") or ""))
        except (OSError, ValueError, TypeError, KeyError):
            continue
        # Others are left over from servers that were killed.
        if psutil.pid_exists(server.pid):
            found.append(server)
    return found


def _status(url: str, token: str) -> int | None:
    try:
        request = urllib.request.Request(url, headers={"authorization": f"token {token}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ANSWER_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code
    except (OSError, ValueError):
        return None
