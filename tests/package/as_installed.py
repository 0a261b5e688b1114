"""``make package``: the wheel as a stranger installs it, in an environment with nothing else in it.

The wheel is built from this checkout, and then there is no checkout any more. The dependencies are the newest that the
metadata allows, first without extras, then with Jupyter and llama.cpp. Each installation fetches a starter model and
answers over HTTP. Everything lies under ``build/package``. Prints what each step took; ends with 1 if one failed.
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

from tests.package.as_binder import ROOT, STOP_S, PeakMemory, Session, copy_checkout, report

TARGET = ROOT / "build" / "package"
INSTALLATIONS = (("", "smollm2-135m"), ("[lab,gguf]", "smollm2-135m-gguf"))
"""Extras, and a starter model that runs with them."""
PANELS = "from lmx_lab.panels.layout import PANELS; assert all(panel._esm for panel in PANELS.values())"
QUESTION = {"model": "default", "max_tokens": 12, "messages": [{"role": "user", "content": "Say hello."}]}
READY = re.compile(r"ready at (http://127\.0\.0\.1:\d+)")
ANSWER_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=TARGET)
    session = Session(folder=parser.parse_args(arguments).folder.absolute(), memory_bytes=0)
    shutil.rmtree(session.folder, ignore_errors=True)
    copy_checkout(session.repository)
    programs, dist = session.folder / "env" / "bin", session.folder / "dist"
    pip = (programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    session.step("environment", sys.executable, "-m", "venv", session.folder / "env")
    session.step("build the wheel", *pip, "wheel", "--no-deps", "--wheel-dir", dist, ".")
    # From here on nothing can come from the checkout; what runs, runs in an empty folder.
    shutil.rmtree(session.repository)
    session.repository.mkdir()
    (wheel,) = dist.iterdir()
    for extras, model in INSTALLATIONS:
        session.step(f"install {extras or 'without extras'}", *pip, "install", f"{wheel}{extras}")
        session.step("pip check", *pip, "check")
        session.step("doctor", programs / "lmx-lab", "doctor")
        session.step(f"pull {model}", programs / "lmx-lab", "pull", model)
        session.step("models", programs / "lmx-lab", "models")
        answer(session, programs / "lmx-lab", model)
    session.step("panels", programs / "python", "-c", PANELS)
    report(session)
    size = sum(file.lstat().st_size for file in (session.folder / "env").rglob("*") if not file.is_dir())
    print(f"\nthe environment has {size / 1e6:.0f} MB, the wheel {wheel.stat().st_size / 1e6:.2f} MB")
    return 0


def answer(session: Session, program: Path, model: str) -> None:
    """Serve the model, ask it one thing over HTTP, and end the server."""
    started = time.monotonic()
    command = (program, "serve", "--model", model, "--port", "0")
    with (
        subprocess.Popen(
            command, cwd=session.repository, env=session.environ, stdout=subprocess.PIPE, text=True
        ) as server,
        PeakMemory(server.pid) as peak,
    ):
        try:
            text = ask(address(server))
            server.send_signal(signal.SIGTERM)
            code = server.wait(STOP_S)
        finally:
            server.kill()
        session.note(f"serve {model}", started, peak.take())
    print(f"{model}: {text!r}", flush=True)
    if not text.strip() or code:
        sys.exit(f"serve {model} answered {text!r} and ended with {code}")


def address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    said = ""
    for line in server.stdout:
        said += line
        if found := READY.search(line):
            return found[1]
    sys.exit(f"lmx-lab serve did not start:\n{said}")


def ask(url: str) -> str:
    body = json.dumps(QUESTION).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answered:
        text: str = json.load(answered)["choices"][0]["message"]["content"]
    return text


if __name__ == "__main__":
    sys.exit(main())
