"""Test that each optional package is in an extra, and that its absence is one line with the command to install it."""

import ast
import functools
import importlib
import sys
from pathlib import Path

import pytest

from lmx_lab.errors import LabError, MissingPackageError
from lmx_lab.extras import OPTIONAL, import_optional, install_command
from tests.support.commands import run_command
from tests.support.extras import EXTRAS, modules_outside, names, packages_of_modules
from tests.support.programs import script_result

ROOT = Path(__file__).parent.parent
WITHOUT_ERROR = {"IPython", "jupyter_core", "minify", "segno"}
"""Modules without which the package works: those of a kernel, of the build of the panels, and of a QR code."""
WITH_OTHERS = {"traitlets"}
"""Modules that other optional packages require."""
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

import lmx_lab
from lmx_lab.settings import Settings

module, use, home = sys.argv[1:]
settings = Settings(home=Path(home), port=0)
# As if it were not installed.
sys.modules[module] = None
try:
    exec(use)
except lmx_lab.LabError as exc:
    print(f"{exc.code}: {exc.message}")
"""
USES = {
    "anywidget": "lmx_lab.Lab(settings).panel()",
    "ipywidgets": "lmx_lab.Lab(settings).metrics()",
    "pandas": "lmx_lab.Lab(settings).requests.df",
    "matplotlib": "from lmx_lab.bench import by_concurrency",
    "sklearn": "from lmx_lab.instrument.probes import ProbeRun; ProbeRun(['a', 'b', 'c', 'd'], [0, 0, 1, 1], folds=2)",
    "xllamacpp": "from lmx_lab.engine.llama_cpp.process import require_installed; require_installed(Path('a.gguf'))",
    "zeroconf": "lmx_lab.discover(0.1)",
    "opentelemetry.exporter": "lmx_lab.Lab(replace(settings, otel='spans'))",
    "opentelemetry.sdk": "lmx_lab.Lab(replace(settings, otel='content'))",
    "ray": "from lmx_lab.deploy.ray_serve import application; application('echo')",
    "mlflow": "from tests.support.samples import EVALUATION; EVALUATION.to_mlflow()",
    "wandb": "from tests.support.samples import EVALUATION; EVALUATION.to_wandb()",
    "inspect_ai": "from tests.support.samples import EVALUATION; EVALUATION.to_inspect('a.eval')",
}
"""A use of each optional module that the package imports."""


def imported(code):
    """Yield the modules that some code imports, also with ``import_optional``: those in ``OPTIONAL``, and the top-level
    modules of all others.
    """
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import():
                yield from (known_name(alias.name) for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield known_name(module)
            case ast.Call(func=ast.Name(id="import_optional"), args=[ast.Constant(value=str(module)), *_]):
                yield known_name(module)
            case ast.Call(
                func=ast.Name(id="import_optional"),
                args=[ast.JoinedStr(values=[ast.Constant(value=beginning), *_]), *_],
            ):
                yield known_name(str(beginning))


def known_name(module):
    return next((name for name in OPTIONAL if f"{module}.".startswith(f"{name}.")), module.partition(".")[0])


@functools.cache
def optional_modules():
    """Return the modules that the package imports although it does not require them."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "lmx_lab").rglob("*.py"))
    found = {module for source in sources for module in imported(source)} - sys.stdlib_module_names - {"lmx_lab"}
    required = set(packages_of_modules()) - modules_outside()
    return frozenset(found - required)


# All files of the package are parsed.
@pytest.mark.slow
def test_the_package_imports_no_other_optional_modules():
    assert optional_modules() - WITHOUT_ERROR - WITH_OTHERS == set(USES)
    assert set(USES) <= set(OPTIONAL)


@pytest.mark.parametrize("module", OPTIONAL)
def test_the_extra_of_a_module_installs_its_package(module):
    package, extra = OPTIONAL[module]
    if extra is None:
        assert package not in {name for requirements in EXTRAS.values() for name in names(requirements)}
        assert install_command(module) == f"pip install {package}"
    else:
        assert package in names(EXTRAS[extra])
        assert install_command(module) == f"pip install 'lmx-lab[{extra}]'"
    assert package in packages_of_modules().get(module, [package])


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_each_package_of_an_extra_that_is_imported_can_be_named(extra):
    modules = {
        module for module, packages in packages_of_modules().items() if names(EXTRAS[extra]).intersection(packages)
    }
    assert modules & optional_modules() <= set(OPTIONAL) | WITH_OTHERS


# Each starts a program.
@pytest.mark.long
@pytest.mark.parametrize("module", USES)
def test_without_a_package_its_use_is_one_line_with_the_command_that_installs_it(module, tmp_path):
    done = script_result(PROGRAM, module, USES[module], str(tmp_path))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    package = "llama.cpp" if module == "xllamacpp" else OPTIONAL[module][0]
    assert f"{package}, which is not installed: {install_command(module)}" in line
    if module != "xllamacpp":
        assert line.startswith("package-missing: ")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("pandas", ["bench", "--url", "127.0.0.1:1"]),
        ("matplotlib", ["bench", "--url", "127.0.0.1:1", "--plot", "bench.png"]),
        ("zeroconf", ["discover"]),
        ("opentelemetry.sdk", ["serve", "--model", "echo", "--port", "0", "--otel", "spans"]),
        ("zeroconf", ["serve", "--port", "0", "--host", "0.0.0.0", "--announce"]),
    ],
)
def test_a_command_without_a_package_prints_one_line(module, arguments, tmp_path, monkeypatch):
    for importer in ("lmx_lab.server.telemetry", "lmx_lab.bench.plots", "lmx_lab.results.drawing"):
        monkeypatch.delitem(sys.modules, importer, raising=False)
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    done = run_command(tmp_path, *arguments)
    (line,) = done.stderr.splitlines()
    assert line.startswith("package-missing: ")
    assert line.endswith(f"which is not installed: {install_command(module)}")
    assert done.status == 1


def test_an_installed_package_that_is_damaged_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    for content, message in (
        ("import no_such_dependency", "no_such_dependency"),
        ("raise ImportError('libx.so: cannot open shared object file')", "libx.so"),
    ):
        (tmp_path / "wandb" / "__init__.py").write_text(content)
        importlib.invalidate_caches()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        with pytest.raises(ImportError, match=message) as caught:
            import_optional("wandb", "to_wandb")
        assert not isinstance(caught.value, LabError)


def test_the_error_is_an_import_error_for_callers_that_catch_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "segno", None)
    with pytest.raises(ImportError) as caught:
        import_optional("segno", "a QR code")
    assert isinstance(caught.value, MissingPackageError)
    assert str(caught.value) == "a QR code needs segno, which is not installed: pip install 'lmx-lab[lan]'"
