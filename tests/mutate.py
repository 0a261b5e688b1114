"""Change the code of a module in many small ways, and report the changes that its tests do not notice.

``python -m tests.mutate [--patience S] [MODULE ...]`` writes the results into ``tests/mutants.txt``, in place of the
earlier results of the same modules. It needs ``pip install 'mutmut==3.8.*'``, and works in ``build/mutants``, on a copy
of the files that git knows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPY = ROOT / "build" / "mutants"
RESULTS = ROOT / "tests" / "mutants.txt"
FORMATS = "tests/contract/formats"
SUBSCRIPTION = ("", "_cuts", "_daemon", "_parts")
PROMPTS = "tests/contract/engines/test_prompts.py tests/contract/engines/test_forms.py"
MODULES: Mapping[str, tuple[str, int | None]] = {
    "engine/scheduler": ("tests/engine/test_scheduler.py", None),
    "engine/text/splitter": ("tests/engine/text/test_splitter.py", None),
    "daemon/turns/machine": ("tests/daemon/turns/test_machine.py", None),
    "http/guard": ("tests/http/test_guard.py tests/security/test_access.py tests/security/test_headers.py", None),
    "server/messages": (f"{FORMATS} tests/flows/test_messages.py", 120),
    "server/responses/writer": (f"{FORMATS} tests/flows/test_responses.py", 120),
    "server/ollama": (f"{FORMATS} tests/flows/test_ollama.py", 120),
    "client/subscription": (" ".join(f"tests/client/test_subscription{part}.py" for part in SUBSCRIPTION), 120),
    "batch/run": ("tests/batch tests/evals/test_evaluate.py", 120),
    "engine/preparer": (
        "tests/contract/engines tests/engine/echo tests/instrument/test_branches.py -k 'not mlx and not gguf'",
        60,
    ),
    "engine/mlx/tokenizer": (f"{PROMPTS} -k mlx", 60),
    "engine/llama_cpp/tokenizer": (f"{PROMPTS} -k gguf", 60),
}
"""Tests of each module, and the largest number of mutants: of more, every second, third … is tried."""
# With CI, hypothesis draws the same examples each time. The tests import the copy, also in the programs they start.
ENVIRONMENT = {"CI": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(COPY / "mutants")}


def pytest_itemcollected(item):
    # This file is a plugin of pytest too, because mutmut 3.8 reads a name that pytest 9.2 no longer has.
    item._nodeid = item.nodeid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="below lmx_lab, without .py; by default all of the table")
    patience = "seconds by which the tests of a mutant may take longer than usual before it counts as killed"
    parser.add_argument("--patience", type=float, default=60.0, help=patience)
    given = parser.parse_args()
    if unknown := set(given.modules) - set(MODULES):
        parser.error(f"the table has no {', '.join(sorted(unknown))}; it has {', '.join(MODULES)}")
    results = dict(re.findall(r"^(\S+): (.*?)(?=^\S|\Z)", RESULTS.read_text() if RESULTS.exists() else "", re.M | re.S))
    for module in given.modules or MODULES:
        results[module] = try_mutants(module, given.patience)
        # After each module, because all take hours.
        RESULTS.write_text("".join(f"{name}: {results[name]}" for name in MODULES if name in results))


def try_mutants(module: str, patience_s: float) -> str:
    """Run the tests of a module for its mutants, and return a description of those that survive."""
    from mutmut.configuration import reset_config
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    shutil.rmtree(COPY, ignore_errors=True)
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).rstrip("\0").split("\0"):
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, COPY / name)
    # Python would not find modules in a folder that does not exist when it starts.
    (COPY / "mutants").mkdir()
    os.chdir(COPY)
    tests, most = MODULES[module]
    path = Path("lmx_lab", f"{module}.py")
    settings = {
        "source_paths": ["lmx_lab"],
        "only_mutate": [str(path)],
        "also_copy": ["benchmarks", "docs", "notebooks", "soak"],
        "pytest_add_cli_args": [
            *("-n", "0", "-p", "no:cacheprovider", "-p", "tests.mutate", "-m", "not long"),
            *("--timeout", "0"),  # Only mutmut's limit counts, which depends on the usual duration.
        ],
        "pytest_add_cli_args_test_selection": shlex.split(tests),
        "timeout_multiplier": 4.0,
        "timeout_constant": patience_s / 4,
    }
    with Path("pyproject.toml").open("a") as file:
        # Threads of MLX do not survive a fork, so mutants are forked from a process that has only collected the tests.
        file.write("\n[tool.mutmut]\nprocess_isolation = 'forkserver'\n")
        file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    reset_config()
    names = [get_mutant_name(path, name) for name in mutate_file_contents(str(path), path.read_text()).mutant_names]
    step = 1 if most is None else -(-len(names) // most)
    environment = {"LMX_LAB_TEST_HOME": str(ROOT / ".cache" / "test-home")} | dict(os.environ) | ENVIRONMENT
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", "1", *names[::step]]
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"the tests of {module} could not be run; for the reason, add debug = true to {COPY}/pyproject.toml")
    return f"{tests}\n{description(path, len(names), set(names[::step]))}"


def description(path: Path, total: int, tried: set[str]) -> str:
    """Return the number of mutants that were killed, and the changed lines of the others, by function."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    codes = json.loads(Path("mutants", f"{path}.meta").read_text())["exit_code_by_key"]
    kinds = {name: status_by_exit_code[code] for name, code in codes.items() if name in tried}
    counts = Counter(kinds.values())
    dead = counts["killed"] + counts["timeout"] + counts["segfault"]
    lines = [f"  {total} mutants, {len(tried)} tried, {dead} killed, {counts['no tests']} in functions no test calls"]
    for name, kind in kinds.items():
        if kind in ("survived", "suspicious", "no tests", "not checked"):
            function = name.rpartition(".")[2].rpartition("__mutmut_")[0].removeprefix("x_").replace("xǁ", "")
            diff = get_diff_for_mutant(name, path=path).splitlines()[2:]
            changed = " → ".join(line[1:].strip() for line in diff if line[0] in "+-")
            lines.append(f"  {function.replace('ǁ', '.')} ({kind}): {changed}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
