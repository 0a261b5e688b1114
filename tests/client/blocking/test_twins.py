"""Tests that blocking classes have the methods of the async classes, with the same arguments."""

import inspect
import pickle
from typing import get_type_hints

import pytest

from lmx_lab.blocking import with_keywords
from lmx_lab.client.daemon import AsyncDaemonClient, AsyncSession, BlockingSubscription, DaemonClient, Session
from lmx_lab.client.lab import AsyncLabClient, LabClient
from lmx_lab.client.subscription import Subscription
from lmx_lab.errors import InvalidRequestError

ALONE = {"aclose", "close", "connection", "credentials", "session_id", "url"}
"""Members that only async or only blocking classes have, and attributes of instances."""


def members(of):
    found = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
    return {name: member for name, member in found.items() if name not in ALONE}


def arguments(function):
    return [(it.name, it.kind, it.default) for it in with_keywords(function).parameters.values()]


@pytest.mark.parametrize(
    ("async_class", "blocking"),
    [
        (AsyncLabClient, LabClient),
        (AsyncDaemonClient, DaemonClient),
        (AsyncSession, Session),
        (Subscription, BlockingSubscription),
    ],
)
def test_blocking_classes_have_the_methods_and_arguments_of_async_classes(async_class, blocking):
    theirs, ours = members(async_class), members(blocking)
    assert set(theirs) == set(ours)
    for name, member in theirs.items():
        assert callable(member) == callable(ours[name]), name
        if callable(member):
            assert arguments(member) == arguments(ours[name]), name


@pytest.mark.parametrize("of", [LabClient, DaemonClient, Session, BlockingSubscription])
def test_the_defaults_of_arguments_are_readable(of):
    for name, member in members(of).items():
        if callable(member):
            shown = str(inspect.signature(member))
            assert "Ellipsis" not in shown, name
            assert " object at " not in shown, name
    assert "engine: 'EngineChoice' = 'auto'" in str(inspect.signature(LabClient.load))
    assert "title: 'str | None' = <not given>" in str(inspect.signature(Session.change))


@pytest.mark.parametrize("blocking", [LabClient, DaemonClient, Session, BlockingSubscription])
def test_a_blocking_method_is_an_ordinary_method_of_its_class(blocking):
    """Frameworks, such as FastAPI, unwrap functions, inspect them and evaluate their type hints."""
    for name, member in members(blocking).items():
        if not inspect.isfunction(member) or name not in vars(blocking):
            continue
        assert not inspect.iscoroutinefunction(inspect.unwrap(member)), name
        assert not inspect.isasyncgenfunction(inspect.unwrap(member)), name
        assert (member.__qualname__, member.__module__) == (f"{blocking.__name__}.{name}", blocking.__module__)
        assert pickle.loads(pickle.dumps(member)) is member
        assert "Async" not in str(get_type_hints(member)["return"]), name
        assert len((member.__doc__ or "").split()) > 2, name


def test_a_request_that_is_neither_an_object_nor_a_dictionary_is_refused_with_its_class():
    lab, daemon = LabClient("127.0.0.1:9"), DaemonClient("127.0.0.1:9", token=None)
    for call, shape in (
        (lambda: lab.chat("hello"), "ChatRequest"),
        (lambda: list(lab.stream(["hello"])), "ChatRequest"),
        (lambda: list(lab.stream_with_remarks(5)), "ChatRequest"),
        (lambda: lab.complete("hello"), "CompletionRequest"),
        (lambda: lab.tokenize("hello"), "TokenizeRequest"),
        (lambda: lab.embed("hello"), "EmbeddingsBody"),
        (lambda: lab.rerank("hello"), "RerankBody"),
        (lambda: lab.trace("hello"), "TraceBody"),
        (lambda: daemon.create_session("s"), "CreateSession"),
        (lambda: daemon.change_session("s", "title"), "ChangeSession"),
        (lambda: daemon.fork_session("s", None), "ForkSession"),
        (lambda: daemon.submit_turn("s", "hello"), "SubmitTurn"),
        (lambda: daemon.cancel_turns("s", "turn"), "CancelTurns"),
        (lambda: daemon.add_mcp_server("time"), "McpServerConfig"),
        (lambda: daemon.change_mcp_server("time", True), "ChangeMcpServer"),
        (lambda: daemon.test_mcp_server(["time"]), "McpServerConfig"),
    ):
        with pytest.raises(InvalidRequestError, match=f"pass a {shape}, or a dictionary with its fields"):
            call()
    with pytest.raises(InvalidRequestError, match=r"argz: is not a field of this request.*did you mean 'args'"):
        daemon.add_mcp_server({"name": "time", "argz": []})


def test_wrong_arguments_are_an_error_that_names_the_method():
    client = LabClient("127.0.0.1:9")
    for call, message in (
        (lambda: client.chat(no=1), r"LabClient\.chat\(\) got an unexpected keyword argument 'no'"),
        (lambda: client.stream(no=1), r"LabClient\.stream\(\) got an unexpected keyword argument 'no'"),
        (lambda: client.events([], 1), r"LabClient\.events\(\) takes from 1 to 2 positional arguments"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            call()
