"""Do what ``docs/clients.md`` says with clients that have an environment of their own: ``make clients``.

``python -m tests.other_clients.try_clients ENVIRONMENT`` starts a server from here with the starter models, runs each
section's code with the environment's Python, and says what came. The exit status is 1 if one does not do what it shows.
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
from tests.other_clients.documented import done, server_of

EXPECTED: Mapping[str, Sequence[str]] = {
    "LangChain": ("Paris", "name='", "City ['inhabitants', 'name']", "384 numbers"),
    "llm": ("Paris", '"inhabitants"'),
    "LiteLLM": ("Paris", "2 vectors of 384 numbers"),
    "instructor": ("JSON_SCHEMA City(name='", "TOOLS City(name='"),
}
"""What a section prints, among other words."""
PACKAGES = ("langchain-openai", "llm", "litellm", "instructor", "openai")
VERSIONS = (
    "import importlib.metadata as m, json, sys; print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
)


def main(environment: Path) -> int:
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    programs = environment.absolute() / "bin"
    asked = subprocess.run([programs / "python", "-c", VERSIONS, *PACKAGES], capture_output=True, text=True, check=True)
    print("  ".join(f"{name} {version}" for name, version in json.loads(asked.stdout).items()), flush=True)
    failed = 0
    with serving(home, *server_of(None), "--port", "0") as server:
        for title, words in EXPECTED.items():
            with tempfile.TemporaryDirectory(prefix="lmx-lab-clients-") as folder:
                try:
                    printed = done(
                        title, {"127.0.0.1:8400": f"127.0.0.1:{server.port}"}, Path(folder), programs=programs
                    )
                    missing = [word for word in words if word not in printed]
                except AssertionError as exc:
                    printed, missing = str(exc), ["an end without an error"]
            print(
                f"\n--- {title}: {'does not print ' + ', '.join(missing) if missing else 'works'}\n{printed}",
                flush=True,
            )
            failed += bool(missing)
    print(f"{len(EXPECTED) - failed} of {len(EXPECTED)} clients do what docs/clients.md shows")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
