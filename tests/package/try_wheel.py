"""Install the wheel in an empty environment and use it: ``make package``.

The wheel is built from a copy of this checkout, which is then deleted. The dependencies are the newest versions that
the metadata allows, first without extras, then with each extra that needs no special hardware. Two of these
installations download a starter model and answer a request over HTTP. Then ``uv tool install`` installs the command.
``PACKAGE="--python python3.12 --python python3.13"`` does the same with other versions of Python. All files are under
``build/package``. Prints the time and peak memory of each step; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.package.try_binder import ROOT, STOP_S, Environment, PeakMemory, copy_checkout, report

TARGET = ROOT / "build" / "package"
INSTALLATIONS = (("", True), ("[gguf]", False), ("[lan]", False), ("[otel]", False), ("[lab]", True))
"""Pairs of an extra and whether a model is downloaded and answers. Extras are installed on top of each other."""
MODEL = "smollm2-135m"
PANELS = "from lmx_lab.panels.layout import PANELS; assert all(panel._esm for panel in PANELS.values())"
QUESTION = {"model": "default", "max_tokens": 12, "messages": [{"role": "user", "content": "Say hello."}]}
READY = re.compile(r"ready at (http://127\.0\.0\.1:\d+)")
ANSWER_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=TARGET)
    parser.add_argument("--python", action="append", help="an interpreter; by default that of this program")
    chosen = parser.parse_args(arguments)
    environment = Environment(folder=chosen.folder.absolute(), memory_bytes=0)
    shutil.rmtree(environment.folder, ignore_errors=True)
    copy_checkout(environment.repository)
    dist = environment.folder / "dist"
    build = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-deps")
    environment.step("build the wheel", *build, "--wheel-dir", dist, ".")
    # Delete the checkout, so that nothing can be imported from it. The folder stays as an empty working directory.
    shutil.rmtree(environment.repository)
    environment.repository.mkdir()
    (wheel,) = dist.iterdir()
    for number, python in enumerate(chosen.python or [sys.executable]):
        install(environment, python, wheel, environment.folder / f"env-{number}")
    report(environment)
    size = sum(file.lstat().st_size for file in (environment.folder / "env-0").rglob("*") if not file.is_dir())
    print(f"\nthe environment has {size / 1e6:.0f} MB, the wheel {wheel.stat().st_size / 1e6:.2f} MB")
    return 0


def install(environment: Environment, python: str, wheel: Path, target: Path) -> None:
    """Install the wheel and its extras with one version of Python, and use them."""
    programs = target / "bin"
    pip = (programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    environment.step(f"environment of {python}", python, "-m", "venv", target)
    for extra, answers in INSTALLATIONS:
        environment.step(f"install {extra or 'without extras'}", *pip, "install", f"{wheel}{extra}")
        environment.step("pip check", *pip, "check")
        environment.step("doctor", programs / "lmx-lab", "doctor")
        if answers:
            environment.step(f"pull {MODEL}", programs / "lmx-lab", "pull", MODEL)
            environment.step("models", programs / "lmx-lab", "models")
            answer(environment, programs / "lmx-lab", MODEL)
    environment.step("panels", programs / "python", "-c", PANELS)
    environment.step("install uv", *pip, "install", "uv")
    folders = (f"UV_TOOL_DIR={target / 'tools'}", f"UV_TOOL_BIN_DIR={target / 'tools-bin'}")
    uv = ("env", *folders, programs / "uv", "tool", "install", "--quiet", "--python", python)
    environment.step("uv tool install [gguf]", *uv, f"{wheel}[gguf]")
    environment.step("version of the tool", target / "tools-bin" / "lmx-lab", "--version")


def answer(environment: Environment, program: Path, model: str) -> None:
    """Serve the model, send it a request over HTTP, and stop the server."""
    started = time.monotonic()
    command = (program, "serve", "--model", model, "--port", "0")
    with (
        subprocess.Popen(
            command, cwd=environment.repository, env=environment.environ, stdout=subprocess.PIPE, text=True
        ) as server,
        PeakMemory(server.pid) as peak,
    ):
        try:
            text = ask(address(server))
            server.send_signal(signal.SIGTERM)
            code = server.wait(STOP_S)
        finally:
            server.kill()
        environment.add_row(f"serve {model}", started, peak.take_peak())
    print(f"{model}: {text!r}", flush=True)
    if not text.strip() or code:
        sys.exit(f"serve {model} answered {text!r}, and its exit status is {code}")


def address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    output = ""
    for line in server.stdout:
        output += line
        if match := READY.search(line):
            return match[1]
    sys.exit(f"lmx-lab serve did not start:\n{output}")


def ask(url: str) -> str:
    body = json.dumps(QUESTION).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


if __name__ == "__main__":
    sys.exit(main())
