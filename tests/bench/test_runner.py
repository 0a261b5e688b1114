"""Runs: turns of targets, progress, storage, interrupts."""

import errno
import signal
import threading
from contextlib import closing
from itertools import groupby
from pathlib import Path

import pytest

from lmx_lab.bench import load
from lmx_lab.bench.case import Case, Poisson, Sweep
from lmx_lab.bench.runner import RunProgress, progress_text, run, samples
from lmx_lab.bench.sample import COLUMNS
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.targets import ChatTarget, EngineTarget, TargetFacts
from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.statistics import median_interval
from tests.support.kernels import Notebook
from tests.support.labs import manager_of, serving
from tests.support.model_server import STALL, WORDS, Scripted, after_calibration, token
from tests.support.samples import collect, sample
from tests.support.waiting import until

SWEEP = Sweep(prompt_tokens=8, output_tokens=4, concurrency=(1, 2), requests=4, repeats=2)
CASE = Case(prompt_tokens=8, output_tokens=4, requests=4)


@pytest.fixture(scope="module")
def lab(tiny_home):
    with serving(tiny_home, "tiny") as lab:
        yield lab


def test_a_sweep_is_a_table_with_a_row_for_each_request():
    with Scripted(WORDS) as server:
        table = run(server.url, SWEEP)
    assert tuple(table.columns) == COLUMNS
    assert len(table) == 4 * (1 + 4)
    counted = table[~table["warm_up"]].groupby(["repeat", "concurrency"]).size()
    assert counted.to_dict() == {(repeat, users): 4 for repeat in (0, 1) for users in (1, 2)}
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts)
    assert table["error"].isna().all()
    assert (table.attrs["interrupted"], table.attrs["path"]) == (False, None)
    assert table.attrs["provenance"]["seeds"] == [0]


def test_targets_take_turns_in_alternating_order():
    with Scripted(WORDS) as one, Scripted(WORDS) as two:
        table = run([ChatTarget(one.url, name="a"), ChatTarget(two.url, name="b")], CASE)
    assert "".join(table["target"]) == "ab" + "abbaabba"
    measured = table[~table["warm_up"]]
    assert measured.groupby("target")["request"].apply(sorted).to_dict() == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}


def test_with_several_users_targets_take_turns_by_repeat_in_alternating_order():
    plan = Sweep(prompt_tokens=8, output_tokens=4, requests=6, concurrency=2, warm_up=0, repeats=2)
    with Scripted(WORDS) as one, Scripted(WORDS) as two:
        table = run([ChatTarget(one.url, name="a"), ChatTarget(two.url, name="b")], plan)
    assert "".join(table["target"]) == "aaaaaabbbbbb" + "bbbbbbaaaaaa"


def test_with_arrivals_targets_do_not_take_turns():
    case = Case(prompt_tokens=8, output_tokens=4, requests=3, warm_up=0, arrival=Poisson(per_second=500))
    with Scripted(WORDS) as one, Scripted(WORDS) as two:
        table = run([ChatTarget(one.url, name="a"), ChatTarget(two.url, name="b")], [case])
    assert [name for name, _ in groupby(table["target"])] == ["a", "b"]


def test_two_targets_on_one_server_share_no_cached_prompts(lab):
    case = Case(prompt_tokens=100, output_tokens=4, requests=3)
    table = run([EngineTarget(manager_of(lab)), lab.url], case)
    # All prompts have the beginning of the chat template in common.
    assert table["cached_tokens"].max() < 40


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


def test_a_run_can_be_stored_and_loaded(tmp_path):
    with Scripted(WORDS) as server:
        table = run(server.url, CASE, record=tmp_path)
    kept = load(table.attrs["path"])
    assert Path(table.attrs["path"]).parent == tmp_path
    assert kept["prompt_hash"].tolist() == table["prompt_hash"].tolist()
    assert next(iter(kept.attrs["provenance"].values())) == table.attrs["provenance"]


def test_an_interrupt_returns_finished_requests_and_cancels_running_ones(tmp_path):
    def interrupt(progress):
        if progress.done == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with Scripted(after_calibration(WORDS, WORDS, WORDS, [token("a"), STALL])) as server:
        table = run(server.url, CASE, progress=interrupt, record=tmp_path)
        threads = [thread.name for thread in threading.enumerate()]
    assert len(table) == 3
    assert table["error"].isna().all()
    assert table.attrs["interrupted"] is True
    assert len(load(table.attrs["path"])) == 3
    assert signal.getsignal(signal.SIGINT) == before
    assert "lmx-lab-bench" not in threads


def test_an_interrupt_in_the_middle_of_an_answer_closes_its_connection():
    with Scripted(after_calibration(WORDS, [token("a"), STALL])) as server:

        def interrupt():
            until(lambda: len(server.bodies) == 4)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        table = run(server.url, CASE)
        interrupting.join()
        until(lambda: server.left == 1)
    assert len(table) == 1
    assert table.attrs["interrupted"] is True


def test_a_second_interrupt_raises(monkeypatch):
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


async def _inside_a_loop(url):
    return len(run(url, CASE))


@pytest.mark.anyio
async def test_it_also_blocks_while_an_event_loop_runs():
    with Scripted(WORDS) as server:
        assert await _inside_a_loop(server.url) == 5
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


@pytest.mark.long
def test_intervals_of_two_runs_of_a_sweep_overlap(lab):
    """Other load on the machine may separate two runs, but hardly three pairs."""
    case = Case(prompt_tokens=32, output_tokens=48, requests=8)
    target = EngineTarget(manager_of(lab))

    def interval():
        table = run(target, [case] * 3)
        measured = table[~table["warm_up"]]
        return median_interval(measured["decode_tok_s"], groups=measured["repeat"])

    before = interval()
    for _ in range(3):
        again = interval()
        if before.overlaps(again):
            return
        before = again
    pytest.fail("three reruns, and no interval has overlapped the one before it")


@pytest.mark.long
def test_the_same_target_given_twice_is_equally_fast(lab):
    one, two = EngineTarget(manager_of(lab), name="one"), EngineTarget(manager_of(lab), name="two")
    found = []
    while len(found) < 3 and not (found and abs(found[-1] - 1) < 0.25):
        table = run([one, two], Case(prompt_tokens=32, output_tokens=48, requests=16))
        medians = table[~table["warm_up"]].groupby("target")["decode_tok_s"].median()
        found.append(medians["one"] / medians["two"])
    assert found[-1] == pytest.approx(1, abs=0.25), found


@pytest.mark.slow
@pytest.mark.parametrize("first_line", ["", "import asyncio; await asyncio.sleep(0)"])
def test_the_stop_button_returns_the_finished_requests(tmp_path, first_line):
    """In a cell with ``await``, the handler of ipykernel raises no exception."""
    with (
        closing(Notebook(tmp_path)) as notebook,
        Scripted(after_calibration(WORDS, WORDS, [token("a"), STALL])) as server,
    ):
        output = notebook.interrupt(
            f"""
            {first_line}
            from lmx_lab.bench import Case, run
            case = Case(prompt_tokens=8, output_tokens=4, requests=4)
            rows = run("{server.url}", case, progress=lambda step: step.done == 2 and print("started"))
            print(len(rows), rows.attrs["interrupted"])
            """
        )
        assert output.error is None, output.message
        assert output.text.strip() == "2 True"
        assert notebook.run("import sys; print('mlx.core' in sys.modules)") == "False"
