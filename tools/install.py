"""Install this checkout: ``.venv/bin/python tools/install.py [EXTRAS] [--groups GROUPS] [--compile]``.

``make`` calls it with the Python of the environment to install into. uv installs the packages, because it takes a tenth
of pip's time; pip does so if uv cannot be installed or fails, but not if versions conflict. This script uses only the
standard library.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints" / "all.txt"
PYTHON = sys.executable
UV = Path(PYTHON).with_name("uv")
PIP_INSTALL = (PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-compile")
UV_INSTALL = (str(UV), "pip", "install", "--python", PYTHON)
OPTIONS = ("--only-binary", ":all:", "--constraint", str(CONSTRAINTS))
BUILD_TOOLS = ("hatchling", "editables")
# Options of pip, and the variables with which uv reads the same settings.
SAME_IN_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "no-cache-dir": "UV_NO_CACHE",
}
# A third of the packages' code, which the lab never imports.
NOT_COMPILED = re.compile(r"/tests?/|/transformers/models/(?!auto/)")
# Output without progress or errors: uv's list of installed packages, and the packages that pip considers.
NOISE = re.compile(
    r" [+~-] "
    r"|WARNING: Location .* is ignored"
    r"|\s*(Requirement already|Looking in|Obtaining|Collecting|Using cached|Preparing|Installing build|Getting req|"
    r"Checking if|Building|Created wheel|Stored in|Attempting|Found existing|Uninstalling|Successfully|"
    r"Installing collected|Downloading .*\.metadata)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="?", default="", help="extras of pyproject.toml, such as lab,gguf")
    parser.add_argument("--groups", default="", help="dependency groups of pyproject.toml, such as dev")
    parser.add_argument(
        "--compile", action="store_true", help="compile all packages now instead of at their first import"
    )
    chosen = parser.parse_args(arguments)
    commands = steps(chosen.extras, chosen.groups)
    added = ",".join(filter(None, (chosen.extras, chosen.groups)))
    print("installing lmx-lab" + (f" with {added}" if added else ""), flush=True)
    if not (install_with_uv(commands) or install_with_pip(commands)):
        return 1
    if chosen.compile:
        print("compiling the packages", flush=True)
        # Errors are ignored, because some packages contain templates that are not valid Python.
        compileall.compile_dir(sysconfig.get_path("purelib"), rx=NOT_COMPILED, quiet=2, workers=0)
    return 0


def install_with_uv(commands: Sequence[Sequence[str]]) -> bool:
    pip = pip_settings()
    # uv has no setting for "no-index".
    if "no-index" in pip:
        return False
    print("installing uv", flush=True)
    if not run([*PIP_INSTALL, "--quiet", *OPTIONS, "uv"]):
        print("uv cannot be installed", flush=True)
        return False
    environ = {**uv_settings(pip), **os.environ}
    for each in commands:
        output: list[str] = []
        if run([*UV_INSTALL, *OPTIONS, *each], environ, output):
            continue
        text = "".join(output)
        # pip would try older versions of every package, for hours, and find no solution either.
        if "No solution found" in text and "not found" not in text:
            sys.exit(
                "no versions fit this version of Python and tools/constraints/all.txt; the reason is above. Use "
                "another version of Python, or run make lock after a change of pyproject.toml"
            )
        print("uv failed", flush=True)
        return False
    return True


def install_with_pip(commands: Sequence[Sequence[str]]) -> bool:
    print("installing with pip, which takes longer", flush=True)
    return all(run([*PIP_INSTALL, *OPTIONS, *each]) for each in commands)


def steps(extras: str, groups: str = "") -> tuple[tuple[str, ...], ...]:
    """Return the arguments of two installations: first the build tools, then the checkout. The extra ``cuda`` needs a
    third one: its package and ``mlx-cpu``, which is always installed on Linux, write the same file.

    The packages of dependency groups are arguments, because pip has ``--group`` since version 25.1 only.
    """
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")).get("dependency-groups", {})
    needed = []
    for group in filter(None, groups.split(",")):
        if group not in listed:
            sys.exit(f"pyproject.toml has no dependency group {group!r}, only {', '.join(listed)}")
        needed += listed[group]
    found = (BUILD_TOOLS, ("--no-build-isolation", "--editable", f".[{extras}]" if extras else ".", *needed))
    if "cuda" not in extras.split(","):
        return found
    (version,) = re.findall(r"^mlx==(\S+)$", CONSTRAINTS.read_text(), flags=re.MULTILINE)
    return (*found, ("--force-reinstall", "--no-deps", f"mlx-cuda-13=={version}"))


def pip_settings() -> dict[str, str]:
    """Return pip's options from its configuration files and ``PIP_`` variables, in pip's order of precedence."""
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in sections:
            sections[section][option] = str(ast.literal_eval(value))
    return {option: value for section in sections.values() for option, value in section.items()}


def uv_settings(pip: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make uv use the same indexes and certificates as pip."""
    variables = {SAME_IN_UV[option]: " ".join(value.split()) for option, value in pip.items() if option in SAME_IN_UV}
    if "extra-index-url" in pip:
        # Like pip: all indexes have the same priority.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    # pip ignores a folder that does not exist; uv fails.
    places = [place.removeprefix("file://") for place in pip.get("find-links", "").split()]
    links = [place for place in places if "://" in place or Path(place).is_dir()]
    if links:
        variables["UV_FIND_LINKS"] = ",".join(links)
    return variables


def run(command: Sequence[str], environ: Mapping[str, str] | None = None, output: list[str] | None = None) -> bool:
    """Run a command in the checkout and return whether it succeeded. Its output is printed, except ``NOISE``, and added
    to ``output``.
    """
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if output is not None:
                output.append(line)
            if not NOISE.match(line):
                print(line, end="", flush=True)
    return process.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
