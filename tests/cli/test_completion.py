"""Tests of completion with the Tab key."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lmx_lab.cli.completion import complete_model, complete_pull, complete_session
from lmx_lab.client import DaemonClient
from tests.support.commands import WAIT_S, environment
from tests.support.daemons import serving

SCRIPT = Path(sys.executable).with_name("lmx-lab")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with empty models, because completion reads only names, and with folders and files that are no models."""
    models = tmp_path / "models"
    for name in ("own", "org/below", ".tmp/half"):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").touch()
    for name in ("files", "both", "split", "empty", "echo"):
        (models / name).mkdir()
    (models / "echo" / "config.json").touch()
    for name in (
        *("single.gguf", "files/model.Q4_K_M.gguf", "files/mmproj-model.gguf"),
        *("both/model-Q4_0.gguf", "both/model-Q8_0.gguf"),
        *("split/model-00001-of-00002.gguf", "split/model-00002-of-00002.gguf", "mmproj.gguf"),
    ):
        (models / name).touch()
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("lmx-lab serve --model o", ["org/below", "own"]),
        ("lmx-lab mod", ["models"]),
        ("lmx-lab serve --mod", ["--model", "--models", "--model-alias"]),
    ],
)
def test_commands_options_and_models_are_completed_in_bash(home, line, completions):
    # Load the completion script, then do what the Tab key does.
    command = (
        f'eval "$("{SCRIPT}" --show-completion)"; COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}; '
        '_lmx_lab_completion lmx-lab; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environ = {**environment(home), "PATH": f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=WAIT_S, env=environ, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, completions, "")


@pytest.mark.usefixtures("home")
def test_models_are_completed_by_their_listed_names():
    starters = ["minilm-l6", "smollm2-135m"]
    of_home = ["both/model-Q4_0.gguf", "both/model-Q8_0.gguf", "files", "org/below", "own", "single.gguf", "split"]
    assert complete_model("") == sorted([*of_home, *starters])
    assert complete_model("smollm2") == starters[1:]


def test_models_beside_a_folder_of_another_user_are_completed(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        names = [f"model-{number}" for number in range(9)]
        for name in names:
            Path(folder, name).mkdir()
            Path(folder, name, "config.json").touch()
        Path(folder, "model-4").chmod(0)
        os.chmod(folder, 0o755)
        monkeypatch.setenv("LMX_LAB_MODEL_FOLDERS", folder)
        complete_model("")  # Imports everything, which another user perhaps cannot.
        user = os.geteuid()
        # For root, no folder is unreadable.
        os.seteuid(user or 65534)
        try:
            completed = complete_model("model-")
        finally:
            os.seteuid(user)
    assert completed == [name for name in names if name != "model-4"]


def test_models_on_the_disk_are_not_completed_for_pull(home):
    (home / "models" / "minilm-l6").mkdir()
    (home / "models" / "minilm-l6" / "config.json").touch()
    assert complete_pull("") == ["smollm2-135m"]
    # Any format of a model will do.
    (home / "models" / "smollm2-135m-gguf").mkdir()
    (home / "models" / "smollm2-135m-gguf" / "file.gguf").touch()
    assert complete_pull("") == []


@pytest.fixture
def daemon(home):
    with serving(home) as daemon:
        yield daemon


@pytest.mark.usefixtures("daemon")
def test_sessions_of_the_running_daemon_are_completed(home):
    with DaemonClient.discover(home) as client:
        for name in ("letters", "list", "other"):
            client.session(name)
    assert sorted(complete_session("l")) == ["letters", "list"]


def test_a_failure_completes_nothing_and_prints_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path / "nowhere"))
    assert complete_session("") == []
    monkeypatch.setenv("LMX_LAB_SLOTS", "many")
    assert complete_model("") == []
    assert capsys.readouterr() == ("", "")
