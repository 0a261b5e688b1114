"""Runs: turns of targets, progress, storage, interrupts."""

import errno
import re
import signal
import threading

import pytest

from lmx_lab.bench.case import Case, Poisson, Sweep
from lmx_lab.bench.runner import RunProgress, progress_text, run, samples
from lmx_lab.bench.sample import COLUMNS
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.summaries import compare
from lmx_lab.bench.targets import ChatTarget, EngineTarget, TargetFacts, engine_sides
from lmx_lab.errors import InvalidRequestError, UnusableModelError
from tests.support.labs import manager_of, serving
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
def test_progress_is_a_bar_in_a_terminal_and_a_line_after_each_round_in_a_log(monkeypatch, capsys):
    with Scripted(WORDS) as server:
        table = run(server.url, [CASE] * 3)
        *before, last = capsys.readouterr().err.splitlines()
        assert [re.sub(r"\d+ s", "N s", line) for line in (*before, last)] == [
            "bench: round 1 of 3 (p8-o4-c1-cold, repeat 1): 5 of 15 requests in N s, about N s left",
            "bench: round 2 of 3 (p8-o4-c1-cold, repeat 2): 10 of 15 requests in N s, about N s left",
            "bench: round 3 of 3 (p8-o4-c1-cold, repeat 3): 15 of 15 requests in N s",
        ]
        assert table.attrs["rounds"] == {"finished": 3, "planned": 3}
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


def test_targets_get_the_given_names():
    with Scripted(WORDS) as one, Scripted(WORDS) as two:
        target = ChatTarget(two.url, name="own")
        assert set(run([one.url, target], CASE, names=["a", "b"])["target"]) == {"a", "b"}
        assert set(run([one.url, target], CASE, names="a")["target"]) == {"a", "own"}
    assert target.name == "own"


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a", "a"], ["own"], [""], [7]])
def test_names_that_are_not_valid_are_refused(names):
    with pytest.raises(InvalidRequestError, match="name"):
        run(["127.0.0.1:1", ChatTarget("127.0.0.1:1", name="own")], CASE, names=names)


# --- engines


@pytest.fixture(scope="module")
def both_formats(tmp_path_factory, tiny, tiny_gguf):
    """The home of a lab with ``smollm2-135m`` in both formats, whose files are those of a tiny model."""
    models = tmp_path_factory.mktemp("both-formats") / "models"
    (models / "smollm2-135m-gguf").mkdir(parents=True)
    (models / "smollm2-135m").symlink_to(tiny.path)
    (models / "smollm2-135m-gguf" / "tiny.gguf").symlink_to(tiny_gguf)
    return models.parent


@pytest.fixture
def lab(both_formats):
    with serving(both_formats, "smollm2-135m", downloads=False) as lab:
        yield lab


@pytest.mark.slow
def test_engines_take_turns_after_each_repeat_and_the_model_stays_on_its_own(lab):
    manager = manager_of(lab)
    format_before = manager.snapshot.main.entry.format
    small = {"prompt_tokens": 32, "output_tokens": 4, "concurrency": (1, 2), "requests": 2, "repeats": 3}
    rows = lab.bench(**small, engines=["mlx", "llama.cpp"], names=["other"], record=False)
    assert rows["error"].isna().all()
    order = [(target, repeat) for target, repeat in zip(rows["target"], rows["repeat"], strict=True)]
    assert list(dict.fromkeys(order)) == [
        *[("other", 0), ("llama.cpp", 0)],
        *[("llama.cpp", 1), ("other", 1)],
        *[("other", 2), ("llama.cpp", 2)],
    ]
    engines = rows.groupby("target")["engine"].unique()
    assert ["llama.cpp" in engines[name].item() for name in ("other", "llama.cpp")] == [False, True]
    sides = (rows[rows["target"] == name] for name in ("other", "llama.cpp"))
    assert compare(*sides, metrics=["ttft_ms"])["paired"].all()
    assert manager.snapshot.main.entry.format == format_before


@pytest.mark.slow
@pytest.mark.parametrize("engines", ["foo", ["mlx", "mlx"], ["auto"]])
def test_engines_that_are_not_valid_are_refused_without_a_load(lab, engines):
    before = manager_of(lab).main
    with pytest.raises(InvalidRequestError, match="engine"):
        lab.bench(engines=engines)
    assert manager_of(lab).main is before


@pytest.mark.slow
def test_an_engine_that_cannot_run_the_model_is_refused_before_anything_is_measured(tiny_home):
    with serving(tiny_home, "tiny", downloads=False) as lab:
        with pytest.raises(UnusableModelError, match=r"llama\.cpp"):
            lab.bench(engines=["mlx", "llama.cpp"], record=False)
        assert manager_of(lab).snapshot.model == "tiny"


@pytest.mark.slow
def test_an_engine_that_fails_in_the_middle_does_not_stop_the_others(lab, both_formats):
    """The file of llama.cpp is removed by the first request, when each engine has loaded the model once."""
    case = Case(prompt_tokens=32, output_tokens=4, requests=2)
    file = both_formats / "models" / "smollm2-135m-gguf" / "tiny.gguf"
    stored = file.resolve()

    class Removing(EngineTarget):
        def ask(self, body):
            file.unlink(missing_ok=True)
            return super().ask(body)

    sides = engine_sides(Removing(manager_of(lab)), lab.backend, "smollm2-135m", ["mlx", "llama.cpp"])
    try:
        rows = run(sides, [case] * 3)
    finally:
        file.symlink_to(stored)
    failed = rows[rows["error"].notna()]
    assert set(failed["target"]) == {"llama.cpp"}
    assert failed["error"].str.contains("llama.cpp").all()
    assert len(failed) == 3 * (case.warm_up + case.requests)
    assert len(rows) == 3 * 2 * (case.warm_up + case.requests)
    assert rows.attrs["rounds"] == {"finished": 3, "planned": 3}


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
