"""Test the installation of a small project without a package index, and the translation of pip's settings for uv."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions, metadata, version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "tools" / "constraints" / "all.txt"
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "small"
version = "1"
optional-dependencies = { lab = [] }
[dependency-groups]
dev = ["packaging>=20", "absent; sys_platform == 'none'"]
"""
BROKEN_UV = """#!/bin/sh
echo "$@" >> uv-was-called
echo "no route to the index"
exit 2
"""


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    """A small project with an environment that uses pip and the build tools of this environment."""
    (tmp_path / "tools" / "constraints").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "install.py", tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "tools" / "constraints" / "all.txt").write_text("")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "__init__.py").write_text("")
    environment = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (purelib / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path


def run_install(checkout, *arguments):
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [checkout / ".venv" / "bin" / "python", checkout / "tools" / "install.py", *arguments],
        cwd=checkout.parent, env=environ | unreachable, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("demo", ["lab,gguf"]),
        ("lab", ["lab,gguf"]),
        ("setup", ["lab,gguf", "lab,gguf --groups dev --compile"]),
        ("test", ["lab,gguf", "lab,gguf --groups dev --compile"]),
        ("check", ["lab,gguf", "lab,gguf --groups dev --compile"]),
    ],
)
def test_running_needs_no_development_tools_and_testing_adds_them(target, extras, tmp_path):
    (tmp_path / "tools" / "constraints").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "tools/constraints/all.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    planned = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.findall(r"python tools/install\.py (.+)", planned.stdout) == extras


def installed(checkout, *arguments):
    """Return the output of an installation after which the package can be imported."""
    completed = run_install(checkout, *arguments)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    subprocess.run([checkout / ".venv" / "bin" / "python", "-c", "import small"], cwd=checkout.parent, check=True)
    return completed.stdout


@pytest.mark.parametrize("arguments", [["lab"], ["lab", "--groups", "dev"], ["--groups", "dev"]], ids=" ".join)
def test_pip_installs_the_checkout_if_uv_cannot_be_installed(checkout, arguments):
    (checkout / "tools" / "constraints" / "all.txt").write_text("uv==0.0.0\n")
    assert "uv cannot be installed" in installed(checkout, *arguments)


@pytest.fixture
def uv(checkout):
    """The path of a program that ``tools/install.py`` uses as uv, with the metadata by which pip finds it installed."""
    purelib = next((checkout / ".venv" / "lib").glob("python*/site-packages"))
    (purelib / "uv-1.dist-info").mkdir()
    (purelib / "uv-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: uv\nVersion: 1\n")
    path = checkout / ".venv" / "bin" / "uv"
    path.touch(0o755)
    return path


def test_pip_installs_the_checkout_if_uv_fails(checkout, uv):
    uv.write_text(BROKEN_UV)
    assert "no route to the index\nuv failed\n" in installed(checkout, "lab")
    assert "pip install --python" in (checkout / "uv-was-called").read_text()


def test_pip_is_not_tried_if_versions_conflict(checkout, uv):
    message = "No solution found when resolving dependencies: your requirements are unsatisfiable"
    uv.write_text(BROKEN_UV.replace("no route to the index", message))
    failed = run_install(checkout, "lab")
    assert (failed.returncode, failed.stdout) == (1, f"installing lmx-lab with lab\ninstalling uv\n{message}\n")
    assert failed.stderr.startswith("no versions fit this version of Python")


def test_the_pinned_versions_support_the_lowest_version_of_python():
    """A newcomer may have the first release of the lowest version, such as 3.11.2 on Debian 12."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = project["requires-python"].removeprefix(">=") + ".0"
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines())
    found = {name: version(name) for name in pinned if name in {each.name for each in distributions()}}
    assert len(found) > 0.9 * len(pinned)
    assert found == {name: pinned[name] for name in found}
    unfit = {
        name: needed
        for name in found
        if not SpecifierSet(needed := metadata(name)["Requires-Python"] or "").contains(lowest)
    }
    assert unfit == {}


def test_the_exit_status_is_1_if_neither_can_install(install, monkeypatch):
    for command in ("PIP_INSTALL", "UV_INSTALL"):
        monkeypatch.setattr(install, command, ("false",))
    assert install.main(["lab"]) == 1


def test_the_packages_of_a_dependency_group_are_installed_beside_the_checkout(install):
    _, (*options, package, first, _) = install.steps("lab", "parity,parity")
    assert (options[-1], package, first) == ("--editable", ".[lab]", "torch>=2.13")
    assert install.steps("", "")[1][-1] == "."
    with pytest.raises(SystemExit, match="no dependency group 'devel', only dev, parity, cluster"):
        install.steps("lab", "dev,devel")


def test_the_library_of_mlx_for_gpus_is_installed_again_after_that_of_mlx_cpu(install):
    assert len(install.steps("lab,gguf")) == 2
    *_, package = install.steps("lab,cuda")[2]
    name, _, version = package.partition("==")
    assert name == "mlx-cuda-13"
    assert f"\nmlx=={version}\n" in (ROOT / "tools" / "constraints" / "all.txt").read_text()


def test_settings_of_pip_are_read_in_pips_order_of_precedence(install, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://global.example/simple\ntimeout = 7\ncert = /global.pem\n")
    config.write_text(config.read_text() + "[install]\nindex_url = https://install.example/simple\ntimeout = 8\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_TIMEOUT", "9")
    settings = install.pip_settings()
    assert settings["index-url"] == "https://install.example/simple"
    assert settings["timeout"] == "9"
    assert settings["cert"] == "/global.pem"


def test_uv_uses_the_indexes_and_certificates_of_pip(install, tmp_path):
    pip = {
        "index-url": "https://index.example/simple",
        "extra-index-url": "\nhttps://one.example/simple\nfile:///nowhere/simple",
        "cert": "/etc/company.pem",
        "find-links": f"{tmp_path} file://{tmp_path} /nowhere file:///nowhere https://links.example/",
        "progress-bar": "off",
    }
    assert install.uv_settings(pip) == {
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_INDEX": "https://one.example/simple file:///nowhere/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/etc/company.pem",
        "UV_FIND_LINKS": f"{tmp_path},{tmp_path},https://links.example/",
    }


def test_uv_keeps_its_defaults_without_settings_of_pip(install):
    assert install.uv_settings({}) == {}


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        (" + anyio==4.16.0", True),
        ("WARNING: Location 'file:///nowhere/simple/anyio/' is ignored: it is neither a file nor a directory.", True),
        ("Collecting anyio>=4 (from lmx-lab==0.1.0)", True),
        ("  Downloading anyio-4.16.0-py3-none-any.whl.metadata (5.0 kB)", True),
        ("  Downloading anyio-4.16.0-py3-none-any.whl (5.0 kB)", False),
        ("Downloading jupyterlab (16.5MiB)", False),
        (" Downloaded jupyterlab", False),
        ("ERROR: No matching distribution found for anyio", False),
        ("WARNING: Retrying after connection broken", False),
    ],
)
def test_progress_and_errors_are_printed_and_the_rest_is_not(install, line, hidden):
    assert bool(install.NOISE.match(line)) == hidden
