"""Tests of the blocking clients: their methods are those of the async clients, and their calls can be interrupted.

How a blocking method is made from a coroutine function is tested in ``tests/test_blocking.py``.
"""

import asyncio
import gc
import inspect
import os
import pickle
import threading
from typing import get_type_hints

import httpx2
import pytest

from lmx_lab import errors
from lmx_lab.blocking import documented_as, with_keywords
from lmx_lab.client import AsyncLabClient
from lmx_lab.client.blocking import ClientPortal
from lmx_lab.client.daemon import AsyncDaemonClient, AsyncSession, BlockingSubscription, DaemonClient, Session
from lmx_lab.client.daemon_events import TurnDoneEvent
from lmx_lab.client.lab import LabClient
from lmx_lab.client.subscription import MemoryCursor, Subscription
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.chat import ChatChunk
from tests.support.asking import ENDLESS, echo_request
from tests.support.daemons import serving
from tests.support.labs import KEY, manager_of, wait_until_idle
from tests.support.labs import serving as serving_lab
from tests.support.model_server import STALL, Scripted, calls, says, token
from tests.support.programs import run_script
from tests.support.sockets import Endless, answering, whole
from tests.support.waiting import WAIT_S, interrupt_when, until

ALIVE = whole('{"status": "ok"}')
EVENT_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-lmx-lab: 0\r\n\r\n"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


# --- the methods

ALONE = {"aclose", "close", "connection", "credentials", "session_id", "url"}
"""Members that only async or only blocking classes have, and attributes of instances."""


def members(of):
    found = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
    return {name: member for name, member in found.items() if name not in ALONE}


@pytest.mark.parametrize("of", [LabClient, DaemonClient, Session, BlockingSubscription])
def test_the_defaults_of_arguments_are_readable(of):
    for name, member in members(of).items():
        if callable(member):
            shown = str(inspect.signature(member))
            assert "Ellipsis" not in shown, name
            assert " object at " not in shown, name
    assert "engine: 'EngineChoice' = 'auto'" in str(inspect.signature(LabClient.load))
    assert "title: 'str | None' = <not given>" in str(inspect.signature(Session.change))


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
        with pytest.raises(errors.InvalidRequestError, match=f"pass a {shape}, or a dictionary with its fields"):
            call()
    with pytest.raises(errors.InvalidRequestError, match=r"argz: is not a field of this request.*did you mean 'args'"):
        daemon.add_mcp_server({"name": "time", "argz": []})


@pytest.mark.parametrize(
    ("async_class", "blocking"),
    [
        (AsyncLabClient, LabClient),
        (AsyncDaemonClient, DaemonClient),
        (AsyncSession, Session),
        (Subscription, BlockingSubscription),
    ],
)
def test_blocking_classes_have_the_methods_of_async_classes(async_class, blocking):
    theirs, ours = members(async_class), members(blocking)
    assert set(theirs) == set(ours)
    for name, member in theirs.items():
        assert callable(member) == callable(ours[name]), name
        if callable(member):
            arguments, own = (
                [(it.name, it.kind, it.default) for it in with_keywords(function).parameters.values()]
                for function in (member, ours[name])
            )
            assert own == arguments, name
            # The first sentence tells methods with equal arguments apart.
            expected = documented_as(member)(lambda: None).__doc__
            assert ours[name].__doc__.partition(".")[0] == expected.partition(".")[0], name


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


def test_wrong_arguments_are_an_error_that_names_the_method():
    client = LabClient("127.0.0.1:9")
    for call, message in (
        (lambda: client.chat(no=1), r"LabClient\.chat\(\) got an unexpected keyword argument 'no'"),
        (lambda: client.stream(no=1), r"LabClient\.stream\(\) got an unexpected keyword argument 'no'"),
        (lambda: client.events([], 1), r"LabClient\.events\(\) takes from 1 to 2 positional arguments"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            call()
    with pytest.raises(errors.InvalidRequestError, match="wait: Input should be a valid boolean"):
        LabClient("127.0.0.1:9").unload(wait="yes")


# --- the background loop


def test_a_blocking_call_on_the_clients_loop_is_refused():
    async def call(client: LabClient) -> str:
        return client.version()

    with answering(ALIVE) as server, LabClient(server.url) as client:
        client.version()
        with pytest.raises(errors.HostingError, match="await the async client"):
            client._portal.run(call(client))


@pytest.mark.slow
def test_all_clients_share_one_loop_which_importing_does_not_start():
    run_script("""
import threading
from lmx_lab.client import lab as it
from lmx_lab.errors import LabError
names = lambda: [thread.name for thread in threading.enumerate() if thread.name == "lmx-lab-background"]
client, other = it.LabClient("127.0.0.1:9"), it.LabClient("127.0.0.1:9")
assert names() == []
for each in (client, other):
    try:
        each.version()
    except LabError:
        pass
assert len(names()) == 1
""")


@pytest.mark.slow
def test_a_script_can_end_while_a_stream_is_open():
    with answering(Endless(b"data: {}\n\n", head=EVENT_HEAD, every_s=0.01)) as server:
        run_script(f"""
from lmx_lab.client.lab import LabClient
client = LabClient({server.url!r})
stream = client.events()
next(stream), next(stream)
""")


@pytest.mark.slow
@needs_fork
def test_a_forked_child_needs_clients_of_its_own():
    with answering(ALIVE) as server:
        output = run_script(f"""
import os, sys, warnings
from lmx_lab.client.lab import LabClient
from lmx_lab.errors import HostingError
client = LabClient({server.url!r})
unused = LabClient({server.url!r})
assert client.version() == "0"
warnings.filterwarnings("ignore", ".*multi-threaded.*fork")  # Python warns of any thread.
child = os.fork()
if not child:
    try:
        client.version()
    except HostingError as exc:
        assert "forked" in str(exc)
        client.close()
        assert unused.version() == LabClient({server.url!r}).version() == "0"
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(client.version())
""")
    assert output == "0\n"


@pytest.mark.slow
@needs_fork
def test_a_forked_child_does_not_affect_its_parents_streams(daemon):
    output = run_script(f"""
import os, warnings
from lmx_lab import blocking as stream
from lmx_lab.client.daemon import DaemonClient
stream.END_S = 3600.0
client = DaemonClient.discover({str(daemon.folder.parent)!r})
events = client.events(after=0)
first = next(events).seq
warnings.filterwarnings("ignore", ".*multi-threaded.*fork")  # Python warns of any thread.
child = os.fork()
if not child:
    events.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
client.session()
assert next(events).seq > first
print("more")
""")
    assert output == "more\n"


def test_a_closed_client_refuses_calls():
    def answer(request):
        return httpx2.Response(200, headers={"x-lmx-lab": "9.9"}, json={"status": "ok"})

    client = LabClient("http://far", transport=httpx2.MockTransport(answer))
    assert client.version() == "9.9"
    client.close()
    client.close()
    for call in (client.version, lambda: next(client.events())):
        with pytest.raises(errors.HostingError, match="closed"):
            call()
    assert repr(client) == "<LabClient of http://far>"


def test_deleting_a_client_closes_its_connections():
    closed = threading.Event()

    async def close() -> None:
        closed.set()

    portal = ClientPortal(close)
    portal.run(asyncio.sleep(0))
    gc.disable()
    try:
        del portal
        assert closed.wait(WAIT_S)
    finally:
        gc.enable()


# --- the client of the inference server


@pytest.fixture
def lab_client(lab):
    with LabClient(lab.url, api_key=KEY) as client:
        yield client
    wait_until_idle(lab)


def text_of(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_an_answer_and_its_chunks_are_returned(lab_client):
    text = lab_client.chat(echo_request()).choices[0].message.content
    assert text
    assert text_of(lab_client.stream(echo_request())) == text
    assert text_of(lab_client.stream(echo_request(), over="websocket")) == text
    parts = lab_client.stream_with_remarks(echo_request())
    assert text_of([part for part in parts if isinstance(part, ChatChunk)]) == text


def test_two_threads_can_use_one_client(lab_client):
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(text_of(lab_client.stream(echo_request())))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [lab_client.chat(echo_request()).choices[0].message.content] * 2


def test_a_stream_keeps_its_client_alive(lab):
    stream = LabClient(lab.url, api_key=KEY).stream(echo_request())
    gc.collect()
    assert len(list(stream)) > 2


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_an_interrupt_ends_the_generation_on_the_server(lab, lab_client, way):
    def tokens():
        return manager_of(lab).snapshot.totals.output_tokens

    before, body = tokens(), echo_request(**ENDLESS)
    thread = interrupt_when(lambda: tokens() > before)
    with pytest.raises(KeyboardInterrupt):
        _ = lab_client.chat(body) if way == "chat" else list(lab_client.stream(body))
    thread.join()
    wait_until_idle(lab)
    assert tokens() - before < ENDLESS["max_tokens"]


@pytest.fixture
def loading(echo_home):
    """A server that loads a model only after its first step was reported."""
    seen = []
    with serving_lab(echo_home, None) as lab, pytest.MonkeyPatch.context() as patched:
        load = manager_of(lab).load

        async def slowly(spec, *, local):
            lab.server.services.feed.publish(ModelEvent(model=spec.model, stage="verify", done_bytes=1, total_bytes=2))
            while not seen:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return await load(spec, local=local)

        patched.setattr(manager_of(lab), "load", slowly)
        yield lab, seen


def test_the_progress_of_a_load_is_reported_in_the_callers_thread(loading):
    lab, seen = loading
    threads = set()

    def show(step: ModelEvent) -> None:
        threads.add(threading.get_ident())
        seen.append(step)

    with LabClient(lab.url) as client:
        assert client.load("echo", progress=show).model == "echo"
    assert (seen[0].model, seen[0].stage, seen[0].done_bytes) == ("echo", "verify", 1)
    assert {step.stage for step in seen} <= {"verify", "load"}
    assert threads == {threading.get_ident()}


@pytest.mark.anyio
@pytest.mark.parametrize("blocking", [True, False])
async def test_an_exception_of_progress_ends_the_wait_but_not_the_load(loading, blocking):
    lab, seen = loading

    def fail(step: ModelEvent) -> None:
        seen.append(step)
        raise errors.InvalidRequestError("no more")

    async with AsyncLabClient(lab.url) as async_client:
        with LabClient(lab.url) as client, pytest.raises(errors.InvalidRequestError, match="no more"):
            _ = client.load("echo", progress=fail) if blocking else await async_client.load("echo", progress=fail)
    until(lambda: manager_of(lab).snapshot.model == "echo")


# --- the client of the daemon


def script(body):
    match body["messages"][-1]["content"]:
        case "stall":
            return [token("never"), STALL]
        case "call":
            return calls(("add", {"a": 1, "b": 2}))
    return says("Hello ", "there.", thinks=["Hm."])


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Scripted(script) as upstream, serving(tmp_path_factory.mktemp("home"), upstream=upstream.url) as daemon:
        daemon.tool(add)
        yield daemon


@pytest.fixture(scope="module")
def daemon_client(daemon):
    with DaemonClient.discover(daemon.folder.parent) as client:
        yield client


@pytest.fixture
def session(daemon_client):
    session = daemon_client.session(title="a test")
    yield session
    session.delete()


def test_sessions_and_forks_are_blocking_objects(daemon_client, session):
    fork = session.fork(title="f")
    assert repr(fork) == f"<Session {fork.session_id} of {daemon_client.url}>"
    assert fork.snapshot().title == "f"
    daemon_client.delete_session(fork.session_id)


def test_a_turn_returns_its_result_and_its_events_in_the_callers_thread(session):
    threads, seen = set(), []

    def note(event):
        threads.add(threading.get_ident())
        seen.append(event)

    result = session.run("hi", on_event=note, turn_id="t")
    assert (result.text, result.thinking, result.stop_reason) == ("Hello there.", "Hm.", "end")
    assert threads == {threading.get_ident()}
    with session.stream("hi", turn_id="t") as events:
        assert list(events) == seen
    assert isinstance(seen[-1], TurnDoneEvent)


@pytest.mark.parametrize("way", ["run", "stream"])
def test_permissions_are_decided_in_the_callers_thread(session, way):
    requests = []

    def decide(permission):
        requests.append((permission.tool, threading.get_ident()))
        return "deny"

    if way == "run":
        (status,) = [call.status for call in session.run("call", on_permission=decide).tool_calls]
    else:
        events = session.stream("call", on_permission=decide)
        (status,) = [event.data.status for event in events if event.event == "tool.end"]
    assert (requests, status) == ([("add", threading.get_ident())], "denied")
    assert [call.text for call in session.run("call", on_permission="allow").tool_calls] == ["3"]


@pytest.mark.parametrize("way", ["run", "stream", "body", "callback"])
def test_an_interrupt_cancels_the_turn(session, way):
    def press(*_):
        raise KeyboardInterrupt

    def ask():
        if way == "callback":
            session.run("call", turn_id="t", on_permission=press)
        elif way == "run":
            session.run("stall", turn_id="t")
        for event in session.stream("stall", turn_id="t"):
            if way == "body" and event.event == "turn.token":
                press()

    thread = interrupt_when(lambda: bool(session.snapshot().partial_text)) if way in ("run", "stream") else None
    with pytest.raises(KeyboardInterrupt):
        ask()
    if thread is not None:
        thread.join()
    record = session.turn("t", wait_s=20)
    assert (record.status, record.stop_reason) == ("done", "cancelled")


def test_closing_the_client_cancels_a_turn_whose_stream_was_dropped(daemon, session):
    with DaemonClient(daemon.url, token=daemon.token) as other:
        for event in other.session(session.session_id).stream("stall", turn_id="t"):
            if event.event == "turn.token":
                break
    assert session.turn("t", wait_s=20).stop_reason == "cancelled"


def test_the_cursor_is_that_of_the_last_event_that_was_read(daemon_client, session):
    store = MemoryCursor()
    with daemon_client.events(session_ids=[session.session_id], cursor=store) as events:
        assert events.opened() is not None
        session.run("hi")
        first = next(events)
        assert (events.state.state, events.reconnects) == ("live", 0)
        assert repr(events) == f"<BlockingSubscription to {daemon_client.url}: live>"
    assert store.load().seq == first.seq
    seqs = [first.seq]
    for event in daemon_client.events(session_ids=[session.session_id], cursor=store):
        seqs.append(event.seq)
        if isinstance(event, TurnDoneEvent):
            break
    page = daemon_client.page(after=first.seq - 1, session_ids=[session.session_id])
    assert seqs == [event.seq for event in page.events]


def test_another_thread_can_read_the_states_of_the_connection(daemon_client):
    states = []
    with daemon_client.events(types=["turn.started"]) as events:
        thread = threading.Thread(target=lambda: states.extend(state.state for state in events.states()))
        thread.start()
        events.opened()
        until(lambda: "live" in states)
    thread.join()
    assert states[-1] == "closed"


def test_an_interrupt_ends_the_wait_for_events(daemon_client, session):
    with daemon_client.events(session_ids=[session.session_id]) as events:
        events.opened()
        session.run("hi")
        last = daemon_client.page(after=0, session_ids=[session.session_id]).events[-1].seq
        thread = interrupt_when(lambda: events.cursor is not None and events.cursor.seq == last)
        with pytest.raises(KeyboardInterrupt):
            list(events)
        thread.join()
        assert list(events) == []


def test_a_closed_subscription_does_not_connect(daemon_client):
    events = daemon_client.events()
    events.close()
    with pytest.raises(errors.HostingError, match="closed"):
        events.opened()
    assert events.state.state == "connecting"
