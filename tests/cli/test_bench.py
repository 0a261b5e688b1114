"""Tests of ``lmx-lab bench``: output and exit status."""

import json
import re
import shlex
import signal

import httpx2
import pytest

from lmx_lab.bench import load, summary
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
    # Slow to import.
    from matplotlib.image import imread

    pixels = 255 * imread(plot)[..., :3]
    # Besides the axes and texts, which are black, there is only the line.
    assert (pixels[..., 2] - pixels[..., 0] > 60).sum() > 100
    found = re.search(r"stored in (\S+)", result.stderr)
    requests = load(found[1])
    assert len(requests) == 2 * 2 * (1 + 3)
    # 6 requests are enough for an interval, 2 repeats are not. An engine that sends several tokens at once, because the
    # machine is busy, has no speed.
    ends = summary(requests)[[f"{name}_low" for name in bench_tables.METRICS_SHOWN]]
    assert len(re.findall(r"\d-\d", result.stdout)) == ends.notna().sum().sum()
    assert ends["ttft_ms_low"].notna().all()
    assert ends["total_tok_s_low"].isna().all()


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


@pytest.mark.slow
def test_engines_of_a_running_lab_are_compared_under_their_names(home, tiny, tiny_gguf, capsys):
    models = home / "models"
    (models / "smollm2-135m-gguf").mkdir(parents=True)
    (models / "smollm2-135m").symlink_to(tiny.path)
    (models / "smollm2-135m-gguf" / "tiny.gguf").symlink_to(tiny_gguf)
    engines = ("--engine", "mlx", "--engine", "llama.cpp", "--name", "first")
    with serving(home, "smollm2-135m", downloads=False) as lab:
        assert bench("--url", lab.url, *engines, *SMALL) == 0, capsys.readouterr().err
    output, errors = capsys.readouterr()
    assert "first (a) compared with llama.cpp (b)\n" in output
    assert "bench: loading smollm2-135m on llama.cpp\nbench: loading smollm2-135m on mlx\nbench: round 1 of 1" in errors
    assert bench("--model", "smollm2-135m", *engines, *SMALL, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["target"], row["requests"], row["errors"]) for row in document["summary"]] == [
        ("first", 3, 0),
        ("llama.cpp", 3, 0),
    ]
    assert document["rounds"] == {"finished": 1, "planned": 1}


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
    assert bench("--url", server.url, *SMALL, "--rate", "50", "--warm", "--seed", "7", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    ways = {(row["arrival"], row["cache"], row["seed"]) for row in document["requests"]}
    assert ways == {("poisson(50/s)", "warm", 7)}


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
@pytest.mark.parametrize(
    ("before", "failures", "where"),
    [
        pytest.param([WORDS, WORDS], "1", "\n", id="measured"),
        pytest.param([], "0", " (1 of them in the warm-up", id="warm-up"),
    ],
)
def test_failed_requests_are_counted_and_listed_and_the_exit_status_is_one(home, capsys, before, failures, where):
    refused = refuses(429, "queue-full", "no \x1b[31mplace")
    with Scripted(after_calibration(*before, refused, WORDS)) as server:
        assert bench("--url", server.url, *SMALL, "--no-record") == 1
    captured = capsys.readouterr()
    assert [row[:5] for row in figures(captured.out)] == [["1", "48", "8", "3", failures]]
    assert f"1 time queue-full: no \\x1b[31mplace{where}" in captured.err
    assert "\x1b[31m" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "invalid-request: there is nothing to measure; give --model"),
        ("--url 127.0.0.1:1 --concurrency 1,x", "invalid-request: --concurrency"),
        ("--url 127.0.0.1:1 -p ''", "invalid-request: --prompt-tokens"),
        ("--url 127.0.0.1:1 --requests 1 -c 4", "invalid-request: requests is 1"),
        ("--url 127.0.0.1:1 --rate 0", "invalid-request: per_second is 0.0; give a number above 0 and up to 10000"),
        ("--model no-such --engine foo", "invalid-request: the engine 'foo' is unknown; give mlx or llama.cpp"),
        ("--model no-such --engine mlx --engine mlx", "invalid-request: the engine mlx is given twice"),
        ("--model no-such --name a --name b", "invalid-request: there are more names (a, b) than sides"),
        ("--model no-such --engine mlx --name b --engine llama.cpp --name b", "invalid-request: two targets have the"),
        ("--url {server} --name ''", "invalid-request: the name '' of a side"),
        ("--url ftp://nowhere", "invalid-request: url: 'ftp://nowhere'"),
        ("--url {server} --compare {server}", "invalid-request: two targets have the same name"),
        # matplotlib is slow to import.
        pytest.param(
            "--url 127.0.0.1:1 --plot bench.txt",
            "invalid-request: --plot is 'bench.txt'; its suffix must be",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--url 127.0.0.1:1 --plot /no/such/bench.png",
            "invalid-request: --plot is '/no/such/bench.png'; give a file",
            marks=pytest.mark.slow,
        ),
        ("--url http://127.0.0.1:1", "unreachable: nothing answers at http://127.0.0.1:1"),
        ("--url http://127.0.0.1:1 --json", "unreachable: nothing answers at http://127.0.0.1:1"),
        ("--url {server} --compare 127.0.0.1:1", "unreachable: nothing answers at http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_measured_is_one_line_before_anything_is_measured(home, server, capsys, arguments, message):
    status = 2 if message.startswith("invalid-request") else 1
    assert bench(*shlex.split(arguments.format(server=server.url))) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith(message)
    assert not (home / "bench").exists()
    assert server.bodies == []


def test_a_lab_without_a_model_is_one_line(home, capsys):
    with serving(home, None) as empty:
        assert bench("--url", f"127.0.0.1:{empty.server.port}", *SMALL, "--no-record") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("no-model-loaded: ")


@pytest.mark.slow
def test_a_lab_that_loads_models_on_demand_is_measured(home, capsys):
    with serving(home, "echo", swap=True, idle_unload_s=0.2) as lab:
        until(lambda: "was unloaded because it was idle" in httpx2.get(f"{lab.url}/readyz").text)
        for named in ([], ["--model", "default"]):
            assert bench("--url", lab.url, *named, *SMALL, "--no-record") == 0, capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_the_results_so_far(tmp_path, number):
    with Scripted(after_calibration(WORDS, WORDS, [token("a"), STALL])) as server:

        def interrupt(command):
            until(lambda: len(server.bodies) == 5)
            command.send_signal(number)

        ended = run_command(tmp_path, "bench", "--url", server.url, *SMALL, meanwhile=interrupt)
    assert ended.status == 130
    assert ended.stdout.startswith("interrupted: partial results, 0 of 1 rounds have finished\n")
    assert "Traceback" not in ended.stderr
    assert [row[:5] for row in figures(ended.stdout)] == [["1", "48", "8", "1", "0"]]
    (run,) = (tmp_path / "bench").iterdir()
    assert len(load(run)) == 2


# --- tables


def table(*samples, **attrs):
    rows = frame(samples, {})
    rows.attrs.update(interrupted=False, rounds={"finished": 1, "planned": 1}, path=None, **attrs)
    return rows


def test_a_table_fits_into_eighty_characters(printed):
    many = {"concurrency": 4096, "prompt_tokens_wanted": 100_000, "output_tokens_wanted": 10_000}
    slow = [12_345.6, 13_456.7, 14_567.8, 15_678.9]
    output, _ = printed(*run_of(slow * 2, per_repeat=4, itl_ms_p50=123.4, **many))
    assert re.search(r" \d{5}-\d{5} ", output)
    assert max(map(len, map(str.rstrip, output.splitlines()))) <= 80


@pytest.fixture
def printed(capsys):
    """Print the tables of these samples; return standard output and standard error."""

    def show(*samples):
        bench_tables.print_tables(table(*samples))
        return capsys.readouterr()

    return show


def test_a_run_that_is_interrupted_immediately_prints_no_table(printed, capsys):
    for samples in ([], [sample(warm_up=True)]):
        assert printed(*samples) == ("", "no request was measured\n")
        bench_tables.print_document(table(*samples))
        assert json.loads(capsys.readouterr().out)["summary"] == []


def test_a_server_without_usage_is_reported(printed):
    counted = run_of([5.0, 6.0], counted_by="usage", target="a")
    _, error = printed(*counted, *run_of([5.0, 6.0], counted_by="chunks", target="b"))
    (note,) = [line for line in error.splitlines() if "reports no usage" in line]
    assert note.startswith("b ")


def test_targets_without_a_common_case_are_not_compared(printed):
    output, error = printed(sample(target="a"), sample(target="b", concurrency=2))
    assert "compared with" not in output
    assert "a and b cannot be compared" in error


@pytest.mark.slow
@pytest.mark.parametrize(("repeats", "better"), [(2, "-"), (3, "a")])
def test_the_better_side_is_shown_with_three_or_more_repeats(printed, repeats, better):
    quick, slow = (
        run_of([float(at * factor) for at in range(100, 112)], per_repeat=12 // repeats, target=name)
        for name, factor in (("quick", 1), ("slow", 2))
    )
    output, error = printed(*quick, *slow)
    assert re.findall(r"first token, ms .* (\S+)\n", output) == [better]
    assert "--repeats 3 or more" in error


def test_totals_of_answers_with_different_lengths_are_not_compared(printed):
    long, short = (run_of([1.0] * 9, per_repeat=3, target=str(tokens), tokens=tokens) for tokens in (8, 5))
    output, error = printed(*long, *short)
    assert re.search(r"total, tok/s +8 +5 +- +-", output)
    assert "answers of a have 8 tokens, of b 5" in error


def test_actual_token_counts_are_shown_if_they_differ(printed):
    output, error = printed(*run_of([1.0], prompt_tokens=16))
    assert ("(" in output, "in brackets" in error) == (False, False)
    for prompt_tokens, shown in ((12, "(12)"), (None, "(?)")):
        output, error = printed(*run_of([1.0], tokens=5, prompt_tokens=prompt_tokens))
        assert re.search(rf"^ +{re.escape(shown)} +\(5\)", output, re.MULTILINE)
        assert "in brackets" in error


def test_the_delay_of_requests_is_shown_with_arrivals(printed):
    output, error = printed(
        *(sample(at_s=at, request=at, late_ms=100.0 * at, e2e_ms=500.0, output_tokens=8) for at in range(3))
    )
    assert re.search(r" 100\.0\n.* to 200\.0\n", output)
    assert "late: " in error
    assert "late" not in "".join(printed(*run_of([1.0])))


def test_the_most_frequent_errors_are_shown_and_the_others_counted(printed):
    failures = ["z: most", "z: most", *(f"e{at}: once" for at in range(6))]
    _, error = printed(*(sample(request=at, error=failure) for at, failure in enumerate(failures)))
    assert error.index("lab: 2 times z: most") < error.index("1 time e0")
    assert error.count("1 time e") == 4
    assert "and 2 other errors, 2 requests in total" in error


# --- invalid arguments


def test_an_unknown_model_is_an_error(home, capsys):
    assert bench("--model", "no-such") == 1
    assert "model-not-found" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(home, server, capsys):
    (home / "bench").write_text("a file")
    assert bench("--url", server.url, *SMALL) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "the run cannot be stored in" in captured.err
    assert server.bodies == []


@pytest.mark.slow
def test_more_concurrent_requests_than_slots_give_a_note(home, capsys, monkeypatch):
    monkeypatch.setenv("LMX_LAB_SLOTS", "2")
    assert bench("--model", "echo", "-p", "32", "-n", "4", "-c", "4", "--requests", "4", "--no-record") == 0
    assert "LMX_LAB_SLOTS=4" in capsys.readouterr().err
