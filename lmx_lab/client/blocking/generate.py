"""Generates the blocking clients from the async ones; run it as ``make blocking``.

A coroutine becomes a method that waits in the portal, an async generator a ``BlockingStream``. Callbacks are called in
the thread that waits. Signatures and docstrings are copied. ruff formats the result, so it is needed to generate, and a
test fails while a generated file is not up to date.
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
    """One class to generate, in a module of its own."""

    module: str
    name: str
    base: str = ""
    sources: tuple[tuple[str, str], ...]
    """Modules and classes whose methods it has."""
    attribute: str
    """Holds the async object."""
    title: str
    doc: str
    head: str = ""
    """Source of the members that have no counterpart."""
    before: str = ""
    """A statement before each call that waits."""


RAISES = """
Raises:
    InvalidRequestError: the address or the key is not valid.
    HostingError: from every method, if the server runs on the caller's own event loop, which would wait for itself.
"""
CLASSES = (
    BlockingClass(
        module="lab",
        name="LabClient",
        base="BlockingClient[AsyncLabClient]",
        sources=(("lab", "AsyncLabClient"),),
        attribute="_client",
        title="The client of the inference server for callers that block: scripts, threads, notebook cells.",
        doc="""``AsyncLabClient`` without ``await``, for any thread: ``with LabClient("http://host:8400") as client``.

Every method waits, and an interrupt (Ctrl-C) cancels the request. Streams are for ``for`` loops.
"""
        + RAISES,
    ),
    BlockingClass(
        module="daemon",
        name="DaemonClient",
        base="BlockingClient[AsyncDaemonClient]",
        sources=(("daemon", "AsyncDaemonClient"), ("daemon_routes", "DaemonRoutes")),
        attribute="_client",
        title="The client of the daemon for callers that block: scripts, threads, notebook cells.",
        doc="""``AsyncDaemonClient`` without ``await``, for any thread: ``with DaemonClient.discover() as client``.

Every method waits, and an interrupt (Ctrl-C) cancels the request. Methods that wait for a turn also raise
``HostingError`` if the model's server runs on the event loop of the caller.
"""
        + RAISES,
    ),
    BlockingClass(
        module="session",
        name="Session",
        sources=(("session", "AsyncSession"),),
        attribute="_session",
        title="One session of the daemon for callers that block.",
        doc="""``AsyncSession`` without ``await``; ``DaemonClient.session()`` creates it.

An interrupt (Ctrl-C) cancels the turn that is waited for. Callbacks are called in the thread that waits.
""",
        head="""
def __init__(self, client: AsyncDaemonClient, portal: Portal, session: AsyncSession) -> None:
    self._client = client
    self._portal = portal
    self._session = session

@property
def session_id(self) -> str:
    return self._session.session_id

def __repr__(self) -> str:
    return f"<Session {self.session_id} of {self._client.url}>"
""",
    ),
    BlockingClass(
        module="subscription",
        name="BlockingSubscription",
        base="BlockingStream[DaemonEvent]",
        sources=(("event_subscription", "Subscription"),),
        attribute="_subscription",
        title="Events of the daemon for callers that block.",
        doc="``Subscription`` for a ``for`` loop: ``with client.events() as events: for event in events: …``",
        head="""
def __init__(self, client: AsyncDaemonClient, portal: Portal, subscription: Subscription) -> None:
    super().__init__(portal, lambda _: subscription)
    self._client = client
    self._subscription = subscription

def __repr__(self) -> str:
    return f"<BlockingSubscription to {self._client.url}: {self.state.state}>"

def __enter__(self) -> Self:
    self._begun()
    return self

def _check(self) -> None:
    check_upstream(self._client, self._portal)
""",
        before="self._begun()",
    ),
)
OMITTED = {"aclose", "connection", "credentials", "url"}
"""Members of async classes that blocking ones have under another name, inherit, or do not need."""
WRAPPERS = {"AsyncSession": "Session", "Subscription": "BlockingSubscription"}
"""Async objects that methods return, and the blocking classes around them."""
ANNOTATIONS = WRAPPERS | {"OnPermission": "BlockingOnPermission"}
CALLBACKS = {"progress": "notifier", "on_event": "notifier", "on_permission": "decider"}
"""Parameters that are called back, and the method of ``CallbackQueue`` that brings them to the caller's thread."""
OWN = {
    **dict.fromkeys(("BlockingClient", "Portal", "check_upstream"), f"{PACKAGE}.blocking.portal"),
    **dict.fromkeys(("BlockingStream", "BlockingOnPermission", "run_with_callbacks"), f"{PACKAGE}.blocking.stream"),
    "Session": f"{PACKAGE}.blocking.session",
    "BlockingSubscription": f"{PACKAGE}.blocking.subscription",
    "AsyncDaemonClient": f"{PACKAGE}.daemon",
    "DaemonEvent": "lmx_lab.wire.events",
    "Self": "typing",
    "aclosing": "contextlib",
}
"""Where the names are from that the generated code has besides those of its sources."""
WORDS = (
    ("async with", "with"),
    ("async for", "for"),
    ("on this loop", "in this thread"),
    ("Cancelling this", "An interrupt (Ctrl-C)"),
)
"""Replacements in docstrings."""


def generate(wanted: BlockingClass) -> str:
    """The source of the module with this class."""
    sources = [(module, _class(module, name)) for module, name in wanted.sources]
    members = [textwrap.dedent(wanted.head).strip()] if wanted.head else []
    for _, source in sources:
        members += [_member(node, wanted) for node in _methods(source) if _has_twin(node, wanted, source.name)]
    doc = _docstring(wanted.doc.strip())
    body = textwrap.indent(f"{doc}\n\n" + "\n\n".join(members), "    ")
    code = f"class {wanted.name}{f'({wanted.base})' if wanted.base else ''}:\n{body}\n"
    modules = ", ".join(f"{module}.py" for module, _ in sources)
    head = f'"""{wanted.title}"""\n\n# Generated from {modules} by "make blocking"; do not edit.\n\n'
    imports = "\n".join(_imports(code, wanted))
    return _formatted(f"{head}from __future__ import annotations\n\n{imports}\n\n\n{code}")


def _class(module: str, name: str) -> ast.ClassDef:
    return next(node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == name)


def _tree(module: str) -> ast.Module:
    return ast.parse((FOLDER.parent / f"{module}.py").read_text(encoding="utf-8"))


def _methods(source: ast.ClassDef) -> Iterator[Function]:
    return (node for node in source.body if isinstance(node, Function))


def _has_twin(node: Function, wanted: BlockingClass, source: str) -> bool:
    if node.name == "__init__":
        return wanted.base == f"BlockingClient[{source}]"
    return not node.name.startswith("_") and node.name not in OMITTED


def _member(node: Function, wanted: BlockingClass) -> str:
    decorators = "".join(f"@{ast.unparse(it)}\n" for it in node.decorator_list)
    returned, waits = ast.unparse(node.returns) if node.returns else "None", isinstance(node, ast.AsyncFunctionDef)
    item = _streamed(returned)
    result = f"BlockingStream[{item}]" if item else ANNOTATIONS.get(returned, returned)
    doc = ast.get_docstring(node)
    body = [_docstring(doc)] if doc else []
    body += _guards(node, wanted, waits=waits)
    body.append(_body(node, wanted, returned, item=item, waits=waits))
    return f"{decorators}def {node.name}({_parameters(node)}) -> {result}:\n" + textwrap.indent("\n".join(body), "    ")


def _streamed(returned: str) -> str | None:
    prefix, suffix = "AsyncGenerator[", ", None]"
    is_stream = returned.startswith(prefix)
    return returned.removeprefix(prefix).removesuffix(suffix) if is_stream else None


def _guards(node: Function, wanted: BlockingClass, *, waits: bool) -> list[str]:
    """Checks that a turn, which needs the model's server, does not wait for its own caller."""
    names = {it.arg for it in (*node.args.args, *node.args.kwonlyargs)}
    check = "check_upstream(self._client, self._portal)"
    if "on_permission" in names:
        return [check]
    if "wait_s" in names:
        return [f"if wait_s:\n    {check}"]
    return [wanted.before] if wanted.before and waits else []


def _body(node: Function, wanted: BlockingClass, returned: str, *, item: str | None, waits: bool) -> str:
    decorators = {ast.unparse(it) for it in node.decorator_list}
    source = wanted.sources[0][1]
    if node.name == "__init__":
        return f"super().__init__({source}({_arguments(node)}))"
    if "classmethod" in decorators:
        made = f"{source}.{node.name}({_arguments(node)})"
        return f"client = cls.__new__(cls)\nclient._begin({made})\nreturn client"
    if "property" in decorators:
        return f"return self.{wanted.attribute}.{node.name}"
    call = f"self.{wanted.attribute}.{node.name}({_arguments(node)})"
    has_callbacks = "callbacks." in call
    if item:
        parameter = "callbacks" if has_callbacks else "_"
        return f"return BlockingStream(self._portal, lambda {parameter}: aclosing({call}))"
    if waits:
        call = (
            f"run_with_callbacks(self._portal, lambda callbacks: {call})"
            if has_callbacks
            else (f"self._portal.run({call})")
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
    for old, new in WORDS:
        text = text.replace(old, new)
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'


def _imports(code: str, wanted: BlockingClass) -> list[str]:
    """Import statements for the names in the code, as its sources have them."""
    found = dict(OWN)
    for module, _ in wanted.sources:
        for node in _tree(module).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {it.asname or it.name: node.module for it in node.names}
            elif isinstance(node, ast.Import):
                found |= {it.name: "" for it in node.names}
            elif isinstance(node, ast.ClassDef):
                found[node.name] = f"{PACKAGE}.{module}"
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = f"{PACKAGE}.{module}"
    used = sorted({node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)} - {wanted.name})
    places = [(name, found[name]) for name in used if name in found]
    return [f"from {place} import {name}" if place else f"import {name}" for name, place in places]


def _formatted(code: str) -> str:
    options = ["--quiet", "--stdin-filename", str(FOLDER / "generated.py"), "-"]
    for command in (["check", "--select=I,W", "--fix-only"], ["format"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], input=code, capture_output=True, text=True, check=True
        )
        code = ran.stdout
    return code


def main() -> None:
    """Write all generated modules."""
    for wanted in CLASSES:
        (FOLDER / f"{wanted.module}.py").write_text(generate(wanted), encoding="utf-8")


if __name__ == "__main__":
    main()
