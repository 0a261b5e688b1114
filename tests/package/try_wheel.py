"""Install the wheel in an empty environment and use it: ``make package``.

The wheel is built from a copy of this checkout, which is then deleted. The dependencies are the newest versions that
the metadata allows, first without extras, then with Jupyter and llama.cpp. Each installation downloads a starter model
and answers a request over HTTP. All files are under ``build/package``. Prints the time and peak memory of each step;
the exit status is 1 if one failed.
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
INSTALLATIONS = (("", "smollm2-135m"), ("[lab]", "smollm2-135m"))
"""Pairs of extras and a starter model that runs with them."""
PANELS = "from lmx_lab.panels.layout import PANELS; assert all(panel._esm for panel in PANELS.values())"
QUESTION = {"model": "default", "max_tokens": 12, "messages": [{"role": "user", "content": "Say hello."}]}
READY = re.compile(r"ready at (http://127\.0\.0\.1:\d+)")
ANSWER_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=TARGET)
    environment = Environment(folder=parser.parse_args(arguments).folder.absolute(), memory_bytes=0)
    shutil.rmtree(environment.folder, ignore_errors=True)
    copy_checkout(environment.repository)
    programs, dist = environment.folder / "env" / "bin", environment.folder / "dist"
    pip = (programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    environment.step("environment", sys.executable, "-m", "venv", environment.folder / "env")
    environment.step("build the wheel", *pip, "wheel", "--no-deps", "--wheel-dir", dist, ".")
    # Delete the checkout, so that nothing can be imported from it. The folder stays as an empty working directory.
    shutil.rmtree(environment.repository)
    environment.repository.mkdir()
    (wheel,) = dist.iterdir()
    for extras, model in INSTALLATIONS:
        environment.step(f"install {extras or 'without extras'}", *pip, "install", f"{wheel}{extras}")
        environment.step("pip check", *pip, "check")
        environment.step("doctor", programs / "lmx-lab", "doctor")
        environment.step(f"pull {model}", programs / "lmx-lab", "pull", model)
        environment.step("models", programs / "lmx-lab", "models")
        answer(environment, programs / "lmx-lab", model)
    environment.step("panels", programs / "python", "-c", PANELS)
    report(environment)
    size = sum(file.lstat().st_size for file in (environment.folder / "env").rglob("*") if not file.is_dir())
    print(f"\nthe environment has {size / 1e6:.0f} MB, the wheel {wheel.stat().st_size / 1e6:.2f} MB")
    return 0


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
