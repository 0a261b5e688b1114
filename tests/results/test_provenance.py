"""The provenance describes software and machine without personal data."""

import getpass
import json
import platform
import subprocess
from pathlib import Path

from lmx_lab.bench import describe_machine, frame
from lmx_lab.results.provenance import checkout, provenance

ROOT = Path(__file__).parents[2]


def test_it_contains_what_affects_speed_and_is_valid_json():
    facts = json.loads(json.dumps(provenance(seeds=[3, 1, 3], prompts="abc")))
    assert (facts["seeds"], facts["prompts"]) == ([1, 3], "abc")
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["mlx"]
    assert facts["packages"]["xllamacpp"]
    assert facts["machine"]["memory_bytes"] > 2**20
    assert facts["machine"]["threads"] >= 1


def test_the_commit_is_that_of_the_checkout():
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert provenance()["commit"] == (done.stdout.strip() or None)


def test_the_commit_of_an_unrelated_checkout_is_not_used(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    author = ("-c", "user.name=author", "-c", "user.email=author@localhost")
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "theirs"], cwd=tmp_path, check=True)
    (tmp_path / "__init__.py").touch()
    assert checkout(tmp_path) == {"commit": None, "dirty": None}


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None


def test_it_contains_no_names_and_no_folders():
    text = json.dumps(provenance())
    assert str(Path.home()) not in text
    assert str(ROOT) not in text
    assert f'"{platform.node()}"' not in text
    assert f'"{getpass.getuser()}"' not in text


def test_a_sentence_describes_the_machine_and_says_if_it_was_busy():
    def rows(*shares):
        machines = [{"cpu": "Some CPU", "threads": 2, "busy_share": share} for share in shares]
        table = frame([])
        table.attrs["provenance"] = {f"run {at}": {"machine": machine} for at, machine in enumerate(machines)}
        return table

    assert describe_machine(rows(0.02)) == "Measured on Some CPU with 2 threads."
    assert "Other programs used 60% of the CPU" in describe_machine(rows(0.02, 0.6))
    assert "not known" in describe_machine(rows())
    measured = frame([], provenance())
    assert 0 <= measured.attrs["provenance"]["machine"]["busy_share"] <= 1
    assert describe_machine(measured).startswith("Measured on ")
