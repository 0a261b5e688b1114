"""Tests of ``lmx-lab pull``, ``models``, ``plan``, ``rm`` and ``storage``."""

import json
import re
import shutil
from pathlib import Path

import pytest

from lmx_lab.cli import USAGE
from lmx_lab.errors import format_bytes
from tests.support.commands import run_command
from tests.support.gguf import EXACT, LOSSY, split_gguf, store_copy


def test_a_model_on_the_disk_is_not_downloaded_again(starter_home):
    result = run_command(starter_home, "pull", "smollm2-135m")
    assert result.status == 0
    # What the doctor says of this model is also said when it is pulled.
    assert result.stderr.startswith("smollm2-135m has weights of type Q4_1, for which llama.cpp has no fast kernels; ")
    assert result.stderr.endswith("; fix: lmx-lab quantize smollm2-135m\n")
    assert re.fullmatch(r"smollm2-135m: \d+ MB at \S+\n", result.stdout)


def test_pulling_echo_explains_that_it_has_no_files(tmp_path):
    result = run_command(tmp_path, "pull", "echo")
    assert result.status == 0
    assert "echo has no files to download" in result.stderr + result.stdout
    assert "lmx-lab serve --model echo" in result.stderr + result.stdout


def test_a_gguf_file_is_used_as_it_is_or_converted_on_request(tmp_path, smollm2_gguf):
    plain = run_command(tmp_path, "pull", str(smollm2_gguf))
    assert (plain.status, plain.stderr) == (0, "")
    assert re.fullmatch(r"(\S+): \d+ MB at \1\n", plain.stdout)
    assert "no models in" in run_command(tmp_path, "models").stderr
    converted = run_command(tmp_path, "pull", str(smollm2_gguf), "--mlx")
    assert converted.status == 0, converted.stderr
    assert converted.stdout.startswith("smollm2-135m-instruct.q4_1-b179c952: ")
    assert " mlx " in run_command(tmp_path, "models").stdout


def test_a_long_id_is_not_cut_on_a_narrow_terminal(tiny_home, tmp_path):
    name = "a-model-with-a-very-long-name-" * 4 + "instruct"
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "models" / name)
    assert name in run_command(tmp_path, "models", terminal=True, environ={"COLUMNS": "60"}).stdout


def test_models_are_listed_in_complete_lines_for_programs(tiny_home, tmp_path):
    result = run_command(tiny_home, "models")
    assert result.status == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["id", "tiny", "tiny-two"]
    assert "smollm2-135m" in result.stderr
    listed = json.loads(run_command(tiny_home, "models", "--json").stdout)["models"]
    assert [(it["id"], it["format"], it["engine"]) for it in listed] == [
        ("tiny", "mlx", "mlx"),
        ("tiny-two", "mlx", "mlx"),
    ]
    assert Path(listed[0]["path"]) == tiny_home / "models" / "tiny"
    none = run_command(tmp_path, "models")
    assert (none.status, none.stdout) == (0, "")
    assert "no models in" in none.stderr
    assert json.loads(run_command(tmp_path, "models", "--json").stdout) == {"models": [], "problem": None}


def test_models_of_additional_folders_are_listed(tiny_home, tmp_path):
    result = run_command(tmp_path, "models", "--models", str(tiny_home / "models"))
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["id", "tiny", "tiny-two"]
    missing = run_command(tmp_path, "models", "--models", str(tmp_path / "none"))
    assert (missing.status, missing.stdout) == (2, "")
    assert "is not a folder that can be read" in missing.stderr


def test_quantized_copies_are_listed_with_their_loss_and_made_only_once(tmp_path, tiny_gguf):
    folder = tmp_path / "files"
    folder.mkdir()
    original = Path(shutil.copy(tiny_gguf, folder / "tiny.gguf"))
    store_copy(tmp_path, original, EXACT)
    store_copy(tmp_path, original, LOSSY)
    environ = {"LMX_LAB_MODEL_FOLDERS": str(folder)}
    result = run_command(tmp_path, "models", environ=environ)
    (line,) = [line for line in result.stdout.splitlines() if line.split()[0] == "tiny.gguf"]
    assert " gguf " in line
    assert " Q8_0 copy of Q4_1 " in line
    assert "mean KL 0.005 per token, perplexity 17.8 instead of 17.7; loaded by default" in result.stderr
    assert "mean KL 0.27 per token, perplexity 20.5 instead of 17.7; loaded only as tiny.gguf:Q4_0" in result.stderr
    made = run_command(tmp_path, "quantize", "tiny.gguf", environ=environ)
    assert made.status == 0
    assert re.fullmatch(r"tiny.gguf: \d+ MB at \S+/model.gguf\n", made.stdout)
    assert "loaded by default" in made.stderr


# Storage


@pytest.fixture
def home(tmp_path, tiny_home, tiny_gguf):
    """Return a home with a model, a split GGUF model, a copy, a run, and a model in the hub cache."""
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "models" / "org" / "tiny")
    original = Path(shutil.copy(tiny_gguf, tmp_path / "models"))
    store_copy(tmp_path, original, EXACT)
    split_gguf(tiny_gguf, 2, tmp_path / "models")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "run.jsonl").write_bytes(b"0" * 1_000_000)
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "hub" / "hub" / "models--org--name" / "snapshots" / "0")
    return tmp_path


def stored(home, **environ):
    """Return name → size, as listed."""
    result = run_command(home, "storage", environ=environ)
    assert result.status == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    assert rows[0] == ["name", "what", "size", "path"]
    sizes = {name: size for name, _, size, _ in rows[1:]}
    units = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
    in_bytes = [float(number) * units[unit] for number, unit in map(str.split, sizes.values())]
    assert in_bytes == sorted(in_bytes, reverse=True)
    assert re.search(r"in all; \S+ GB are free at", result.stderr)
    return sizes


def test_everything_that_takes_space_is_listed_and_deleted_by_its_name(home):
    sizes = stored(home)
    (parts,) = [name for name in sizes if name.endswith("-00001-of-00002.gguf")]
    (copy,) = [name for name in sizes if name.startswith("tiny") and name not in ("tiny.gguf", parts)]
    assert set(sizes) == {"bench", copy, "tiny.gguf", parts, "org/tiny", "org/name"}
    assert sizes["bench"] == "1 MB"
    whole = format_bytes((home / "models" / "tiny.gguf").stat().st_size)
    assert sizes["tiny.gguf"] == sizes[parts] == whole
    for name in (parts, copy, "org/tiny", "org/name", "bench"):
        result = run_command(home, "storage", "--remove", name, "--yes")
        assert (result.status, result.stdout) == (0, f"deleted {name}: {sizes.pop(name)}\n")
        assert name in result.stderr
        assert set(stored(home)) == set(sizes)
    assert [path.name for path in (home / "models").iterdir() if not path.name.startswith(".")] == ["tiny.gguf"]


def test_a_deletion_needs_confirmation_and_all_names_are_checked_first(home):
    before = stored(home)
    asked = run_command(home, "storage", "--remove", "org/tiny")
    assert asked.status != 0
    assert "the question needs a terminal; add --yes" in asked.stderr
    wrong = run_command(home, "storage", "--remove", "org/tiny", "--remove", "org/tini", "--yes")
    assert wrong.status == USAGE
    assert "nothing named 'org/tini' takes space on this disk; did you mean 'org/tiny'?" in wrong.stderr
    assert stored(home) == before


@pytest.mark.parametrize(("answer", "left"), [("y\r", False), ("\r", True), ("no\r", True)])
def test_a_question_at_the_terminal_is_answered(home, answer, left):
    def type_answer(command):
        command.wait_for("Delete bench? [y/N]")
        command.type(answer)

    assert run_command(home, "storage", "--remove", "bench", terminal=True, meanwhile=type_answer).status == 0
    assert (home / "bench").exists() is left


def test_files_of_other_programs_and_of_the_user_are_never_deleted(home, tmp_path, tiny_gguf):
    mine, cache = tmp_path / "mine", tmp_path / "llama"
    for folder in (mine, cache):
        folder.mkdir()
        shutil.copy(tiny_gguf, folder)
    records = tmp_path / "records.db"
    records.write_bytes(b"0" * 1000)
    environ = {"LMX_LAB_MODEL_FOLDERS": str(mine), "LLAMA_CACHE": str(cache), "LMX_LAB_OTHER_PROGRAMS": "1"}
    environ["LMX_LAB_RECORD_TO"] = str(records)
    sizes = stored(home, **environ, HOME=str(tmp_path), OLLAMA_MODELS=str(tmp_path / "none"))
    assert {str(mine), "llama.cpp", "records"} <= set(sizes)
    for name, remedy in (
        (str(mine), "its files are your own; delete them in the folder"),
        ("llama.cpp", "delete its files in this folder"),
        ("records", "delete its records with lab.requests.clear()"),
    ):
        result = run_command(home, "storage", "--remove", name, "--yes", environ=environ)
        assert result.status == USAGE
        assert remedy in result.stderr
    assert len(list(mine.iterdir())) == len(list(cache.iterdir())) == 1
    assert records.exists()


REMOVED = r"deleted (\S+): [\d.]+ \w+\n"


def remove(home, *names, **environ):
    return run_command(home, "rm", *names, "--yes", environ={"LMX_LAB_PORT": "9", **environ})


def test_a_model_is_deleted_with_its_copies_after_a_list_of_its_files(home):
    before = stored(home)
    asked = run_command(home, "rm", "tiny.gguf", "org/tiny", environ={"LMX_LAB_PORT": "9"})
    assert (asked.status, "the question needs a terminal; add --yes" in asked.stderr) == (USAGE, True)
    wrong = remove(home, "tiny.gguf", "org/tini")
    assert (wrong.status, "did you mean 'org/tiny'?" in wrong.stderr) == (1, True)
    assert stored(home) == before
    done = remove(home, "tiny.gguf", "org/tiny")
    assert done.status == 0, done.stderr
    assert re.fullmatch(REMOVED * 2, done.stdout)[1] == "tiny.gguf"
    for part in ("tiny.gguf: model, ", ": quantized copy, ", " MB  model.safetensors", "org/tiny: model, "):
        assert part in done.stderr
    assert {re.sub("-0000.*", "", name) for name in stored(home)} == {"bench", "tiny", "org/name"}
    assert "bench" in remove(home, "bench").stderr
    assert (home / "bench").exists()


def test_one_model_of_a_repository_is_deleted_without_files_that_others_use(tmp_path, tiny_gguf):
    repo = tmp_path / "hub" / "hub" / "models--org--two"
    for blob in ("shared", "other"):
        (repo / "blobs").mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny_gguf, repo / "blobs" / blob)
    for commit, names in (
        ("a" * 10, {"m-Q4_1.gguf": "shared"}),
        ("b" * 10, {"m-Q4_1.gguf": "other", "m-F16.gguf": "shared"}),
    ):
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, blob in names.items():
            (snapshot / name).symlink_to(repo / "blobs" / blob)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("b" * 10)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link.gguf").symlink_to(repo / "snapshots" / ("b" * 10) / "m-Q4_1.gguf")
    done = remove(tmp_path, "org/two:Q4_1")
    assert (done.status, done.stdout.startswith("deleted org/two:Q4_1: ")) == (0, True), done.stderr
    assert "other programs, such as transformers, may use files in the hub cache" in done.stderr
    assert "link.gguf links to these files, and cannot be loaded without them" in done.stderr
    left = {str(path.relative_to(repo)) for path in repo.rglob("*") if not path.is_dir()}
    assert left == {"blobs/shared", f"snapshots/{'b' * 10}/m-F16.gguf", "refs/main"}
    assert remove(tmp_path, "org/two").status == 0
    assert not repo.exists()


def test_models_of_other_programs_and_of_the_user_are_not_deleted(tmp_path, tiny_gguf):
    mine, cache = tmp_path / "mine", tmp_path / "llama"
    for folder, name in ((mine, "mine.gguf"), (cache, "other.gguf")):
        folder.mkdir()
        shutil.copy(tiny_gguf, folder / name)
    environ = {"LMX_LAB_MODEL_FOLDERS": str(mine), "LLAMA_CACHE": str(cache), "LMX_LAB_OTHER_PROGRAMS": "1"}
    for name, remedy in (
        ("mine.gguf", "its files are your own; delete them in the folder"),
        ("other.gguf", "delete its files in this folder"),
        (str(tiny_gguf), "its files are your own; delete them in the folder"),
        ("echo", "echo has no files"),
    ):
        done = remove(tmp_path, name, **environ)
        assert (done.status, done.stdout, remedy in done.stderr) == (USAGE, "", True), done.stderr
    assert tiny_gguf.exists()
    assert len(list(mine.iterdir())) == len(list(cache.iterdir())) == 1


def test_of_a_link_only_the_link_is_deleted(tiny_home, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(tiny_home / "models" / "tiny")
    assert "link to a model" in run_command(tmp_path, "storage").stdout
    assert list(stored(tmp_path)) == ["linked"]
    # The size of a link is the length of the path that it contains.
    printed = run_command(tmp_path, "storage", "--remove", "linked", "--yes").stdout
    assert re.fullmatch(r"deleted linked: \d+ bytes\n", printed)
    assert (tiny_home / "models" / "tiny" / "config.json").exists()


@pytest.mark.parametrize("engine", ["mlx", "llama.cpp"])
def test_a_plan_is_printed_as_a_table_or_as_json(tiny_home, tiny_gguf, engine):
    model = "tiny" if engine == "mlx" else str(tiny_gguf)
    shown = run_command(tiny_home, "plan", model, "--context-length", "300")
    assert (shown.status, shown.stderr) == (0, "")
    title, *lines = shown.stdout.splitlines()
    assert title.endswith(f" on {engine}")
    names = [line[:15].strip() for line in lines]
    assert names == ["verdict", "memory", "weights", "KV cache", "largest context", "decoding"]
    plan = json.loads(run_command(tiny_home, "plan", model, "--context-length", "300", "--json").stdout)
    assert (plan["engine"], plan["fits"], plan["unload"], plan["context_length"]) == (engine, "now", [], 512)
    assert [it["requests"] for it in plan["contexts"]] == [1, 4, 8]


def test_a_plan_that_is_impossible_states_the_reason(tiny_home):
    absent = run_command(tiny_home, "plan", "absent", environ={"LMX_LAB_DOWNLOADS": "0"})
    assert (absent.status, absent.stdout) == (1, "")
    assert absent.stderr.startswith("model-not-found: there is no model 'absent' on disk")
    refused = run_command(tiny_home, "plan", "tiny", "--engine", "llama.cpp")
    assert (refused.status, refused.stdout) == (1, "")
    assert "runs on mlx and not on llama.cpp" in refused.stderr
    assert run_command(tiny_home, "plan", "tiny", "--context-length", "0").status == USAGE
