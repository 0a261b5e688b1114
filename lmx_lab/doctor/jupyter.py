"""Check Jupyter: the Python that notebooks run, and jupyter-server-proxy in each Jupyter server.

Notebooks and Jupyter servers can run in environments other than that of this process, so each is queried directly.
"""

from __future__ import annotations

import contextlib
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

from lmx_lab.doctor import Finding
from lmx_lab.extras import install_command, installed_version
from lmx_lab.settings import Settings

try:
    from jupyter_core import paths
except ImportError:  # Jupyter is optional.
    paths = None  # type: ignore[assignment]

KERNEL = "python3"
"""The kernel of a new notebook."""
LAB = "lmx_lab"
WITHOUT_PROXY = "browsers on other machines, as with JupyterHub or Binder, cannot reach the lab through Jupyter"


# --- the kernel


def check_kernel(_: Settings) -> Iterator[Finding]:
    """Check that new notebooks can import ``lmx_lab``, and that their ipykernel is new enough."""
    # The first kernel specification on Jupyter's path. Without one, Jupyter uses its own Python.
    folders = [] if paths is None else paths.jupyter_path("kernels")
    files = (Path(folder) / KERNEL / "kernel.json" for folder in folders)
    file = next((file for file in files if file.exists()), None)
    python: str | None = sys.executable
    if file is not None:
        try:
            command = str(json.loads(file.read_bytes())["argv"][0])
            # A bare ``python`` is the Python of the Jupyter server, which is assumed to be this one.
            python = command if os.path.isabs(command) else sys.executable
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            python = None
    try:
        answer = _query_python(python) if python else None
    except subprocess.TimeoutExpired as exc:
        found = f"{python}, the Python of new notebooks, did not answer within {exc.timeout:g} s"
        remedy = "run lmx-lab doctor again when the machine is less busy"
        yield Finding(topic="kernel", verdict="note", found=found, remedy=remedy)
        return
    install = f"{sys.executable} -m ipykernel install --user --name {KERNEL}"
    if python is None or answer is None:
        yield Finding(
            topic="kernel",
            verdict="bad",
            found=f"{file} starts {python}, which does not run" if python else f"{file} names no program to start",
            means="new notebooks cannot start a kernel",
            remedy=install,
        )
        return
    found = f"new notebooks run {python} (Python {answer['version']})"
    if not answer[LAB]:
        yield Finding(
            topic="kernel",
            verdict="bad",
            found=f"{found}, but lmx-lab is installed in {sys.executable}",
            means="import lmx_lab fails in new notebooks",
            remedy=f"{install}, or {python} -m {install_command('ipykernel')}",
        )
        return
    if file is not None or answer["ipykernel"] is not None:
        yield Finding(topic="kernel", verdict="fine", found=f"{found}, where lmx-lab is installed")
    # The lower bound in the requirements of lmx-lab.
    bounds = (re.match(r"ipykernel>=([\d.]+)", requirement) for requirement in metadata.requires("lmx-lab") or ())
    least = next((bound[1] for bound in bounds if bound), "0")
    version: str | None = answer["ipykernel"]
    if version is None:
        yield Finding(
            topic="ipykernel",
            verdict="note",
            found=f"not installed in {python}",
            means="notebooks cannot run without it",
            remedy=install_command("ipykernel"),
        )
    elif _parse_version(version) >= _parse_version(least):
        yield Finding(topic="ipykernel", verdict="fine", found=version)
    else:
        yield Finding(
            topic="ipykernel",
            verdict="bad",
            found=f"{version} in {python} is older than {least}",
            means="a lab in the kernel is not tested with it and may not answer while a cell waits",
            remedy=f"{python} -m pip install -U 'ipykernel>={least}'",
        )


def _query_python(python: str) -> dict[str, Any] | None:
    """Return the version of a Python and what is installed in it, or ``None`` if it does not run.

    Raises:
        subprocess.TimeoutExpired: It did not answer in time.
    """
    if python == sys.executable:
        version = ".".join(map(str, sys.version_info[:3]))
        return {"version": version, "ipykernel": installed_version("ipykernel"), LAB: True}
    # Runs on Python 3.8 or newer.
    script = """
import importlib.metadata as metadata, importlib.util as util, json, sys
try:
    ipykernel = metadata.version("ipykernel")
except metadata.PackageNotFoundError:
    ipykernel = None
there = {name: util.find_spec(name) is not None for name in sys.argv[1:]}
print(json.dumps({"version": ".".join(map(str, sys.version_info[:3])), "ipykernel": ipykernel, **there}))
"""
    try:
        # A kernel starts in a different folder than this process, so packages in the current folder must not be found.
        done = subprocess.run(
            [python, "-c", script, LAB],
            capture_output=True, text=True, check=False, timeout=3, cwd=os.sep,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError):
        return None
    return answer


def _parse_version(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


# --- the proxy


@dataclass(frozen=True, kw_only=True)
class JupyterServer:
    """A running Jupyter server of this user."""

    pid: int
    url: str
    token: str

    @property
    def python(self) -> str:
        """The interpreter as the command line names it: in a virtual environment, its link and not the target."""
        try:
            command = psutil.Process(self.pid).cmdline()[:1]
        except psutil.Error:
            command = []
        return command[0] if command and os.path.isabs(command[0]) else "its python"


def check_proxy(_: Settings, *, answer_s: float = 3.0) -> Iterator[Finding]:
    """Check that each running Jupyter server has jupyter-server-proxy.

    Args:
        answer_s: Time within which a server has to answer.
    """
    is_installed = importlib.util.find_spec("jupyter_server_proxy") is not None
    servers = []
    for file in () if paths is None else sorted(Path(paths.jupyter_runtime_dir()).glob("jpserver-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads(file.read_bytes())
            server = JupyterServer(pid=int(record["pid"]), url=str(record["url"]), token=str(record.get("token") or ""))
            # Servers that were killed leave their files.
            if psutil.pid_exists(server.pid):
                servers.append(server)
    for server in servers:
        name = f"the Jupyter server at {server.url} (process {server.pid})"
        status = _get_status(f"{server.url}server-proxy/servers-info", server.token, answer_s)
        if status == 200:
            yield Finding(topic="proxy", verdict="fine", found=f"{name} has jupyter-server-proxy")
        elif status != 404:
            answer = "does not answer" if status is None else f"answers with status {status}"
            found = f"{name} {answer}, so it is not known whether it has jupyter-server-proxy"
            yield Finding(topic="proxy", verdict="note", found=found, means=f"without it, {WITHOUT_PROXY}")
        else:
            has_it = is_installed and server.python != sys.executable
            elsewhere = f", although {sys.executable} has it" if has_it else ""
            # On JupyterHub and Binder the proxy is the only way to reach the lab.
            is_needed = any(name.startswith(("JUPYTERHUB_", "BINDER_")) for name in os.environ)
            yield Finding(
                topic="proxy",
                verdict="bad" if is_needed else "note",
                found=f"{name} has no jupyter-server-proxy{elsewhere}",
                means=WITHOUT_PROXY,
                remedy=f"{server.python} -m pip install jupyter-server-proxy, then restart that server",
            )
    if servers:
        return
    if is_installed:
        found = f"jupyter-server-proxy {metadata.version('jupyter-server-proxy')}; no Jupyter server is running"
        yield Finding(topic="proxy", verdict="fine", found=found)
    elif importlib.util.find_spec("jupyter_server") is not None:
        yield Finding(
            topic="proxy",
            verdict="note",
            found="jupyter-server-proxy is not installed",
            means=WITHOUT_PROXY,
            remedy=f"{sys.executable} -m pip install jupyter-server-proxy",
        )


def _get_status(url: str, token: str, answer_s: float) -> int | None:
    try:
        request = urllib.request.Request(url, headers={"authorization": f"token {token}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=answer_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code
    except (OSError, ValueError):
        return None
