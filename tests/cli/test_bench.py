"""Tests of ``lmx-lab bench``: output and exit status."""

import json
import re
import signal
import sys

import httpx2
import pytest

from lmx_lab.bench import load
from lmx_lab.bench.sample import COLUMNS, frame
from lmx_lab.cli import bench_tables
from lmx_lab.cli.app import run
from tests.support.commands import run_command
from tests.support.labs import serving
from tests.support.model_server import STALL, WORDS, Scripted, after_calibration, refuses, token
from tests.support.samples import run_of, sample
from tests.support.waiting import until

SMALL = ("-p", "48", "-n", "8", "--requests", "3")


@pytest.fixture
def server():
    with Scripted(WORDS) as server:
        yield server


def bench(*arguments):
    """Run the command in this process, where nothing has to be imported again; return its exit status."""
    return run(["bench", *arguments])


def figures(output):
    """Return the cells of the lines with medians."""
    return [line.split() for line in output.splitlines() if re.match(r" *\d+ +\d+ ", line)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))
    return tmp_path


# --- a model of this process


def test_a_model_is_measured_in_this_process_without_http(tiny_home, tmp_path):
    plot = tmp_path / "bench.png"
    result = run_command(tiny_home, "bench", "--model", "tiny", *SMALL, "-c", "1,2", "-r", "2", "--plot", str(plot))
    assert result.status == 0, result.stderr
    heading = result.stdout.splitlines()[0]
    assert heading.startswith("engine · lmx-lab, bare · tiny · float32")
    rows = figures(result.stdout)
    assert [row[:5] for row in rows] == [["1", "48", "8", "6", "0"], ["2", "48", "8", "6", "0"]]
    assert all(float(cell) > 0 for row in rows for cell in row[5:])
    # 6 requests are enough for an interval, 2 repeats are not.
    assert len(re.findall(r"\d-\d", result.stdout)) == 2 * 3
    # Slow to import.
    from matplotlib.image import imread

    pixels = 255 * imread(plot)[..., :3]
    # Besides the axes and texts, which are black, there is only the line.
    assert (pixels[..., 2] - pixels[..., 0] > 60).sum() > 100
    found = re.search(r"stored in (\S+)", result.stderr)
    assert found
    assert len(load(found[1])) == 2 * 2 * (1 + 3)


@pytest.mark.slow
def test_with_compare_the_model_is_served_and_both_are_measured_over_http(home, server, capsys):
    plot = home / "bench.svg"
    assert bench("--model", "echo", *SMALL, "--compare", server.url, "--no-record", "--json", "--plot", str(plot)) == 0
    assert b"<svg" in plot.read_bytes()
    document = json.loads(capsys.readouterr().out)
    name = server.url.partition("://")[2]
    assert [(row["target"], row["requests"]) for row in document["summary"]] == [("lab", 3), (name, 3)]
    assert re.fullmatch(r"lmx-lab [\d.]+", document["summary"][0]["engine"])
    assert [(part["a"], part["b"], len(part["ratios"])) for part in document["comparison"]] == [("lab", name, 4)]
    assert len(document["requests"]) == 2 * (1 + 3)
    assert set(document["requests"][0]) == set(COLUMNS)
    assert all(row["queue_ms"] is not None for row in document["requests"] if row["target"] == "lab")
    assert (document["interrupted"], document["path"]) == (False, None)
    assert document["provenance"]["seeds"] == [0]


# --- running servers


@pytest.mark.slow
def test_a_running_server_is_measured_by_its_address(home, server, capsys):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LMX_LAB_API_KEY", "secret")
        assert bench("--url", server.url, "--model", "theirs", *SMALL) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{server.url.partition('://')[2]} · theirs\n")
    assert [row[:5] for row in figures(captured.out)] == [["1", "48", "8", "3", "0"]]
    assert {body["model"] for body in server.bodies} == {"theirs"}
    assert {head["authorization"] for head in server.headers} == {"Bearer secret"}
    assert len(list((home / "bench").iterdir())) == 1


@pytest.mark.slow
def test_arrivals_cache_and_seed_can_be_set(home, server, capsys):
    chosen = ("--rate", "50", "--warm", "--seed", "7", "--json")
    assert bench("--url", server.url, *SMALL, *chosen) == 0
    document = json.loads(capsys.readouterr().out)
    ways = {(row["arrival"], row["cache"], row["seed"]) for row in document["requests"]}
    assert ways == {("poisson(50/s)", "warm", 7)}
    assert bench("--url", server.url, *SMALL, "--rate", "0") == 2
    assert "above 0 and up to 10000" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_other_server_does_not_get_the_key_of_the_first(home, server, capsys):
    with Scripted(WORDS) as other:
        keys = ("--api-key", "first", "--compare-api-key", "second")
        compared = ("--compare", other.url, "--compare-model", "another")
        assert bench("--url", server.url, *SMALL, *keys, *compared) == 0
        assert bench("--url", server.url, *SMALL, "--api-key", "first", "--compare", other.url) == 0
        assert {head["authorization"] for head in server.headers} == {"Bearer first"}
        assert {head.get("authorization") for head in other.headers} == {"Bearer second", None}
        assert other.bodies[0]["model"] == "another"
    output = capsys.readouterr().out
    assert " compared with " in output
    assert "decode, tok/s" in output


@pytest.mark.slow
def test_failed_requests_are_counted_and_listed_and_the_exit_status_is_one(home, capsys):
    refused = refuses(429, "queue-full", "no \x1b[31mplace")
    with Scripted(after_calibration(WORDS, WORDS, refused, WORDS)) as server:
        assert bench("--url", server.url, *SMALL, "--no-record") == 1
    captured = capsys.readouterr()
    assert [row[:5] for row in figures(captured.out)] == [["1", "48", "8", "3", "1"]]
    assert "1 times queue-full: no \\x1b[31mplace" in captured.err
    assert "\x1b[31m" not in captured.err


def test_a_failed_warm_up_is_reported_separately_from_the_table(home, capsys):
    with Scripted(after_calibration(refuses(429, "queue-full", "no place"), WORDS)) as server:
        assert bench("--url", server.url, *SMALL, "--no-record") == 1
    captured = capsys.readouterr()
    assert [row[:5] for row in figures(captured.out)] == [["1", "48", "8", "3", "0"]]
    assert "1 times queue-full: no place (1 of them in the warm-up" in captured.err


@pytest.mark.parametrize("more", [[], ["--model", "m"], ["--json"]], ids=" ".join)
def test_an_unreachable_server_is_one_line_and_nothing_is_measured(home, capsys, more):
    assert bench("--url", "http://127.0.0.1:1", *more) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("unreachable: nothing answers at http://127.0.0.1:1")
    assert not (home / "bench").exists()


def test_the_server_to_compare_with_must_be_reachable(home, server, capsys):
    assert bench("--url", server.url, *SMALL, "--compare", "127.0.0.1:1") == 1
    assert capsys.readouterr().err.startswith("unreachable: nothing answers at http://127.0.0.1:1")
    assert server.bodies == []


def test_the_same_server_given_twice_is_refused(home, server, capsys):
    assert bench("--url", server.url, "--compare", server.url) == 2
    assert "the same name" in capsys.readouterr().err


def test_a_lab_without_a_model_is_one_line(home, capsys):
    with serving(home, None) as empty:
        assert bench("--url", f"127.0.0.1:{empty.server.port}", *SMALL, "--no-record") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("no-model-loaded: ")


@pytest.mark.slow
def test_a_lab_that_loads_models_on_demand_is_measured(home, capsys):
    with serving(home, "echo", swap=True, idle_unload_s=0.2) as lab:
        until(lambda: "0.2 s" in httpx2.get(f"{lab.url}/readyz").text)
        for named in ([], ["--model", "default"]):
            assert bench("--url", lab.url, *named, *SMALL, "--no-record") == 0, capsys.readouterr().err


def test_ctrl_c_prints_the_results_so_far(tmp_path):
    with Scripted(after_calibration(WORDS, WORDS, [token("a"), STALL])) as server:

        def interrupt(command):
            until(lambda: len(server.bodies) == 5)
            command.send_signal(signal.SIGINT)

        ended = run_command(tmp_path, "bench", "--url", server.url, *SMALL, meanwhile=interrupt)
    assert ended.status == 130
    assert "interrupted" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [row[:5] for row in figures(ended.stdout)] == [["1", "48", "8", "1", "0"]]
    (run,) = (tmp_path / "bench").iterdir()
    assert len(load(run)) == 2


# --- tables


def table(*samples, **attrs):
    rows = frame(samples, {})
    rows.attrs.update(interrupted=False, path=None, **attrs)
    return rows


def test_a_table_fits_into_eighty_characters(capsys):
    many = {"concurrency": 4096, "prompt_tokens_wanted": 100_000, "output_tokens_wanted": 10_000}
    slow = [12_345.6, 13_456.7, 14_567.8, 15_678.9]
    bench_tables.print_tables(table(*run_of(slow * 2, per_repeat=4, itl_ms_p50=123.4, **many)))
    output = capsys.readouterr().out
    assert re.search(r" \d{5}-\d{5} ", output)
    assert max(map(len, map(str.rstrip, output.splitlines()))) <= 80


def test_a_run_that_is_interrupted_immediately_prints_no_table(capsys):
    for rows in (table(), table(sample(warm_up=True))):
        bench_tables.print_tables(rows)
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "no request was measured\n")
        bench_tables.print_document(rows)
        assert json.loads(capsys.readouterr().out)["summary"] == []


def test_a_server_without_usage_is_reported(capsys):
    counted = run_of([5.0, 6.0], counted_by="usage", target="a")
    bench_tables.print_tables(table(*counted, *run_of([5.0, 6.0], counted_by="chunks", target="b")))
    notes = [each for each in capsys.readouterr().err.splitlines() if "reports no usage" in each]
    assert len(notes) == 1
    assert notes[0].startswith("b ")


def test_targets_without_a_common_case_are_not_compared(capsys):
    bench_tables.print_tables(table(sample(target="a"), sample(target="b", concurrency=2)))
    captured = capsys.readouterr()
    assert "compared with" not in captured.out
    assert "a and b cannot be compared" in captured.err


@pytest.mark.slow
def test_the_better_side_is_shown_with_three_or_more_repeats(capsys):
    for repeats, better in ((2, "-"), (3, "a")):
        quick, slow = ([float(at * factor) for at in range(100, 112)] for factor in (1, 2))
        sides = (("quick", quick), ("slow", slow))
        size = 12 // repeats
        samples = [one for name, values in sides for one in run_of(values, per_repeat=size, target=name)]
        bench_tables.print_tables(table(*samples))
        captured = capsys.readouterr()
        (shown,) = re.findall(r"first token, ms .* (\S+)\n", captured.out)
        assert shown == better
        assert "--repeats 3 or more" in captured.err


def test_totals_of_answers_with_different_lengths_are_not_compared(capsys):
    long, short = (run_of([1.0] * 9, per_repeat=3, target=str(tokens), tokens=tokens) for tokens in (8, 5))
    bench_tables.print_tables(table(*long, *short))
    captured = capsys.readouterr()
    assert re.search(r"total, tok/s +8 +5 +- +-", captured.out)
    assert "answers of a have 8 tokens, of b 5" in captured.err


def test_actual_token_counts_are_shown_if_they_differ(capsys):
    met = run_of([1.0], prompt_tokens=16)
    bench_tables.print_tables(table(*met))
    captured = capsys.readouterr()
    assert ("(" in captured.out, "in brackets" in captured.err) == (False, False)
    for prompt_tokens, shown in ((12, "(12)"), (None, "(?)")):
        bench_tables.print_tables(table(*run_of([1.0], tokens=5, prompt_tokens=prompt_tokens)))
        captured = capsys.readouterr()
        assert re.search(rf"^ +{re.escape(shown)} +\(5\)", captured.out, re.MULTILINE)
        assert "in brackets" in captured.err


def test_the_delay_of_requests_is_shown_with_arrivals(capsys):
    late = [sample(at_s=at, request=at, late_ms=100.0 * at, e2e_ms=500.0, output_tokens=8) for at in range(3)]
    bench_tables.print_tables(table(*late))
    captured = capsys.readouterr()
    assert re.search(r" 100\.0\n.* to 200\.0\n", captured.out)
    assert "late: " in captured.err
    bench_tables.print_tables(table(*run_of([1.0])))
    assert "late" not in "".join(capsys.readouterr())


def test_the_most_frequent_errors_are_shown_and_the_others_counted(capsys):
    failures = ["z: most", "z: most", *(f"e{at}: once" for at in range(6))]
    bench_tables.print_tables(table(*(sample(request=at, error=error) for at, error in enumerate(failures))))
    output = capsys.readouterr().err
    assert output.index("lab: 2 times z: most") < output.index("1 times e0")
    assert output.count("1 times e") == 4
    assert "and 2 other errors, 2 requests in total" in output


# --- invalid arguments


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--model"),
        (["--url", "127.0.0.1:1", "--concurrency", "1,x"], "--concurrency"),
        (["--url", "127.0.0.1:1", "-p", ""], "--prompt-tokens"),
        (["--url", "127.0.0.1:1", "-c", "0"], "concurrency is 0"),
        (["--url", "127.0.0.1:1", "--requests", "1", "-c", "4"], "requests is 1"),
        (["--url", "ftp://nowhere"], "ftp://nowhere"),
        # matplotlib is slow to import.
        pytest.param(["--url", "127.0.0.1:1", "--plot", "bench.txt"], ".png", marks=pytest.mark.slow),
        pytest.param(["--url", "127.0.0.1:1", "--plot", "/no/such/bench.png"], "folder", marks=pytest.mark.slow),
    ],
)
def test_an_invalid_argument_is_one_line_before_anything_is_measured(home, capsys, arguments, word):
    assert bench(*arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("invalid-request: ")
    assert word in captured.err
    assert not (home / "bench").exists()


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(home, server, capsys):
    (home / "bench").write_text("a file")
    assert bench("--url", server.url, *SMALL) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "the run cannot be stored in" in captured.err
    assert server.bodies == []


def test_an_unknown_model_is_an_error(home, capsys):
    assert bench("--model", "no-such") == 1
    assert "model-not-found" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "arguments"), [("pandas", []), ("matplotlib.figure", ["--plot", "bench.png"])])
def test_a_missing_package_is_reported_with_the_command_that_installs_it(home, capsys, missing, arguments):
    with pytest.MonkeyPatch.context() as patched:
        for module in [name for name in sys.modules if name.startswith("lmx_lab.bench.plots")]:
            patched.delitem(sys.modules, module)
        patched.setitem(sys.modules, missing, None)
        assert bench("--url", "127.0.0.1:1", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("package-missing: ")
    assert error.endswith("is not installed: pip install 'lmx-lab[lab]'\n")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_more_concurrent_requests_than_slots_give_a_note(home, capsys, monkeypatch):
    monkeypatch.setenv("LMX_LAB_SLOTS", "2")
    assert bench("--model", "echo", "-p", "32", "-n", "4", "-c", "4", "--requests", "4", "--no-record") == 0
    assert "LMX_LAB_SLOTS=4" in capsys.readouterr().err
