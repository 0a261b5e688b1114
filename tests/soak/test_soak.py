"""Test the table and exit status of the long runs, the resource monitor, and a small fuzz run."""

import importlib
import json
import subprocess
import sys

import psutil
import pytest

from soak.__main__ import PARTS, carry_out, main
from soak.fuzz import fuzz
from soak.fuzzing.families import families
from soak.report import COLUMNS, Row, Soak
from soak.resources import FREE_MEMORY_ON_SIGNAL, NO_EXCESS, Allowance, ResourceMonitor

pytestmark = pytest.mark.long

MB = 1_000_000
SLEEPING = [sys.executable, "-c", "import time; time.sleep(600)"]
# Carries out the commands on its standard input, and prints a line after each.
LEAKING = """
import os, subprocess, sys, threading, time
kept = []
for line in sys.stdin:
    what, count = line.split()
    for _ in range(int(count)):
        if what == "megabytes":
            kept.append(os.urandom(1_000_000))
        elif what == "descriptors":
            kept.append(open(os.devnull))
        elif what == "threads":
            thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
            thread.start()
        elif what == "processes":
            kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        elif what == "forget":
            for each in kept:
                if isinstance(each, subprocess.Popen):
                    each.kill()
                    each.wait()
            kept.clear()
    print("done", flush=True)
"""


@pytest.fixture
def soak(tiny):
    return Soak(folder=tiny.path, quick=True, seed=3)


class Leaking:
    """A child process that allocates resources on command, and keeps them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{FREE_MEMORY_ON_SIGNAL}{LEAKING}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, what, count=1):
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def leaking():
    child = Leaking()
    try:
        child.do("forget")
        yield child
        child.do("forget")
    finally:
        child.process.communicate()


def run_parts(tmp_path, soak, **parts):
    """Run parts; return the exit status, and the rows of the stored file."""
    status = carry_out(parts, soak, {"machine": "this"}, folder=tmp_path)
    (kept,) = tmp_path.glob("*.json")
    content = json.loads(kept.read_text())
    assert content["machine"] == "this"
    rows = content["rows"]
    return status, rows


def part(*rows):
    return lambda soak: list(rows)


GOOD = Row(part="good", requests=5, faults=2, slowest_s=1.5, notes="RSS 1 to 2 MB")


@pytest.mark.parametrize(
    "bad",
    [
        {},
        *({name: 1} for name in COLUMNS if name not in ("part", "requests", "faults", "slowest_s")),
        {"wrong": ["a status that is not declared"]},
    ],
)
def test_the_exit_status_is_1_if_a_row_has_failed(tmp_path, soak, capsys, bad):
    failed = bool(bad)
    status, rows = run_parts(tmp_path, soak, first=part(GOOD), second=part(Row(part="bad", **bad), GOOD))
    assert status == failed
    assert [(row["part"], row["passed"]) for row in rows] == [("good", True), ("bad", not failed), ("good", True)]
    output = capsys.readouterr().out
    assert "good" in output
    assert ("WRONG bad: " in output) == failed


def test_an_exception_in_a_part_is_a_row_and_the_next_part_runs(tmp_path, soak):
    def failing(soak):
        raise OSError("no space left")

    status, rows = run_parts(tmp_path, soak, first=failing, second=part(GOOD))
    assert status == 1
    assert "OSError: no space left" in rows[0]["wrong"][0]
    assert rows[1]["passed"]


@pytest.fixture
def left():
    """Processes that a part leaves running."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_processes_that_a_part_leaves_running_are_counted_and_killed(tmp_path, soak, left):
    def leaving(soak):
        left.append(subprocess.Popen(SLEEPING))
        return [GOOD]

    status, rows = run_parts(tmp_path, soak, first=leaving)
    assert status == 1
    assert rows[1]["leaked_processes"] == 1
    assert not psutil.pid_exists(left[0].pid)


def test_ctrl_c_leaves_no_process_and_prints_the_results_so_far(tmp_path, soak, left):
    def interrupted(soak):
        left.append(subprocess.Popen(SLEEPING))
        raise KeyboardInterrupt

    status, rows = run_parts(tmp_path, soak, first=part(GOOD), second=interrupted, third=part(GOOD))
    assert status == 130
    assert [row["part"] for row in rows] == ["good"]
    assert not psutil.pid_exists(left[0].pid)


@pytest.mark.parametrize("kills", ["0", "-1", "many"])
def test_an_invalid_number_of_kills_is_refused(kills, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["--only", "kills", f"--kills={kills}"])
    assert refused.value.code == 2
    assert f"{kills!r} is not a positive number" in capsys.readouterr().err


def test_every_part_has_a_module_with_run():
    assert [name for name in PARTS if not hasattr(importlib.import_module(f"soak.{name}"), "run")] == []


@pytest.mark.parametrize(
    ("what", "count", "reading"),
    [
        ("megabytes", 30, lambda excess: 20 * MB < excess.rss_bytes < 40 * MB),
        ("descriptors", 4, lambda excess: excess.descriptors == 4),
        ("threads", 3, lambda excess: excess.threads == 3),
        ("processes", 2, lambda excess: excess.processes == 2),
    ],
)
def test_the_monitor_measures_what_a_process_keeps(leaking, what, count, reading):
    monitor = ResourceMonitor(leaking.process.pid)
    monitor.begin()
    leaking.do(what, count)
    assert reading(monitor.excess(limit_s=0.5))
    row = Row(part="leak")
    monitor.add_to(row, limit_s=0.5)
    assert not row.passed


def test_the_monitor_accepts_allowed_and_temporary_growth(leaking):
    monitor = ResourceMonitor(leaking.process.pid, allowance=Allowance(rss_mb=40, descriptors=2, threads=1))
    monitor.begin()
    for what, count in (("megabytes", 10), ("descriptors", 2), ("threads", 1)):
        leaking.do(what, count)
    assert monitor.excess(limit_s=0.5) == NO_EXCESS
    leaking.do("descriptors", 50)
    leaking.do("processes", 1)
    leaking.do("forget")
    row = Row(part="no leak")
    monitor.add_to(row)
    assert row.passed, row
    assert "RSS" in row.notes


def test_a_process_that_has_ended_is_reported(leaking):
    other = Leaking()
    other.do("forget")
    monitor = ResourceMonitor(other.process.pid)
    monitor.begin()
    other.process.communicate()
    row = Row(part="gone")
    monitor.add_to(row)
    assert "has ended" in row.wrong[0]


def test_a_small_fuzz_run_passes(soak):
    names = ("chat", "rerank", "chat socket", "admin events", "/v3 events socket")
    rows = fuzz(soak, [family for family in families() if family.name in names], share=0.006)
    rows += fuzz(soak, families("echo"), share=0.003, engine="echo")
    # Without the columns for memory, which settles only after more requests than these.
    assert [(row.part, row.wrong, row.lost, row.hung) for row in rows if row.wrong or row.lost or row.hung] == []
    assert sum(row.faults for row in rows) >= 50
    assert max(row.slowest_s for row in rows) > 0
