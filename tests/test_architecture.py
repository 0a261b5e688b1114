"""The import table: who may import whom inside the package, and which outside packages belong to whom."""

import ast
import functools
import re
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests.mutate import MODULES
from tests.support.docs import DOCS, code_blocks

# `make check` runs these tests.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent / "lmx_lab"


@dataclass(frozen=True)
class Row:
    inside: str = ""
    outside: str = ""


EVERYTHING = "*"
# A room is a top-level module or package. A room without a row fails, so a new one needs its row first.
TABLE = {
    # instrument: steering vectors. IPython: for the type of its extension hooks.
    "__init__": Row("errors settings instrument notebook", "IPython"),
    "__main__": Row("cli"),
    "errors": Row(),
    # numpy: the type of vectors.
    # results: plans are displayed as tables.
    # pydantic and pydantic_core: values that are bodies of requests, and the form of steps in JSON.
    "values": Row("errors results", "numpy pydantic pydantic_core"),
    "settings": Row("errors"),
    "urls": Row("errors extras"),
    "running": Row("urls"),
    "broadcast": Row(),
    "sanitize": Row(),
    "extras": Row("errors"),
    # numpy: statistics. psutil: cores and memory of a machine. pandas: the type of a table with a provenance.
    # matplotlib: figures.
    "results": Row("errors extras sanitize", "numpy pandas psutil matplotlib"),
    "progress": Row("", "rich IPython"),
    # Sandboxes load this file without the package.
    "heap": Row(),
    # Running a coroutine for a blocking caller; knows no servers.
    "portal": Row("errors"),
    "blocking": Row("errors portal"),
    # docstring_parser: the descriptions of functions that are tools.
    "wire": Row("errors values", "pydantic pydantic_core docstring_parser"),
    # What server and daemon share: the two never import each other.
    "http": Row("errors heap sanitize wire", "anyio fastapi starlette pydantic pydantic_core uvicorn h11 websockets"),
    "weights": Row("errors values settings", "huggingface_hub filelock tokenizers mlx"),
    # psutil: on Linux, MLX does not know the memory's size. tokenizers: encoders lower-case through a normalizer.
    # blocking, portal: llama.cpp's processes and those of sandboxes are awaited on loops of their own.
    # pydantic_core: writes and reads JSON faster than the standard library, which holds the interpreter's lock longer.
    "engine": Row(
        "errors extras values settings blocking portal heap weights",
        "mlx mlx_lm llguidance numpy psutil tokenizers jinja2 xllamacpp pydantic_core",
    ),
    "server": Row(
        "errors extras values settings broadcast http sanitize wire weights engine",
        # numpy: the vectors of the engine.
        "fastapi starlette pydantic pydantic_core prometheus_client numpy opentelemetry",
    ),
    # settings: the state file of a daemon on this machine. numpy: vectors of embeddings.
    "client": Row(
        "errors values settings urls running broadcast blocking portal results sanitize wire",
        "httpx2 h11 pydantic pydantic_core numpy",
    ),
    # httpx2: the type of an argument of mcp's HTTP transport. anyio: errors of mcp's streams. psutil: child processes.
    "daemon": Row(
        "errors settings values broadcast http portal results sanitize wire client",
        "fastapi starlette pydantic pydantic_core mcp httpx2 anyio psutil",
    ),
    # The protocol of a lab's server; neither the notebook nor the panels define it, because both use it.
    "backend": Row("blocking values wire"),
    # instrument: steering vectors. pydantic: errors of requests, and classes as response_format.
    "arguments": Row("errors wire instrument", "pydantic"),
    # weights: the hashes of a model's files in the provenance of records.
    # numpy: activations and vectors. pydantic: errors of the fields of a trace.
    "instrument": Row(
        "errors extras values progress blocking results sanitize weights wire backend arguments",
        "numpy pandas pydantic",
    ),
    # pydantic: schemas of typed columns.
    "batch": Row("errors extras values progress blocking results wire backend arguments", "numpy pandas pydantic"),
    # pydantic: errors of a prompt. matplotlib: the type of axes.
    "evals": Row(
        "errors extras blocking results sanitize wire values backend instrument batch", "pandas pydantic matplotlib"
    ),
    # client: the classes of the daemon's events. urls: which frontend shows the panels.
    # instrument: the lens panel shows its values and takes branches, and the timeline panel explains requests.
    # IPython: a panel has a static output for notebooks without a kernel. minify: only to build the widgets' code.
    "panels": Row(
        "errors values urls portal sanitize results backend wire client instrument",
        "anywidget ipywidgets IPython traitlets pandas minify",
    ),
    # settings: the folder of kept runs. portal: runs are measured on a loop of their own.
    "bench": Row(
        "errors extras values settings blocking portal progress results sanitize wire backend client engine",
        "httpx2 pandas numpy matplotlib",
    ),
    # jupyter_core: Jupyter servers record their address. ipywidgets, pandas: types of results.
    "notebook": Row(EVERYTHING, "IPython ipywidgets pandas psutil pydantic rich jupyter_core"),
    # pandas, matplotlib: types of what bench prints and draws.
    # numpy: imported before two threads need it.
    "cli": Row(EVERYTHING, "typer rich pandas matplotlib numpy"),
    "deploy": Row("errors extras values settings http server engine wire", "ray"),
    "doctor": Row(EVERYTHING, "mlx psutil jupyter_core"),
}
# Packages with one importing file: what is behind them can be exchanged there.
ONLY_IN = {
    "uvicorn": {"http.uvicorn_server", "http.connections"},
    "h11": {"http.connections", "client.plain_http"},
    "huggingface_hub": {"weights.hub_download"},
    "filelock": {"weights.store", "weights.hub_download"},
    "prometheus_client": {"server.metrics"},
    "opentelemetry": {"server.telemetry"},
    "sqlite3": {"daemon.storage.store", "results.database", "instrument.store", "batch.cache", "evals.experiments"},
    "mcp": {"daemon.mcp.connection"},
    "xllamacpp": {"engine.llama_cpp.worker"},
    # In a process of its own, within limits: templates are programs of strangers.
    "jinja2": {"engine.tokenizing.template_worker"},
}
MLX_IN_WEIGHTS = {"weights.gguf.convert_worker"}
# Packages whose modules only they themselves import; other code imports names from the package.
PRIVATE = ("engine.cpu_blas",)
# Rooms whose imports inside functions still close cycles.
LAZY_CYCLES: set[str] = set()
SMALL_LINES = 200
COMMAND = "a command, which is found by its name"
LATER = "is imported when its command runs; completion and --help do not import what it needs"
SUBJECTS = {
    "engine.llama_cpp.worker": "a script that imports no other module of the package",
    "bench.http_stream": "a protocol: HTTP/1.1 responses with the time of each piece",
    **dict.fromkeys(("cli.chat", "cli.daemon", "cli.doctor", "cli.events"), COMMAND),
    **dict.fromkeys(("cli.bench_tables", "cli.event_printer", "cli.server"), LATER),
    "daemon.turns.message": "pure code: a message from the pieces of a stream",
    "daemon.storage.schema": "a file format: the tables of the database and their migrations",
    "engine.grammar.gbnf": "a file format: grammars of llama.cpp",
    "engine.swap": "an algorithm: the order of requests for models that do not fit together",
    "engine.text.written_calls": "pure code: the texts of earlier calls",
    "evals.numbers": "pure code: the notations of numbers",
    "notebook.results": "the results of methods",
    "panels.timeline": "a panel",
    "server.lm_studio": "a format: LM Studio's lists of models",
    "server.pages": "the pages for browsers",
    "server.responses.socket": "the WebSocket of the Responses format",
    "server.metrics": "a file format: metrics of Prometheus",
    "server.tokens": "a format: the routes of llama.cpp for tokens",
}
"""Modules below ``SMALL_LINES`` that only one module of their package imports, and what makes them a subject."""
# Reading a value's own class is no dependency worth a row.
FREE = {"typing_extensions"}
FOREIGN = {"constants", "huggingface_hub.constants", "paths", "report", "program", "gguf", "item"}
"""What tests set that is not of the package: settings of the hub's library, parts of the benchmarks, of the helpers of
tests and of pytest."""
SET_BY_TESTS = {
    # Devices, files and failures that this machine cannot produce.
    *("engine/cpu_blas/test_openblas.py: _protection", "engine/cpu_blas/test_openblas.py: _median_product_s"),
    *("engine/test_find.py: CUDA_DEVICES", "instrument/test_probes.py: _file", "engine/conftest.py: _advance"),
    *("engine/llama_cpp/test_process.py: _load", "engine/llama_cpp/test_process.py: _max_bytes"),
    *("engine/llama_cpp/test_quantize.py: _run_worker", "faults/test_hanging_load.py: SCRIPT"),
    *("security/test_chat_templates.py: EXTRA_BYTES", "support/commands.py: _end_late", "cli/test_labs.py: SERVICE"),
}
"""The exceptions of ``test_no_test_sets_a_constant_or_a_private_attribute``."""


@dataclass(frozen=True)
class Import:
    module: str
    target: str
    line: int
    lazy: bool

    def __str__(self):
        return f"lmx_lab/{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


@functools.cache
def modules():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


@functools.cache
def syntax_tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node):
    """Return all statements below a node. ``ast.walk`` also visits expressions and takes ten times as long."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


@functools.cache
def imports():
    """Return all imports. Call it only within tests, because every worker collects this file but only one runs it."""
    found = []
    for module, path in modules().items():
        tree = syntax_tree(path)
        top = {id(node) for node in tree.body}
        for node in statements(tree):
            lazy = id(node) not in top
            if isinstance(node, ast.Import):
                found += [Import(module, alias.name, node.lineno, lazy) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}:{node.lineno} imports relatively"
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    is_module = node.module.split(".")[0] == "lmx_lab" and _exists(full)
                    found.append(Import(module, full if is_module else node.module, node.lineno, lazy))
    return tuple(found)


@functools.cache
def _exists(dotted):
    path = ROOT.parent / dotted.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def room(module):
    return module.split(".", maxsplit=1)[0]


def test_only_one_module_makes_data_frames():
    """Other ways lose the type of an empty column, or round integers among which values are missing."""
    makers = {
        module
        for module, path in modules().items()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "DataFrame"
    }
    assert makers == {"results.frames"}


def test_every_room_has_a_row():
    rooms = {room(module) for module in modules()}
    assert rooms <= set(TABLE), f"without a row: {rooms - set(TABLE)}"


@pytest.mark.parametrize("name", sorted({room(module) for module in modules()}))
def test_a_room_imports_only_what_its_row_allows(name):
    row = TABLE[name]
    wrong = []
    for item in imports():
        if room(item.module) != name:
            continue
        head, _, rest = item.target.partition(".")
        if head == "lmx_lab":
            target = room(rest) if rest else "__init__"
            if row.inside != EVERYTHING and target not in {name, *row.inside.split()}:
                wrong.append(str(item))
        elif head not in sys.stdlib_module_names and head not in FREE and head not in row.outside.split():
            wrong.append(str(item))
    assert not wrong, "\n".join(wrong)


def test_what_should_have_one_importer_has_one():
    wrong = [str(i) for i in imports() if i.module not in ONLY_IN.get(i.target.split(".")[0], {i.module})]
    wrong += [
        str(item)
        for item in imports()
        if item.target.split(".")[0] == "mlx" and room(item.module) == "weights" and item.module not in MLX_IN_WEIGHTS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PRIVATE)
def test_modules_of_a_private_package_are_imported_only_within_it(package):
    inner = f"lmx_lab.{package}."
    wrong = [str(i) for i in imports() if i.target.startswith(inner) and not f"{i.module}.".startswith(f"{package}.")]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_between_modules():
    graph = {module: set() for module in modules()}
    for item in imports():
        target = item.target.removeprefix("lmx_lab.")
        if item.lazy and room(item.module) in LAZY_CYCLES:
            continue
        # The package itself hands out names lazily: that is no edge.
        if item.target.startswith("lmx_lab.") and item.module != "__init__" and target in graph:
            graph[item.module].add(target)
    done = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_a_small_module_with_one_importer_is_a_subject():
    """A module that only one module of the same package imports is a part of that module, unless it is a subject for
    which a reader would look. Modules of ``SMALL_LINES`` and more are not checked.
    """
    packages = {module for module, path in modules().items() if path.name == "__init__.py"}
    importers: dict[str, set[str]] = {module: set() for module in modules()}
    for item in imports():
        if (target := item.target.removeprefix("lmx_lab.")) in importers and item.target != target:
            importers[target].add(item.module)

    def package(module):
        return module if module in packages else module.rpartition(".")[0]

    found = set()
    for module, users in importers.items():
        is_small = module not in packages and modules()[module].read_text(encoding="utf-8").count("\n") < SMALL_LINES
        if is_small and len(users) == 1 and package(module) and package(module) == package(*users):
            found.add(module)
    found = {module for module in found if not _is_architecture(module)}
    unexplained = sorted(found - set(SUBJECTS))
    assert not unexplained, f"join them with their only importer, or add a reason to SUBJECTS: {unexplained}"
    outdated = sorted(set(SUBJECTS) - found)
    assert not outdated, f"they need no reason: remove them from SUBJECTS: {outdated}"


def _is_architecture(module):
    """Whether a module defines an architecture of encoders, for which a reader would look."""
    classes = [node for node in syntax_tree(modules()[module]).body if isinstance(node, ast.ClassDef)]
    return module.startswith("engine.encoders.") and any("Encoder" in map(ast.unparse, it.bases) for it in classes)


def test_no_test_imports_a_test():
    """What several folders share is in ``tests/support``. A helper that one folder uses may be in this folder."""
    wrong = []
    for top in ("tests", "soak", "benchmarks"):
        for path in sorted((ROOT.parent / top).rglob("*.py")):
            place = path.relative_to(ROOT.parent)
            # In the text, because some tests contain programs.
            for module in re.findall(r"\b(?:from|import) (tests\b[\w.]*)", path.read_text(encoding="utf-8")):
                folder, _, name = module.rpartition(".")
                is_helper = folder == ".".join(place.parent.parts) and name != "conftest" and name[:5] != "test_"
                is_itself = module == ".".join(place.with_suffix("").parts)
                if not (f"{module}.".startswith("tests.support.") or is_helper or is_itself):
                    wrong.append(f"{place} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_test_sets_a_constant_or_a_private_attribute():
    """A rename in the package must not break a test, or make it test nothing.

    Time limits are arguments, and what a test has to know is public.
    """
    found = {}
    for path in sorted((ROOT.parent / "tests").rglob("*.py")):
        place = path.relative_to(ROOT.parent / "tests").as_posix()
        for node in ast.walk(syntax_tree(path)):
            for name, value in _settings_of(node):
                is_constant = name.isupper()
                is_private = name.startswith("_") and not name.startswith("__")
                if (is_constant or is_private) and value not in FOREIGN and not place.startswith("soak/"):
                    found.setdefault(f"{place}: {name}", f"{place}:{node.lineno} sets {name}")
    wrong = [text for key, text in found.items() if key not in SET_BY_TESTS]
    assert not wrong, "\n".join(wrong)
    outdated = sorted(SET_BY_TESTS - found.keys())
    assert not outdated, f"no test sets them any more: remove them from SET_BY_TESTS: {outdated}"


def _settings_of(node):
    """Yield the name and the owner of each attribute that a statement or a call of ``setattr`` sets."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
        names = [each.value for each in node.args[:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if names:
            owner, _, name = names[0].rpartition(".")
            yield name, owner or ast.unparse(node.args[0])
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls"):
                yield target.attr, ast.unparse(target.value)


def test_the_modules_that_are_mutated_exist_with_their_tests():
    paths = [f"lmx_lab/{module}.py" for module in MODULES] + [
        path for tests, _ in MODULES.values() for path in tests.partition(" -k ")[0].split()
    ]
    assert [path for path in paths if not (ROOT.parent / path).exists()] == []


@functools.cache
def arrows():
    """Return the arrows of the diagram in ``docs/contributing.md``, as pairs of packages."""
    (diagram,) = [block.text for block in code_blocks(DOCS / "contributing.md") if block.language == "mermaid"]
    lines = [line.split(" --> ") for line in diagram.splitlines()[1:]]
    return {pair for sources, targets in lines for pair in product(sources.strip().split(" & "), targets.split(" & "))}


@functools.cache
def reachable(start):
    found = set()
    new = {start}
    while new:
        found |= new
        new = {target for source, target in arrows() if source in new} - found
    return found


def test_arrows_are_allowed_imports():
    for source, target in arrows():
        assert TABLE[source].inside == EVERYTHING or target in TABLE[source].inside.split(), (source, target)


def test_every_import_between_packages_follows_the_arrows():
    packages = {name for pair in arrows() for name in pair}
    for item in imports():
        source, target = room(item.module), room(item.target.removeprefix("lmx_lab."))
        if item.target.startswith("lmx_lab.") and {source, target} <= packages:
            assert target in reachable(source), str(item)
