"""Run the sections of ``docs/clients.md`` for evaluation harnesses against both engines: ``make harnesses``.

``python -m tests.other_clients.try_harnesses ENVIRONMENT`` also compares the log-likelihoods and the accuracy of
lm-evaluation-harness with those of ``lab.evaluate``. The exit status is 1 if they differ, or if a section fails.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import lmx_lab
from lmx_lab.evals import Choice
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.other_clients.clients_page import run_section
from tests.support.commands import Serving, serving
from tests.support.docs import ROOT
from tests.support.gguf import starter_gguf

TOLERANCE = 1e-3
"""Largest difference of two log-likelihoods. Other requests may change the order of sums on a CPU."""
MODEL_FOLDER = "$HOME/.lmx-lab/models/smollm2-135m"
"""The folder with the tokenizer, as the page names it."""


def main(environment: Path) -> int:
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    entry = Catalog(Settings(home=home)).resolve("smollm2-135m")
    failed = 0
    for engine, model in {"mlx": entry.path, "llama.cpp": starter_gguf(home)}.items():
        with serving(home, "--model", str(model), "--engine", engine, "--port", "0") as server:
            for check in CHECKS:
                try:
                    problem = check(server, environment.absolute() / "bin", entry.path)
                except AssertionError as exc:
                    problem = str(exc)
                print(f"\n--- {check.__name__} on {engine}: {problem or 'works'}", flush=True)
                failed += bool(problem)
    print(f"{2 * len(CHECKS) - failed} passed, {failed} failed")
    return int(failed > 0)


def _try_harness(server: Serving, programs: Path, model: Path) -> str:
    """Run the section of lm-evaluation-harness; return what differs from ``lab.evaluate``, or an empty text."""
    with tempfile.TemporaryDirectory(prefix="lmx-lab-harness-") as name:
        folder = Path(name)
        addresses = {"127.0.0.1:8400": f"127.0.0.1:{server.port}", MODEL_FOLDER: str(model)}
        output = run_section("lm-evaluation-harness", addresses, folder, programs=programs)
        rows = [json.loads(line) for line in (folder / "capitals.jsonl").read_text().splitlines()]
        (samples,) = folder.rglob("samples_capitals_*.jsonl")
        theirs = [json.loads(line) for line in samples.read_text().splitlines()]
    # The same with the tokenizer of the folder and on the server.
    (accuracy,) = set(re.findall(r"\|acc +\|\S+ +\| +([\d.]+)", output))
    with lmx_lab.attach(f"http://127.0.0.1:{server.port}") as lab:
        spaced = [{**row, "options": [f" {option}" for option in row["options"]]} for row in rows]
        metric = Choice("options", chat_template=False)
        ours = lab.evaluate(spaced, "The capital of {country} is", answer="right", metric=metric, store=False)
    return _difference(ours, theirs, float(accuracy))


def _difference(ours: Any, theirs: list[dict[str, Any]], accuracy: float) -> str:
    if len(theirs) != len(ours.rows):
        return f"the harness has {len(theirs)} rows of {len(ours.rows)}"
    largest = 0.0
    for row in theirs:
        scores = [float(score) for score, _ in row["filtered_resps"]]
        pairs = zip(scores, ours.rows[row["doc_id"]].logprobs, strict=True)
        largest = max([largest, *(abs(one - other) for one, other in pairs)])
    print(f"acc {accuracy} there, {ours.score.mean} here; largest difference of a log-likelihood {largest:.2g}")
    if largest > TOLERANCE or abs(accuracy - ours.score.mean) > 5e-5:
        return "the harness and lab.evaluate differ"
    return ""


def _try_inspect(server: Serving, programs: Path, model: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="lmx-lab-inspect-") as name:
        addresses = {"127.0.0.1:8400": f"127.0.0.1:{server.port}"}
        output = run_section("Inspect", addresses, Path(name), programs=programs)
    return "" if re.search(r"^success [01](\.\d+)?$", output, re.MULTILINE) else f"it printed {output!r:.500}"


def _try_benchy(server: Serving, programs: Path, model: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="lmx-lab-benchy-") as name:
        addresses = {"127.0.0.1:8400": f"127.0.0.1:{server.port}", MODEL_FOLDER: str(model)}
        output = run_section("llama-benchy", addresses, Path(name), programs=programs)
    speeds = re.findall(r"\| +(pp128|tg16) +\| +([\d.]+) ±", output)
    return "" if [test for test, _ in speeds] == ["pp128", "tg16"] else f"it printed {output!r:.500}"


CHECKS = (_try_harness, _try_inspect, _try_benchy)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
