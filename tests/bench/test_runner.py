"""Runs: turns of targets, progress, storage, interrupts."""

import errno
import signal
import threading

import pytest

from lmx_lab.bench.case import Case, Poisson, Sweep
from lmx_lab.bench.runner import RunProgress, progress_text, run, samples
from lmx_lab.bench.sample import COLUMNS
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.targets import ChatTarget, TargetFacts
from lmx_lab.errors import InvalidRequestError
from tests.support.model_server import WORDS, Scripted
from tests.support.programs import run_script
from tests.support.samples import collect, sample

CASE = Case(prompt_tokens=8, output_tokens=4, requests=4)


def test_a_sweep_is_a_table_with_a_row_for_each_request():
    sweep = Sweep(prompt_tokens=8, output_tokens=4, concurrency=(1, 2), requests=4, repeats=2)
    with Scripted(WORDS) as server:
        table = run(server.url, sweep)
    assert tuple(table.columns) == COLUMNS
    assert len(table) == 4 * (1 + 4)
    counted = table[~table["warm_up"]].groupby(["repeat", "concurrency"]).size()
    assert counted.to_dict() == {(repeat, users): 4 for repeat in (0, 1) for users in (1, 2)}
    assert len(set(prompts(server))) == len(server.bodies)
    assert table["error"].isna().all()
    assert (table.attrs["interrupted"], table.attrs["path"]) == (False, None)
    assert table.attrs["provenance"]["seeds"] == [0]


def prompts(server):
    return [body["messages"][0]["content"] for body in server.bodies]


@pytest.mark.parametrize(
    ("plan", "order"),
    [
        pytest.param(CASE, "ab" + "abbaabba", id="one user"),
        pytest.param(
            Sweep(prompt_tokens=8, output_tokens=4, requests=6, concurrency=2, warm_up=0, repeats=2),
            "aaaaaabbbbbb" + "bbbbbbaaaaaa",
            id="several users",
        ),
        pytest.param(
            Case(prompt_tokens=8, output_tokens=4, requests=3, warm_up=0, arrival=Poisson(per_second=500)),
            "aaabbb",
            id="arrivals",
        ),
    ],
)
def test_targets_take_turns_in_alternating_order(plan, order):
    with Scripted(WORDS) as one, Scripted(WORDS) as two:
        table = run([ChatTarget(one.url, name="a"), ChatTarget(two.url, name="b")], plan)
    assert "".join(table["target"]) == order
    requests = table[~table["warm_up"]].groupby("target")["request"].apply(sorted)
    assert requests["a"] == requests["b"]
    # Both may be the same server, which would have the other's prompts in its cache.
    assert not set(prompts(one)) & set(prompts(two))


def test_an_unreachable_target_does_not_prevent_measuring_another():
    with Scripted(WORDS) as alive:
        dead = Scripted(WORDS)
        dead.start().stop()
        table = run([ChatTarget(dead.url, name="dead"), ChatTarget(alive.url, name="alive")], CASE)
    failed = table.groupby("target")["error"].count().to_dict()
    assert failed == {"dead": 5, "alive": 0}


def test_progress_is_reported_on_the_callers_thread_up_to_the_total():
    reported = []

    def watch(progress):
        reported.append((progress.done, progress.total, threading.current_thread()))

    with Scripted(WORDS) as server:
        run(server.url, CASE, progress=watch)
    assert reported == [(done, 5, threading.current_thread()) for done in range(1, 6)]


@pytest.mark.slow
def test_progress_is_a_bar_in_a_terminal_and_nothing_in_a_log(monkeypatch, capsys):
    with Scripted(WORDS) as server:
        run(server.url, CASE)
        assert capsys.readouterr().err == ""
        # rich treats the output as a terminal.
        monkeypatch.setenv("FORCE_COLOR", "1")
        run(server.url, CASE)
        output = capsys.readouterr().err
        run(server.url, CASE, progress=False)
        assert capsys.readouterr().err == ""
    assert "5/5" in output


def test_a_line_of_progress_contains_the_error():
    text = progress_text(RunProgress(done=3, total=12, sample=sample(error="queue-full: no place")))
    assert text.endswith("failed: queue-full: no place")


def test_a_full_disk_stops_the_writing_but_not_the_run(tmp_path, monkeypatch):
    def full(recorder, taken):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Recorder, "add", full)
    with Scripted(WORDS) as server:
        table = run(server.url, CASE, record=tmp_path)
    assert len(table) == 1 + 4
    assert table["error"].isna().all()


def test_a_run_that_is_refused_leaves_no_file(tmp_path):
    with Scripted(WORDS, models=("a", "b")) as server, pytest.raises(InvalidRequestError, match="model="):
        run(server.url, CASE, record=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_second_interrupt_raises():
    def twice(progress):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with Scripted(WORDS) as server, pytest.raises(KeyboardInterrupt):
        run(server.url, CASE, progress=twice)


def test_an_exception_in_a_target_is_raised_to_the_caller():
    class Broken(ChatTarget):
        async def describe(self):
            return TargetFacts()

        def ask(self, body):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(Broken("127.0.0.1:1"), CASE)


@pytest.mark.anyio
async def test_it_also_blocks_while_an_event_loop_runs():
    with Scripted(WORDS) as server:
        assert len(run(server.url, CASE)) == 5
        assert len(await collect(samples(server.url, CASE))) == 5


@pytest.mark.parametrize(
    ("target", "plan"),
    [
        (["127.0.0.1:1", "127.0.0.1:1"], CASE),
        ([], CASE),
        ("127.0.0.1:1", []),
        ("127.0.0.1:1", [{"prompt_tokens": 3}]),
        ("127.0.0.1:1", None),
        ("127.0.0.1:1", 5),
        (7, CASE),
    ],
)
def test_invalid_targets_and_plans_are_refused_before_anything_is_measured(target, plan):
    with pytest.raises(InvalidRequestError):
        run(target, plan)


@pytest.mark.slow
def test_measuring_a_server_does_not_import_the_engine():
    source = """
import sys
from lmx_lab.bench import Case, run
run(sys.argv[1], Case(prompt_tokens=8, output_tokens=4, requests=1), progress=False)
print("mlx.core" in sys.modules)
"""
    with Scripted(WORDS) as server:
        assert run_script(source, server.url) == "False\n"
