"""Run an inference server in this process, with the kernel's event loop or in a thread, and implement the ``Backend``
of its lab.

Panels call it on their own event loop, so that their work does not delay requests. The methods of ``Lab`` call it on
the server's loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from lmx_lab.backend import FinishedAnswer, Progress, Ranking, RunningAnswer, ServerState
from lmx_lab.blocking import Portal, in_thread, on_loop
from lmx_lab.engine import Answer, Caller, GenerationRequest, ModelManager, TextPrompt
from lmx_lab.engine.engines import ENGINES, engine_for
from lmx_lab.errors import EngineError, HostingError, InvalidRequestError, NotLoadedError, format_bytes
from lmx_lab.http.guard import LivePolicy
from lmx_lab.http.uvicorn_server import GRACE_S, RunningServer, bind, serve
from lmx_lab.instrument.store import RecordStore, save_record
from lmx_lab.notebook.addresses import Addresses
from lmx_lab.portal import HostedLoop, LoopThread
from lmx_lab.running import record_lab
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.server.admin import model_records
from lmx_lab.server.completions import prompt_text
from lmx_lab.server.embeddings import embedding_request
from lmx_lab.server.events import sample
from lmx_lab.server.recording import request_to_json
from lmx_lab.server.rerank import rerank_request
from lmx_lab.server.tracing import trace_request
from lmx_lab.server.translate import completion_requests, generation_request, timings, usage
from lmx_lab.settings import Settings
from lmx_lab.urls import qr_data_uri
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import (
    DiskUse,
    EngineChoice,
    LoadReport,
    LoadSpec,
    ModelEntry,
    ModelEvent,
    ModelFiles,
    Stored,
    TimeToLive,
    capacity_in_words,
    with_reason,
)
from lmx_lab.values.outputs import Delta, TokenLogprob, Vectors
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.recording import Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.timeline import ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.files import in_thread as in_disk_thread
from lmx_lab.weights.fingerprint import known_content_digest
from lmx_lab.weights.usage import disk_use, find_model, find_stored, remove_stored
from lmx_lab.wire.admin import (
    KeepAnswer,
    ModelRecords,
    RequestEvent,
    RunningRequest,
    Sample,
    TraceBody,
)
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.completions import CompletionRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody

if TYPE_CHECKING:
    from lmx_lab.daemon.tools import PythonTools
    from lmx_lab.notebook.daemon import LabDaemon
    from lmx_lab.notebook.discovery import Announcement
    from lmx_lab.panels.events import EventsPanel
    from lmx_lab.panels.workbench import Workbench

LoopChoice = Literal["auto", "kernel", "thread"]
LoopMode = Literal["kernel", "thread"]
"""Who runs the server's loop: the kernel's own loop together with a thread, or a thread alone."""

REQUESTS_S = 2.5
"""Time for running requests to end before they are ended with an error."""
T = TypeVar("T")


class LocalServer:
    """The engine, the services and the HTTP server of a lab in this process. Cannot be started again after a stop.

    See ``Lab`` for the arguments.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        loop: LoopChoice = "auto",
        explicit_port: bool = True,
        engine: ModelManager | None = None,
    ) -> None:
        self.settings = settings
        self.loop_choice = loop
        self.mode = choose_loop(loop)
        self.explicit_port = explicit_port
        self.engine = engine if engine is not None else ModelManager(settings)
        self.catalog: Catalog = self.engine.catalog
        self.addresses = Addresses(settings=settings, port=settings.port)
        # Computed now, for any host and port, so that a setting that can never match is refused before anything starts.
        anywhere = Addresses(settings=replace(settings, host="localhost"), port=1)
        self._policy = LivePolicy(anywhere.policy, anywhere.own_names)
        if (announcement := self._new_announcement()) is not None:
            announcement.check()
        path = settings.record_to if settings.record != "off" else None
        self.records = RecordStore(path) if path is not None else RecordStore.in_memory()
        try:
            self.services: InferenceServer = create_server(
                manager=self.engine, policy=self._policy, save_record=partial(save_record, self.records)
            )
            """The services behind the routes."""
        except BaseException:
            self.records.close()
            raise
        self.daemon: LabDaemon | None = None
        """The daemon in front of this server, even after it was stopped."""
        self.daemon_tools: PythonTools | None = None
        """The Python functions of the daemon, even if it could not be started."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that serves; None before the start."""
        self.thread: LoopThread | None = None
        """The thread that runs the loop, alone or together with the kernel's loop; None before the start."""
        self._host: RunningServer | None = None
        self._stopped = False
        self.announced_name = ""
        """The name under which the server is announced on the local network; empty if it is not."""
        self._announcement: Announcement | None = None
        self._remove_record: Callable[[], None] | None = None
        self._callbacks: list[Callable[[], None]] = []

    # Lifetime

    async def start(self, sock: socket.socket | None = None) -> None:
        """Bind the socket, start the engine and serve; return when requests are accepted. Does nothing if the server
        is running.

        Args:
            sock: A listening socket, instead of a new one.

        Raises:
            HostingError, PortTakenError: the server could not start, and all that had been started was stopped; or it
                was stopped before.
            InvalidRequestError: ``loop`` is ``kernel``, and no event loop runs in this thread.
        """
        if self.running:
            return
        if self.stopped:
            raise HostingError("this lab was stopped; launch() starts a new one")
        # The thread that starts the server need not be the one that created it.
        self.mode = choose_loop(self.loop_choice)
        self.services.open()
        try:
            sock = sock or bind(self.settings.host, self.settings.port, explicit=self.explicit_port)
        except BaseException:
            self.services.close()
            raise
        self.addresses = Addresses(settings=self.settings, port=sock.getsockname()[1])
        self._policy.replace(self.addresses.policy, self.addresses.own_names)
        try:
            self.thread = HostedLoop(asyncio.get_running_loop()) if self.mode == "kernel" else LoopThread()
            self.thread.start()
            self.loop = self.thread.loop
            self.engine.start()
            # Registered after the engine's own function, and therefore called before it: requests end first.
            atexit.register(self._stop_at_exit)
            announcement = self._new_announcement()
            # Before requests are accepted, because programs wait for GET /healthz and then look for the lab.
            self._remove_record = await in_thread(
                partial(record_lab, self.settings.home, self.settings.host, self.addresses.port)
            )
            max_bytes, pong_s = self.settings.max_body_bytes, self.settings.slow_client_s
            serving = serve(self.services.asgi, sock, ws_max_bytes=max_bytes, ws_pong_s=pong_s)
            self._host = await on_loop(self.portal, serving)
            if announcement is not None:
                self._announcement = announcement
                self.announced_name = await in_thread(announcement.start)
        except BaseException:
            sock.close()
            self._close()
            raise

    def _new_announcement(self) -> Announcement | None:
        settings = self.settings
        if not settings.announce:
            return None
        # Imported here, because few labs are announced.
        from lmx_lab.notebook.discovery import Announcement

        return Announcement(
            settings.announce_name,
            port=self.addresses.port,
            addresses=self.addresses.lan_names,
            key_needed=settings.api_key is not None,
        )

    async def stop(self) -> None:
        """Stop serving, unload the models and free the port. Running requests have 2.5 s to end. Idempotent."""
        try:
            if self.running:
                await on_loop(self.portal, self._end())
        finally:
            await in_thread(self._close)

    @property
    def running(self) -> bool:
        """Whether the server accepts requests."""
        return self._host is not None and not self.stopped

    @property
    def stopped(self) -> bool:
        """Whether the server has ended for any reason."""
        return self._stopped or (self._host is not None and not self._host.running)

    async def wait(self) -> None:
        """Wait until the server has ended for any reason. Can be awaited on any loop."""
        if self._host is not None:
            await self._host.wait()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the server has stopped. It is called in a thread that may wait."""
        self._callbacks.append(callback)

    async def _end(self) -> None:
        if self._announcement is not None:
            await asyncio.to_thread(self._announcement.stop)
        # The daemon first: its turns send requests to this server.
        if self.daemon is not None:
            await asyncio.to_thread(self.daemon.stop)
        # Streams of events do not end by themselves.
        self.services.feed.close()
        # Loads and generations end next, so that each request gets its answer before its connection is closed.
        began = time.monotonic()
        await asyncio.gather(self.engine.cancel_loads(), self._quiesce())
        assert self._host is not None
        # Clients have at least 1 s to receive the end of their answers.
        await self._host.stop(max(1.0, GRACE_S - (time.monotonic() - began)))

    async def _quiesce(self) -> None:
        """Wait until running requests have ended. A load or a step that hangs does not extend the time limit."""
        with contextlib.suppress(EngineError, TimeoutError):
            # The engine needs more time to end these requests, because a step may be running.
            await asyncio.wait_for(self.engine.quiesce(REQUESTS_S), REQUESTS_S + 0.7)

    def _close(self) -> None:
        self._stopped = True
        if self._remove_record is not None:
            self._remove_record()
        if self._announcement is not None:
            self._announcement.stop()
        if self.daemon is not None:
            self.daemon.stop(mode="now")
        self.engine.stop()
        if self.thread is not None:
            self.thread.stop()
        self.services.close()
        self.records.close()
        atexit.unregister(self._stop_at_exit)
        for callback in self._callbacks:
            callback()

    def _stop_at_exit(self) -> None:
        if self._host is not None:
            self._host.stop_at_exit()
        self._close()

    # The server's loop

    @property
    def portal(self) -> Portal:
        """The event loop of the server. Its calls raise ``HostingError`` before the start and after the stop."""
        return Portal(self._running_thread)

    def _running_thread(self) -> LoopThread:
        if self._stopped or self.thread is None or self.loop is None or self.loop.is_closed():
            state = "was stopped" if self._stopped else "is not running"
            raise HostingError(f"this lab {state}; launch() starts a new one")
        return self.thread

    def start_daemon(
        self,
        workbench: Workbench,
        events_panel: Callable[[], EventsPanel],
        *,
        explicit_port: bool,
        tools: PythonTools | None,
    ) -> LabDaemon:
        """Start a daemon for this server, or return the running one; see ``Lab.start_daemon``."""
        self._running_thread()  # Raises HostingError if the lab was stopped.
        # Stored also if the start fails: the next attempt finds them.
        self.daemon_tools = tools = tools or self.daemon_tools
        # Imported here, because MCP takes half a second to import.
        from lmx_lab.notebook.daemon import LabDaemon

        if (running := self.running_daemon) is not None:
            return running
        daemon = LabDaemon(
            workbench,
            events_panel,
            settings=self.settings,
            explicit_port=explicit_port,
            upstream_url=self.addresses.url,
            upstream_api_key=self.settings.api_key,
            upstream_headers=self.services.inference.recording.own_headers,
            tools=tools,
        )
        self.daemon_tools = daemon.python_tools
        daemon.start()
        self.daemon = daemon
        return daemon

    async def delete_model(self, name: str, *, yes: bool) -> ModelFiles:
        """Find the files of a model on the disk, and delete them with ``yes``; see ``find_model``."""
        # Imported here, because few cells delete models.
        from lmx_lab.client.labs import files_in_use

        others = await files_in_use(self.settings, besides=self.port)

        def work() -> ModelFiles:
            own = {path: f"lab.unload({model!r})" for path, model in self.engine.in_use.items()}
            files = find_model(self.settings, name, in_use=others.unloads | own)
            for item in files.items if yes else ():
                remove_stored(self.settings, item)
            return replace(files, unknown=others.unknown, deleted=yes)

        return await in_disk_thread(work)

    # Description

    @property
    def port(self) -> int:
        return self.addresses.port

    @property
    def place(self) -> str:
        """Where the server runs, for display."""
        return "in this kernel" if self.mode == "kernel" else "in a thread of this process"

    @property
    def running_daemon(self) -> LabDaemon | None:
        return self.daemon if self.daemon is not None and self.daemon.running else None

    def facts(self) -> dict[str, str]:
        """Return the name and the value of each line that describes the lab."""
        now, daemon = self.engine.snapshot, self.running_daemon
        model = "none loaded" if now.model is None else f"{now.model} ({format_bytes(now.model_memory_bytes)})"
        facts = {
            "LMX Lab": f"running {self.place}" if self.running else "stopped",
            "address": self.addresses.url,
            "LAN address": next(iter(self.addresses.lan_urls), ""),
            "announced as": self.announced_name,
            "browser address": self.addresses.proxy_url or self.addresses.browser_step or "",
            "model": f"{model}, {now.unloading}" if now.unloading is not None else model,
            "engine": with_reason(engine_for(now.entry.format).name, now.entry.engine_reason) if now.entry else "",
            "capacity": capacity_in_words(now.slots, now.context_length),
            "daemon": daemon.url if daemon is not None else "",
            "also loaded": ", ".join(
                f"{it.entry.id} ({format_bytes(it.memory_bytes)})" for it in now.models if it is not now.main
            ),
        }
        return {name: value for name, value in facts.items() if value}

    def panels_shown(self) -> None:
        """Does nothing: the registry of launched labs keeps the server."""


def choose_loop(loop: LoopChoice) -> LoopMode:
    """Return who runs the loop. ``auto`` is ``kernel`` if a loop runs in this thread.

    Raises:
        InvalidRequestError: ``kernel`` was given and no loop runs, or the value is not one of the three.
    """
    running = asyncio._get_running_loop()
    if loop == "auto":
        return "kernel" if running is not None else "thread"
    if loop not in ("kernel", "thread"):
        raise InvalidRequestError(f"loop is {loop!r}; it can be auto, kernel or thread", param="loop")
    if loop == "kernel" and running is None:
        raise InvalidRequestError(
            "loop='kernel' needs a running event loop, as in a notebook; use loop='thread'", param="loop"
        )
    return loop


class LocalBackend:
    """A ``Backend`` over a server of this process."""

    def __init__(self, server: LocalServer) -> None:
        self.job = ""
        self._server = server
        self._last: tuple[EngineSnapshot, float] | None = None
        """The snapshot of the last measurement, and when it was taken."""

    @property
    def portal(self) -> Portal:
        return self._server.portal

    @property
    def url(self) -> str:
        return self._server.addresses.url

    @property
    def api_key(self) -> str | None:
        return self._server.settings.api_key

    @property
    def home(self) -> Path:
        return self._server.settings.home

    def state(self) -> ServerState:
        server, addresses, now = self._server, self._server.addresses, self._server.engine.snapshot
        return ServerState(
            state="running" if server.running else "stopped",
            place=server.place,
            url=addresses.url,
            lan_url=(lan_url := next(iter(addresses.lan_urls), None)),
            phone_code=qr_data_uri(lan_url) if lan_url is not None and server.settings.page else "",
            proxy_url=addresses.proxy_url,
            proxy_path=addresses.proxy_path,
            model=now.model,
            others=tuple(state.entry.id for state in now.models if state is not now.main),
            kept=tuple((state.pinned, state.ttl_s) for state in now.models),
            unloading=now.unloading,
            note="" if server.running else "This server was stopped; run the launch cell again.",
        )

    def sample(self) -> Sample | None:
        if not self._server.running:
            self._last = None
            return None
        snapshot, now = self._server.engine.snapshot, time.monotonic()
        before, then = self._last or (snapshot, now - 1)
        self._last = snapshot, now
        return sample(before, snapshot, max(now - then, 1e-3))

    async def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        with self._services.feed.subscribe() as events:
            async for event in events:
                if isinstance(event, ModelEvent | RequestEvent):
                    yield event

    # Models

    async def models(self) -> ModelRecords:
        return await model_records(self._server.engine)

    async def plan(self, spec: LoadSpec) -> LoadPlan:
        return await self._services.manager.plan(spec)

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        return await self._report_progress(self._services.manager.load(spec), progress)

    async def check(
        self, spec: LoadSpec, *, beside: Sequence[ModelEntry] = (), progress: Progress | None = None
    ) -> ModelEntry:
        """Check that a model can be loaded; see ``ModelManager.check``."""
        return await self._report_progress(self._services.manager.check(spec, beside=beside), progress)

    async def cancel_load(self, model: str, *, shared: bool = True) -> None:
        await self._services.manager.cancel_load(model, shared=shared)

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        return await self._report_progress(self._services.manager.unload(model, wait=wait), progress) / 1e9

    async def disk_use(self) -> DiskUse:
        return await in_disk_thread(lambda: disk_use(self._server.settings))

    async def remove_stored(self, item: Stored) -> None:
        settings = self._server.settings

        def remove() -> None:
            if find_stored(settings, item.name) != item:
                raise InvalidRequestError(f"{item.name} has changed since it was listed; list it again", param="name")
            remove_stored(settings, item)

        await in_disk_thread(remove)

    async def keep(self, model: str, *, pin: bool | None = None, ttl_s: TimeToLive | None = None) -> KeepAnswer:
        state = await self._services.manager.keep(model, pin=pin, ttl_s=ttl_s)
        return KeepAnswer(model=state.entry.id, pinned=state.pinned, ttl_s=state.ttl_s)

    async def _report_progress(self, work: Coroutine[Any, Any, T], progress: Progress | None) -> T:
        if progress is None:
            return await work

        async def report() -> None:
            async for event in events:
                if isinstance(event, ModelEvent):
                    progress(event)

        with self._services.feed.subscribe() as events:
            reporting = asyncio.create_task(report(), name="report the progress of a load or unload")
            try:
                return await work
            finally:
                reporting.cancel()

    # Requests

    async def timeline(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        return self._services.inference.timelines.read(last_s, most=most)

    async def clients(self) -> Sequence[RunningRequest]:
        return self._services.inference.requests.read()

    async def stop_request(self, id_: str) -> str:
        return self._services.inference.requests.stop(id_)

    async def generate(self, request: ChatRequest, *, batch: bool = False, internal: bool = False) -> RunningAnswer:
        # Requests of a batch have an id, so that the row of a table leads to its record.
        request_id = f"row_{secrets.token_hex(8)}" if batch else None
        own = None if internal else True
        caller = Caller(local=True, own=own, internal=internal, request_id=request_id, batch=batch)
        (answer,) = await self._services.inference.submit(replace(generation_request(request), caller=caller))
        return _running(answer)

    async def complete(self, request: CompletionRequest) -> FinishedAnswer:
        (wanted,) = completion_requests(request)
        (answer,) = await self._services.inference.submit(replace(wanted, caller=Caller(local=True, own=True)))
        # Read before the answer ends, because the model may be unloaded then.
        prompt = await prompt_text(self._services.manager, answer) if request.echo else ""
        finished = await _running(answer).read()
        scores = answer.prompt_scores.tokens if request.echo and answer.prompt_scores else ()
        return replace(finished, text=prompt + finished.text, tokens=(*scores, *finished.tokens))

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        vectors = (await self._services.inference.embed(embedding_request(body, Caller(local=True)))).vectors
        return vectors[0] if body.is_single else vectors

    async def rerank(self, body: RerankBody) -> Ranking:
        ranking = await self._services.inference.rerank(rerank_request(body, Caller(local=True)))
        return Ranking(
            query=body.query,
            documents=body.texts,
            order=tuple((index, float(ranking.scores[index])) for index in ranking.order(body.top_n)),
            model=ranking.report.model,
            method=ranking.method,
            tokens=ranking.report.tokens,
            report=ranking.report,
        )

    async def trace(self, body: TraceBody) -> Trace:
        return await self._services.manager.trace(trace_request(body, Caller(local=True)))

    # Recorded tokens

    def check_request(self, request: ChatRequest) -> None:
        generation_request(request)

    async def answer(self, request: ChatRequest | Record) -> Record:
        if isinstance(request, Record):
            return await self._services.inference.regenerate(request)
        return await self._services.inference.answer(generation_request(request))

    async def record(self, which: int | str = -1) -> Record | None:
        if self._server.settings.record == "off":
            raise InvalidRequestError(
                'the requests of this lab are not recorded (record="off"); start it with lmx_lab.launch(record="own")'
            )
        store = self._server.records
        return await asyncio.to_thread(lambda: store.find(which) if isinstance(which, str) else store.at(which))

    async def encode(self, prompt: str | ChatRequest, *, special: bool = True) -> list[int]:
        if isinstance(prompt, ChatRequest):
            request = generation_request(prompt)
        else:
            request = GenerationRequest(prompt=TextPrompt(text=prompt, special=special))
        return await self._services.manager.encode(replace(request, caller=Caller(local=True)))

    async def weights_of(self, model: str) -> str:
        entry = self._entry_of(model)
        return "" if entry is None else await asyncio.to_thread(known_content_digest, entry)

    def _entry_of(self, model: str) -> ModelEntry | None:
        models = self._services.manager.models
        return next((each.entry for each in models if each.entry.id == model), None)

    async def require_weights(self, model: str, weights: str, engine: str = "") -> None:
        row = next((row for row in ENGINES.values() if engine in (row.name, *row.formats)), None)
        place = "" if row is None else f" on {row.title}"
        option = f', engine="{row.name}"' if row is not None and row.name in get_args(EngineChoice) else ""
        remedy = f'load the model that generated it: lab.load("{model}"{option})'
        if (entry := self._entry_of(model)) is None:
            raise NotLoadedError(f"this answer was generated by {model}{place}, which is not loaded; {remedy}")
        if row is not None and entry.format not in row.formats:
            raise NotLoadedError(
                f"this answer was generated by {model}{place}, and now {model} is loaded on "
                f"{engine_for(entry.format).title}, with other weights; {remedy}, or pass its token ids"
            )
        if weights and (found := await self.weights_of(model)) != weights:
            raise InvalidRequestError(
                f"this answer was generated by {model} with other weights: the loaded files have the SHA-256 "
                f"{found}; load the model whose files have the SHA-256 {weights}",
                param="model",
            )

    async def continue_answer(self, continuation: Continuation, *, recorded: bool = True) -> RunningAnswer:
        await self.require_weights(continuation.model, continuation.weights, continuation.format)
        return _running(await self._services.inference.continue_answer(continuation, own=True if recorded else None))

    async def score(
        self,
        tokens: Sequence[int],
        *,
        model: str | None,
        top: int,
        start: int = 0,
        steer: Sequence[SteeringVector] = (),
    ) -> Sequence[TokenLogprob]:
        inference = self._services.inference
        return await inference.score(tokens, model=model, top=top, start=start, steer=steer)

    @property
    def _services(self) -> InferenceServer:
        # Before the start, the models of a lab that replaces another one are checked and loaded.
        if self._server.stopped:
            raise HostingError("this server was stopped; run the launch cell again")
        return self._server.services


def _running(answer: Answer) -> RunningAnswer:
    """Return an answer of the engine for a backend."""

    def finish(text: Delta) -> FinishedAnswer:
        report = answer.final_report()
        return FinishedAnswer.of(
            text,
            model=report.model,
            finish_reason=report.finish_reason,
            usage=usage([[report]]),
            timings=timings([[report]]),
            ttft_s=report.ttft_s,
            report=report,
            prompt_ids=answer.prompt,
            format=answer.origin.entry.format,
            request=request_to_json(answer.request),
            request_id=answer.request.caller.request_id,
        )

    return RunningAnswer(answer, finish)
