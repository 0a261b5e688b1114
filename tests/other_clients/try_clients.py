"""Run the code of ``docs/clients.md`` for clients that have an environment of their own: ``make clients``.

``python -m tests.other_clients.try_clients ENVIRONMENT`` starts a server with the starter models, runs each section's
code with the environment's Python, and prints the output. The exit status is 1 if a section does not print what is
expected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.command_process import serving
from tests.docs.pages import ROOT
from tests.other_clients.clients_page import run_section, serve_arguments

EXPECTED: Mapping[str, Sequence[str]] = {
    "anthropic-python": ("Paris", "end_turn", "tokens"),
    "ollama-python": ("Paris", " stop", "name='", "4 tokens", "2 vectors", "smollm2-135m:latest"),
    "LangChain": ("Paris", "name='", "City ['inhabitants', 'name']", "384 numbers"),
    "llm": ("Paris", '"inhabitants"'),
    "LiteLLM": ("Paris", "2 vectors of 384 numbers"),
    "instructor": ("JSON_SCHEMA City(name='", "TOOLS City(name='"),
}
"""Texts that the output of each section must contain."""
PACKAGES = ("anthropic", "ollama", "langchain-openai", "llm", "litellm", "instructor", "openai")
VERSIONS = (
    "import importlib.metadata as m, json, sys; print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
)


def main(environment: Path) -> int:
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    programs = environment.absolute() / "bin"
    versions = subprocess.run(
        [programs / "python", "-c", VERSIONS, *PACKAGES], capture_output=True, text=True, check=True
    )
    print("  ".join(f"{name} {version}" for name, version in json.loads(versions.stdout).items()), flush=True)
    failed = 0
    with serving(home, *serve_arguments(None), "--port", "0") as server:
        addresses = {"127.0.0.1:8400": f"127.0.0.1:{server.port}"}
        for title, texts in EXPECTED.items():
            problem, output = _try_section(title, texts, addresses, programs)
            print(f"\n--- {title}: {problem or 'works'}\n{output}", flush=True)
            failed += bool(problem)
    print(f"{len(EXPECTED) - failed} of {len(EXPECTED)} clients work as docs/clients.md shows")
    return int(failed > 0)


def _try_section(title: str, texts: Sequence[str], addresses: Mapping[str, str], programs: Path) -> tuple[str, str]:
    """Run a section; return what is wrong with its output, or "", and the output."""
    with tempfile.TemporaryDirectory(prefix="lmx-lab-clients-") as folder:
        try:
            output = run_section(title, addresses, Path(folder), programs=programs)
        except AssertionError as exc:
            return "fails", str(exc)
    missing = [text for text in texts if text not in output]
    return f"does not print {', '.join(missing)}" if missing else "", output


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
