"""Generate the blocking clients from the async ones; run it with ``make blocking``.

A coroutine becomes a method that waits in the portal, and an async generator becomes a ``BlockingStream``. Callbacks
are called in the waiting thread. Signatures and docstrings are copied, so that completion, help and type checking work.
The result is formatted by ruff, which has to be installed. A test fails while a generated file is not up to date. This
file does not import the package, so that it also runs while the generated modules do not match the other modules.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGE = "lmx_lab.client"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class BlockingClass:
    """One class to generate, in a separate module."""

    module: str
    name: str
    base: str
    """The base class, which is written by hand."""
    sources: tuple[tuple[str, str], ...]
    """Modules and classes whose methods are copied."""
    attribute: str
    """The attribute with the async object."""
    title: str
    """The module's docstring."""
    doc: str
    """The class's docstring."""
    before: str = ""
    """A statement before each call that waits."""


RAISES = """
Raises:
    InvalidRequestError: the address or the key is not valid.
"""
CLASSES = (
    BlockingClass(
        module="lab",
        name="LabClient",
        base="BlockingClient[AsyncLabClient]",
        sources=(("lab", "AsyncLabClient"),),
        attribute="_client",
        title="Provide the blocking client of the inference server, for scripts, threads and notebook cells.",
        doc="""A blocking client of an inference server, for any thread: ``with LabClient("http://host:8400")``.

It has the methods of ``AsyncLabClient``. Every method waits, and an interrupt (Ctrl-C) cancels the request.
Streams are iterated with ``for``.
"""
        + RAISES,
    ),
    BlockingClass(
        module="daemon",
        name="DaemonClient",
        base="BlockingClient[AsyncDaemonClient]",
        sources=(("daemon", "AsyncDaemonClient"), ("daemon_routes", "DaemonRoutes")),
        attribute="_client",
        title="Provide the blocking client of the daemon, for scripts, threads and notebook cells.",
        doc="""A blocking client of a daemon, for any thread: ``with DaemonClient.discover() as client``.

It has the methods of ``AsyncDaemonClient``. Every method waits, and an interrupt (Ctrl-C) cancels the request.
"""
        + RAISES,
    ),
    BlockingClass(
        module="session",
        name="Session",
        base="SessionBase",
        sources=(("session", "AsyncSession"),),
        attribute="_session",
        title="Provide the blocking session of the daemon.",
        doc="""One session, with the methods of ``AsyncSession``. ``DaemonClient.session()`` returns it.

An interrupt (Ctrl-C) cancels the turn that is waited for. Callbacks are called in the waiting thread.
""",
    ),
    BlockingClass(
        module="subscription",
        name="BlockingSubscription",
        base="SubscriptionBase",
        sources=(("subscription", "Subscription"),),
        attribute="_subscription",
        title="Provide the blocking subscription to the daemon's events.",
        doc="""Events of the daemon for a ``for`` loop: ``with client.events() as events: for event in events: …``

It has the properties and methods of ``Subscription``.
""",
        before="self._started()",
    ),
)
OMITTED = {"aclose", "connection", "credentials", "url"}
"""Members of async classes that blocking classes inherit, have under another name, or do not need."""
WRAPPERS = {"AsyncSession": "Session", "Subscription": "BlockingSubscription"}
"""The blocking class for each async class that methods return."""
ANNOTATIONS = WRAPPERS | {"OnPermission": "BlockingOnPermission"}
CALLBACKS = {"progress": "notifier", "on_event": "notifier", "on_permission": "decider"}
"""Parameters with callbacks, and the method of ``CallbackQueue`` that has them called in the caller's thread."""
MODULES = {
    **dict.fromkeys(("BlockingClient", "SessionBase", "SubscriptionBase"), f"{PACKAGE}.blocking.base"),
    **dict.fromkeys(("BlockingStream", "BlockingOnPermission", "run_with_callbacks"), f"{PACKAGE}.blocking.stream"),
    "Session": f"{PACKAGE}.blocking.session",
    "BlockingSubscription": f"{PACKAGE}.blocking.subscription",
    "aclosing": "contextlib",
}
"""Modules of the names in the generated code that its sources do not import."""
DOC_REPLACEMENTS = (
    ("async with", "with"),
    ("async for", "for"),
    ("on this loop", "in this thread"),
    ("Cancelling this", "An interrupt (Ctrl-C)"),
)
"""Replacements in docstrings."""


def generate(target: BlockingClass) -> str:
    """Return the source of the module with this class."""
    sources = [(module, _class(module, name)) for module, name in target.sources]
    members = [
        _member(node, target)
        for _, source in sources
        for node in _methods(source)
        if _is_copied(node, target, source.name)
    ]
    doc = _docstring(target.doc.strip())
    body = textwrap.indent(f"{doc}\n\n" + "\n\n".join(members), "    ")
    code = f"class {target.name}({target.base}):\n{body}\n"
    modules = ", ".join(f"{module}.py" for module, _ in sources)
    head = f'"""{target.title}"""\n\n# Generated from {modules} by "make blocking"; do not edit.\n\n'
    imports = "\n".join(_imports(code, target))
    return _formatted(f"{head}from __future__ import annotations\n\n{imports}\n\n\n{code}")


def _class(module: str, name: str) -> ast.ClassDef:
    return next(node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == name)


def _tree(module: str) -> ast.Module:
    return ast.parse((FOLDER.parent / f"{module}.py").read_text(encoding="utf-8"))


def _methods(source: ast.ClassDef) -> Iterator[Function]:
    return (node for node in source.body if isinstance(node, Function))


def _is_copied(node: Function, target: BlockingClass, source: str) -> bool:
    if node.name == "__init__":
        return target.base == f"BlockingClient[{source}]"
    return not node.name.startswith("_") and node.name not in OMITTED


def _member(node: Function, target: BlockingClass) -> str:
    decorators = "".join(f"@{ast.unparse(it)}\n" for it in node.decorator_list)
    returned, waits = ast.unparse(node.returns) if node.returns else "None", isinstance(node, ast.AsyncFunctionDef)
    item = _streamed(returned)
    result = f"BlockingStream[{item}]" if item else ANNOTATIONS.get(returned, returned)
    doc = ast.get_docstring(node)
    body = [_docstring(doc)] if doc else []
    if target.before and waits:
        body.append(target.before)
    body.append(_body(node, target, returned, item=item, waits=waits))
    return f"{decorators}def {node.name}({_parameters(node)}) -> {result}:\n" + textwrap.indent("\n".join(body), "    ")


def _streamed(returned: str) -> str | None:
    prefix, suffix = "AsyncGenerator[", ", None]"
    is_stream = returned.startswith(prefix)
    return returned.removeprefix(prefix).removesuffix(suffix) if is_stream else None


def _body(node: Function, target: BlockingClass, returned: str, *, item: str | None, waits: bool) -> str:
    decorators = {ast.unparse(it) for it in node.decorator_list}
    source = target.sources[0][1]
    if node.name == "__init__":
        return f"super().__init__({source}({_arguments(node)}))"
    if "classmethod" in decorators:
        created = f"{source}.{node.name}({_arguments(node)})"
        return f"client = cls.__new__(cls)\nclient._start({created})\nreturn client"
    if "property" in decorators:
        return f"return self.{target.attribute}.{node.name}"
    call = f"self.{target.attribute}.{node.name}({_arguments(node)})"
    has_callbacks = "callbacks." in call
    if item:
        parameter = "callbacks" if has_callbacks else "_"
        return f"return BlockingStream(self._portal, lambda {parameter}: aclosing({call}))"
    if waits:
        call = (
            f"run_with_callbacks(self._portal, lambda callbacks: {call})"
            if has_callbacks
            else f"self._portal.run({call})"
        )
    if returned in WRAPPERS:
        call = f"{WRAPPERS[returned]}(self._client, self._portal, {call})"
    return call if returned == "None" else f"return {call}"


def _parameters(node: Function) -> str:
    for it in ast.walk(node.args):
        if isinstance(it, ast.Name):
            it.id = ANNOTATIONS.get(it.id, it.id)
    return ast.unparse(node.args)


def _arguments(node: Function) -> str:
    def passed(name: str) -> str:
        return f"callbacks.{CALLBACKS[name]}({name})" if name in CALLBACKS else name

    given = [passed(it.arg) for it in node.args.args[1:]]
    given += [f"{it.arg}={passed(it.arg)}" for it in node.args.kwonlyargs]
    return ", ".join(given + ([f"**{node.args.kwarg.arg}"] if node.args.kwarg else []))


def _docstring(text: str) -> str:
    for old, new in DOC_REPLACEMENTS:
        text = text.replace(old, new)
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'


def _imports(code: str, target: BlockingClass) -> list[str]:
    """Return import statements for the names in the code, from the modules that its sources import them from."""
    modules = dict(MODULES)
    for module, _ in target.sources:
        for node in _tree(module).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                modules |= {it.asname or it.name: node.module for it in node.names}
            elif isinstance(node, ast.Import):
                modules |= {it.name: "" for it in node.names}
            elif isinstance(node, ast.ClassDef):
                modules[node.name] = f"{PACKAGE}.{module}"
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                modules[node.targets[0].id] = f"{PACKAGE}.{module}"
    used = sorted({node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)} - {target.name})
    return [
        f"from {modules[name]} import {name}" if modules[name] else f"import {name}" for name in used if name in modules
    ]


def _formatted(code: str) -> str:
    options = ["--quiet", "--stdin-filename", str(FOLDER / "generated.py"), "-"]
    for command in (["check", "--select=I,W", "--fix-only"], ["format"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], input=code, capture_output=True, text=True, check=True
        )
        code = done.stdout
    return code


def main() -> None:
    """Generate and write all modules."""
    for target in CLASSES:
        (FOLDER / f"{target.module}.py").write_text(generate(target), encoding="utf-8")


if __name__ == "__main__":
    main()
