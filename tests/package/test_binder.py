"""Test the files that Binder reads. ``make binder`` runs the complete build and its notebooks."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.starters import STARTERS
from tests.package.try_binder import NOTEBOOKS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def home(tmp_path, starter_home, smollm2, minilm, smollm2_gguf):
    """A home folder that already has the starters, to save their download."""
    models = tmp_path / ".lmx-lab" / "models"
    (models / "smollm2-135m-gguf").mkdir(parents=True)
    (models / "smollm2-135m-gguf" / smollm2_gguf.name).symlink_to(smollm2_gguf)
    for entry in (smollm2, minilm):
        (models / entry.id).symlink_to(entry.path)
    return tmp_path


def test_the_requirements_have_the_extras_for_notebooks_in_tested_versions():
    lines = (BINDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    constraints, package = [line for line in lines if line and not line.startswith("#")]
    option, path = constraints.split()
    # pip resolves the constraints relative to the file, and the package relative to the repository's root.
    assert (option, (BINDER / path).resolve()) == ("-c", ROOT / "tools" / "constraints" / "all.txt")
    extras = Requirement(package.replace(".", "lmx-lab", 1)).extras
    assert extras <= set(PROJECT["optional-dependencies"])
    installed = {Requirement(line).name for extra in extras for line in PROJECT["optional-dependencies"][extra]}
    assert {"jupyter-server-proxy", "jupyterlab", "anywidget", "xllamacpp"} <= installed


def test_the_package_supports_the_python_version():
    name, _, version = (BINDER / "runtime.txt").read_text().strip().partition("-")
    assert name == "python"
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_post_build_downloads_every_starter_into_the_default_home(home):
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    built = subprocess.run(
        [BINDER / "postBuild"],
        cwd=ROOT,
        env={"HOME": str(home), "PATH": path, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    found = {entry.id for entry in Catalog(Settings(home=home / ".lmx-lab")).scan()}
    assert set(STARTERS) <= found
    assert all(name in built.stdout for name in STARTERS)


def test_post_build_fails_if_a_model_cannot_be_downloaded(tmp_path):
    # An image without models would make every user wait for the download.
    program = tmp_path / "lmx-lab"
    program.write_text('#!/bin/sh\n[ "$2" != minilm-l6 ]\n')
    program.chmod(0o755)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    assert subprocess.run([BINDER / "postBuild"], env={"PATH": path}, check=False).returncode == 1


def test_start_enables_idle_unload_and_replaces_itself_with_the_server():
    # JupyterHub stops the process that it has started, so this must become the server itself.
    read = "import os, sys; from lmx_lab.settings import Settings; lab = Settings.read(); "
    write = "print(os.getpid(), lab.idle_unload_s, lab.swap, *sys.argv[1:])"
    environ = {name: text for name, text in os.environ.items() if not name.startswith("LMX_LAB_")}
    command = [str(BINDER / "start"), sys.executable, "-c", read + write, "a b"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as started:
        output, _ = started.communicate()
    assert output == f"{started.pid} 120.0 True a b\n"


def test_make_binder_runs_the_notebooks_of_the_introduction():
    assert [ROOT / name for name in NOTEBOOKS] == sorted((ROOT / "notebooks").glob("0[0-4]*.ipynb"))
