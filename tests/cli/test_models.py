"""Tests of ``lmx-lab pull`` and ``lmx-lab models``."""

import re
import shutil
from pathlib import Path

from tests.support.commands import run_command
from tests.support.gguf import EXACT, LOSSY, store_copy


def test_a_model_on_the_disk_is_not_downloaded_again(starter_home):
    result = run_command(starter_home, "pull", "smollm2-135m")
    assert (result.status, result.stderr) == (0, "")
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
    none = run_command(tmp_path, "models")
    assert (none.status, none.stdout) == (0, "")
    assert "no models in" in none.stderr


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
