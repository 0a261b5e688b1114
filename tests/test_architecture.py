"""The import table: who may import whom inside the package, and which outside packages belong to whom."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lmx_lab"


@dataclass(frozen=True)
class Row:
    inside: str = ""
    outside: str = ""


EVERYTHING = "*"
# A room is a top-level module or package. A room without a row fails, so a new one needs its row first.
TABLE = {
    # IPython: for the type of its extension hooks.
    "__init__": Row("errors settings lab replies magics", "IPython"),
    "__main__": Row("cli"),
    "errors": Row(),
    "settings": Row("errors"),
    "links": Row(),
    "feed": Row(),
    "plaintext": Row(),
    # guard: which headers answers have that come before the application.
    "pacing": Row(),
    "transport": Row("guard pacing", "uvicorn h11 websockets"),
    "guard": Row("errors"),
    # loops: there it is noted which loop serves which port, for those who would wait for themselves.
    "hosting": Row("errors loops plaintext transport", "uvicorn"),
    # Beside hosting: running a coroutine for a blocking caller knows nothing of servers.
    "loops": Row("errors", "nest_asyncio2"),
    "wire": Row("errors", "pydantic"),
    "weights": Row("errors settings", "huggingface_hub filelock tokenizers mlx"),
    # psutil: on Linux, MLX does not know the memory's size.
    # tokenizers: to lower-case what an encoder reads, a normalizer is put before the tokenizer's own.
    # loops: the engine on llama.cpp waits for processes on a loop of its own.
    "engine": Row("errors settings loops weights", "mlx mlx_lm llguidance numpy psutil tokenizers jinja2 xllamacpp"),
    # Apart from server: the daemon reads bodies and answers errors as it does, and the two never see each other.
    "asgi": Row("errors guard wire", "fastapi starlette pydantic pydantic_core"),
    "server": Row(
        "errors settings feed guard asgi wire weights engine",
        # numpy: what the engine returns as vectors.
        "fastapi starlette pydantic pydantic_core prometheus_client numpy",
    ),
    # settings: where a daemon of this machine has its state file. loops: those that block wait for a background one.
    # numpy: what vectors are read as.
    "client": Row("errors settings loops wire", "httpx2 pydantic pydantic_core numpy"),
    # hosting, loops: it runs on a thread and a port of its own, wherever it is started. httpx2: for the type of what
    # mcp's HTTP transport takes. anyio: mcp's streams end with its errors. psutil: children of MCP servers, and whether
    # a pid is still the daemon's.
    "daemon": Row(
        "errors settings feed guard asgi hosting loops plaintext wire client",
        "fastapi starlette pydantic pydantic_core mcp httpx2 anyio psutil",
    ),
    # loops: panels think on a thread of their own, which a busy cell does not delay. What they show they are given as a
    # ``Source``. client: events of the daemon are shown as they come, by their classes.
    # links: which frontend shows them. IPython: a panel is two outputs, for notebooks without a kernel. minify: of
    # developers, for what widgets carry.
    "panels": Row("errors links loops frames wire client", "anywidget ipywidgets IPython traitlets pandas minify"),
    # settings: where kept runs live. psutil: cores and memory, which the provenance of a run has.
    "bench": Row("errors settings frames progress wire client engine", "httpx2 pandas numpy matplotlib psutil"),
    # pandas, when somebody asks for a table: it takes half a second to import, and not everybody has it.
    "frames": Row("", "pandas"),
    "progress": Row("", "rich IPython"),
    "replies": Row("engine wire"),
    "rankings": Row("engine frames", "pandas"),
    # jupyter_core: where Jupyter servers write down their address.
    # ipywidgets, pandas: for the types of what panel() and bench() return.
    "lab": Row(EVERYTHING, "ipywidgets pandas psutil pydantic rich jupyter_core"),
    "magics": Row("errors lab", "IPython"),
    # pandas, matplotlib: for the types of the tables that bench prints and of what it draws.
    "cli": Row(EVERYTHING, "typer rich pandas matplotlib"),
    "doctor": Row(EVERYTHING, "mlx psutil jupyter_core"),
}
# Packages with one importing file: what is behind them can be exchanged there.
ONLY_IN = {
    "uvicorn": {"hosting", "transport"},
    "h11": {"transport"},
    "nest_asyncio2": {"loops"},
    "huggingface_hub": {"weights.hub"},
    "filelock": {"weights.store", "weights.hub"},
    "prometheus_client": {"server.metrics"},
    "sqlite3": {"daemon.storage.store"},
    "mcp": {"daemon.mcp.connection"},
    "xllamacpp": {"engine.gguf.worker"},
    # In a process of its own, within limits: templates are programs of strangers.
    "jinja2": {"engine.template_rendering"},
}
MLX_IN_WEIGHTS = {"weights.gguf_import"}
# Packages whose modules only they themselves import; other code imports names from the package.
PRIVATE = ("engine.cpu_blas",)
# Rooms whose imports inside functions still close cycles.
LAZY_CYCLES = {"lab"}
# Reading a value's own class is no dependency worth a row.
FREE = {"typing_extensions"}


@dataclass(frozen=True)
class Import:
    module: str
    target: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"lmx_lab/{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def imports() -> Iterator[Import]:
    for module, path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(module, alias.name, node.lineno, id(node) not in top)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}:{node.lineno} imports relatively"
                yield from _from(module, node, lazy=id(node) not in top)


def _from(module: str, node: ast.ImportFrom, *, lazy: bool) -> Iterator[Import]:
    assert node.module is not None
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        is_module = node.module.split(".")[0] == "lmx_lab" and _exists(full)
        yield Import(module, full if is_module else node.module, node.lineno, lazy)


def _exists(dotted: str) -> bool:
    path = ROOT.parent / dotted.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def room(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


IMPORTS = list(imports())


def test_every_room_has_a_row() -> None:
    rooms = {room(module) for module, _ in modules()}
    assert rooms <= set(TABLE), f"without a row: {rooms - set(TABLE)}"


@pytest.mark.parametrize("name", sorted({room(module) for module, _ in modules()}))
def test_a_room_imports_only_what_its_row_allows(name: str) -> None:
    row = TABLE[name]
    wrong = []
    for item in IMPORTS:
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


def test_what_should_have_one_importer_has_one() -> None:
    wrong = [str(i) for i in IMPORTS if i.module not in ONLY_IN.get(i.target.split(".")[0], {i.module})]
    wrong += [
        str(item)
        for item in IMPORTS
        if item.target.split(".")[0] == "mlx" and room(item.module) == "weights" and item.module not in MLX_IN_WEIGHTS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PRIVATE)
def test_modules_of_a_private_package_are_imported_only_within_it(package: str) -> None:
    inner = f"lmx_lab.{package}."
    wrong = [str(i) for i in IMPORTS if i.target.startswith(inner) and not f"{i.module}.".startswith(f"{package}.")]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_between_modules() -> None:
    graph: dict[str, set[str]] = {module: set() for module, _ in modules()}
    for item in IMPORTS:
        target = item.target.removeprefix("lmx_lab.")
        if item.lazy and room(item.module) in LAZY_CYCLES:
            continue
        # The package itself hands out names lazily: that is no edge.
        if item.target.startswith("lmx_lab.") and item.module != "__init__" and target in graph:
            graph[item.module].add(target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_modules_and_functions_stay_readable() -> None:
    """At most 600 lines a module, 60 a function; over 400 the module's docstring has to say why."""
    wrong = []
    for module, path in modules():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = text.count("\n")
        if lines > 600 or (lines > 400 and "lines" not in (ast.get_docstring(tree) or "")):
            wrong.append(f"{module}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > 60:
                    wrong.append(f"{module}.{node.name}: {size} lines")
    assert not wrong, "\n".join(wrong)
