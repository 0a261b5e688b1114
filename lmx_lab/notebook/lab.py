"""Define ``Lab``: the methods that use and display an inference server, in this process or another, and ``attach``.

Most methods are functions of a ``Backend``, in the modules of their results. Importing this module imports neither the
engine, the server and the HTTP client, nor the widgets, which are optional.
"""

from __future__ import annotations

import functools
import html
import inspect
import os
import socket
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast, overload

from lmx_lab.arguments import Documents, Prompt, model_name, rerank_body
from lmx_lab.backend import Backend
from lmx_lab.batch import map as batch_map
from lmx_lab.batch import search
from lmx_lab.bench.case import Arrival, Cache, Closed, Sweep
from lmx_lab.blocking import both, both_of, on_loop, run_steps
from lmx_lab.errors import InvalidRequestError, MissingPackageError
from lmx_lab.evals import evaluate
from lmx_lab.evals.experiments import FILE, Experiments
from lmx_lab.extras import optional_imports
from lmx_lab.instrument import branches, compare, patching, probes, timeline, traces
from lmx_lab.instrument.requests import RequestList
from lmx_lab.notebook import loading, reply, results
from lmx_lab.notebook.reply import PendingStream
from lmx_lab.notebook.report import Snapshot, report_html, take_snapshot, write_report
from lmx_lab.notebook.results import RerankResult
from lmx_lab.panels.workbench import Workbench
from lmx_lab.results.tables import Html, html_table
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelFiles

if TYPE_CHECKING:
    import ipywidgets
    import pandas as pd

    from lmx_lab.bench.runner import Measured
    from lmx_lab.client import AsyncLabClient, LabClient
    from lmx_lab.daemon.tools import PythonTools
    from lmx_lab.engine import ModelManager
    from lmx_lab.notebook.daemon import LabDaemon
    from lmx_lab.notebook.local import LocalServer, LoopChoice
    from lmx_lab.notebook.remote import RemoteServer
    from lmx_lab.notebook.reply import Reply, ReplyStream
    from lmx_lab.panels.events import EventsPanel
    from lmx_lab.panels.metrics import MetricsPanel

CLOSED = Closed()
P = ParamSpec("P")
T = TypeVar("T")
NAMES = {
    "models": ("load", "unload", "keep", "model", "models", "plan", "delete_model"),
    "ask": ("chat", "complete", "tokenize", "embed", "rerank"),
    "tables": ("map", "embed_frame", "search", "evaluate", "experiments", "compare", "bench"),
    "look inside": (
        *("requests", "explore", "timeline", "hooks", "trace", "logit_lens", "attention"),
        *("direct_logit_attribution", "patch", "steering_vector", "probe"),
    ),
    "show": ("panel", "metrics", "snapshot", "report", "clients", "stop_request"),
    "connect": (
        *("url", "lan_url", "proxy_url", "openai", "settings", "daemon", "start_daemon", "running", "status", "stop"),
    ),
}
"""The names that completion offers, without their awaitable forms. Others are for programs and this package."""


def of_backend(
    function: Callable[Concatenate[Backend, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[Concatenate[Lab, P], T], Callable[Concatenate[Lab, P], Coroutine[Any, Any, T]]]:
    """Return the blocking and the awaitable form of a function of a backend, as methods of ``Lab``."""
    return both_of("backend", function)


class Lab:
    """An inference server, in this process or another one, with methods to load models and to send requests.

    - models: ``load``, ``unload``, ``keep``, ``model``, ``models``, ``plan``, ``delete_model``
    - ask: ``chat``, ``complete``, ``tokenize``, ``embed``, ``rerank``
    - tables: ``map``, ``embed_frame``, ``search``, ``evaluate``, ``experiments``, ``compare``, ``bench``
    - look inside: ``requests``, ``explore``, ``timeline``, ``hooks``, ``trace``, ``logit_lens``, ``attention``,
      ``direct_logit_attribution``, ``patch``, ``steering_vector``, ``probe``
    - show: ``panel``, ``metrics``, ``snapshot``, ``report``, ``clients``, ``stop_request``
    - connect: ``url``, ``lan_url``, ``proxy_url``, ``openai``, ``settings``, ``daemon``, ``start_daemon``, ``running``,
      ``status``, ``stop``

    ``launch()`` and ``attach()`` return a lab, and ``stop()`` ends it. Every blocking method that uses the server has
    an awaitable form, whose name begins with ``a``: ``chat`` and ``achat``. Programs with their own event loop
    use the class directly: ``async with Lab(settings) as lab``. Some properties (``settings``, ``requests``,
    ``lan_url``, ``daemon`` and so on) exist only if the server runs in this process.
    """

    backend: Backend
    _shown: Backend
    """The backend of panels, which can outlive the lab and must not keep an attached lab's connection open."""
    _workbench: Workbench | None = None

    def __init__(
        self,
        settings: Settings,
        *,
        loop: LoopChoice = "auto",
        explicit_port: bool = True,
        engine: ModelManager | None = None,
    ) -> None:
        """
        Args:
            loop: ``kernel`` serves together with the running event loop, ``thread`` in a thread; see ``launch()``.
            explicit_port: Whether the port of the settings is required; otherwise the next free one is used.
            engine: A manager that may be loading a model already; by default a new one. The lab stops it.
        """
        # Imported here, because attaching must not import the engine and the server.
        from lmx_lab.notebook.local import LocalBackend, LocalServer

        server = LocalServer(settings, loop=loop, explicit_port=explicit_port, engine=engine)
        self._local: LocalServer | None = server
        self._server: LocalServer | RemoteServer = server
        self.backend = LocalBackend(server)
        self._shown = self.backend

    @classmethod
    def over(cls, server: RemoteServer) -> Lab:
        """Return a lab for a server in another process."""
        lab = cls.__new__(cls)
        lab._local = None
        lab._server = server
        lab.backend = server.backend(keeps=True)
        lab._shown = server.backend(keeps=False)
        return lab

    def __dir__(self) -> list[str]:
        names = [name for group in NAMES.values() for name in group]
        return [*names, *(f"a{name}" for name in names if hasattr(Lab, f"a{name}")), "astream"]

    # Lifetime

    async def _start(self, sock: socket.socket | None = None) -> None:
        """Start the server, or connect to it, and return when it accepts requests. Does nothing if it is running.

        Args:
            sock: A listening socket for a server of this process, instead of a new one.

        Raises:
            HostingError, PortTakenError: the server could not start; all that had been started was stopped.
            HostingError: the lab was stopped.
            LabError: the server does not answer, or does not accept the key.
        """
        if sock is None:
            await self._server.start()
        else:
            await self.server.start(sock)

    start, astart = both(_start)

    async def _stop(self) -> None:
        """Stop a server of this process: unload its models and free its port. Running requests have 2.5 s to end.

        If the server runs in another process, only the connection to it is closed, which ends the requests of this lab;
        the server keeps running. Idempotent.
        """
        await self._server.stop()

    stop, astop = close, aclose = both(_stop)

    async def _enter(self) -> Lab:
        await self._start()
        try:
            await self._pin_encoders()
        except BaseException:
            await self._stop()
            raise
        return self

    async def _exit(self, *exc_info: object) -> None:
        await self._stop()

    __enter__, __aenter__ = both(_enter)
    __exit__, __aexit__ = both(_exit)

    def __await__(self) -> Generator[Any, None, Lab]:
        return self.__aenter__().__await__()

    @property
    def running(self) -> bool:
        """Whether the server accepts requests or, if it runs in another process, whether the connection is open."""
        return self._server.running

    @property
    def status(self) -> dict[str, str]:
        """What the lab displays about itself, by name: its address, model, engine and so on."""
        return self._server.facts()

    # Models

    @property
    def model(self) -> str | None:
        """The id of the model that was loaded last; None if no model is loaded."""
        if self._local is not None:
            return self.backend.state().model
        # A connection receives the state of its server only while there are panels.
        return next((record.id for record in self.models() if record.main), None)

    load, aload = of_backend(loading.load)
    unload, aunload = of_backend(loading.unload)
    keep, akeep = of_backend(loading.keep)
    models, amodels = of_backend(results.models)
    plan, aplan = of_backend(loading.plan)

    async def _delete_model(self, model: str | os.PathLike[str], *, yes: bool = False) -> ModelFiles:
        """Return what would be deleted with a model: files, sizes, and what else uses them; ``yes=True`` deletes it.

        An id means all formats on the disk and quantized copies. Files of other programs are never deleted.

        Raises:
            ModelNotFoundError: there is no such model on the disk.
            ModelBusyError: this lab or another lab of the home has it in memory or is loading it.
            InvalidRequestError: its files are not the lab's, or the server runs in another process.
        """
        if self._local is None:
            raise InvalidRequestError("an attached lab deletes no models; run lmx-lab rm where its server runs")
        return await on_loop(self.backend.portal, self._local.delete_model(model_name(model), yes=yes))

    delete_model, adelete_model = both(_delete_model)

    async def _pin_encoders(self) -> None:
        """Load the models that the settings ``embedder`` and ``reranker`` name, and keep them in memory.

        ``launch()``, ``with`` and ``async with`` do this. Models that are in memory already are not loaded again.

        Raises:
            LabError: one of them could not be loaded; the server still runs.
        """
        for spec in self._local.engine.unpinned() if self._local is not None else ():
            await loading.show_load(self.backend.portal, self.backend, spec)

    pin_encoders, apin_encoders = both(_pin_encoders)

    # Ask

    achat = of_backend(reply.ask)[1]
    complete, acomplete = of_backend(reply.complete)
    tokenize, atokenize = of_backend(reply.tokenize)

    def astream(self, prompt: Prompt, **parameters: Any) -> PendingStream:
        """Stream a reply: ``async for piece in lab.astream("…")``, or ``stream = await lab.astream("…")``.

        The parameters and errors are those of ``chat``; errors are raised when the answer is started.
        """
        return PendingStream(reply.stream(self.backend, prompt, **parameters))

    @overload
    def chat(self, prompt: Prompt, *, stream: Literal[False] = False, **parameters: Any) -> Reply: ...
    @overload
    def chat(self, prompt: Prompt, *, stream: Literal[True], **parameters: Any) -> ReplyStream: ...
    def chat(self, prompt: Prompt, *, stream: bool = False, **parameters: Any) -> Reply | ReplyStream:
        """Ask the loaded model; ``prompt`` is a text or a list of messages.

        With ``stream=True``, iterate over the result to get the text while it is generated, or display it with
        ``show()``. Interrupting the call stops the generation.

        Args:
            parameters: ``system``, the system prompt, and the parameters of the chat format: ``temperature``,
                ``top_p``, ``top_k``, ``min_p``, ``max_tokens``, ``stop``, ``seed``, penalties, ``logit_bias``,
                ``ignore_eos``, ``tools``, which may be Python functions, ``tool_choice``, ``reasoning_effort``,
                ``logprobs``, which may be the number of alternatives, ``logprob_tokens``, tokens to report whatever
                their rank, ``steer``, a list of ``Steer``, ``share_prefix``, whether all callers may continue the
                cached prompt, and ``response_format``, which may be the class of a pydantic model. ``n`` is not
                supported, because a reply has one text.

        Raises:
            NotLoadedError: no model is loaded.
            InvalidRequestError: a parameter does not exist or is out of range.
        """
        if stream:
            return run_steps(reply.stream(self.backend, prompt, **parameters))
        return run_steps(reply.ask(self.backend, prompt, **parameters))

    embed, aembed = of_backend(results.embed)

    async def _rerank(
        self,
        query: str,
        documents: Documents,
        *,
        top_n: int | None = None,
        model: str | os.PathLike[str] | None = None,
        truncate: bool = False,
    ) -> RerankResult:
        """Rank documents by relevance to a query: rows with rank, score, index and document; ``.df`` is a data frame.

        Args:
            documents: Texts, or objects with a ``text``.
            top_n: Return only this number of rows.
            model: A reranker or an embedding model in memory; by default a reranker, otherwise an embedding model.
            truncate: Cut documents that are too long for the model, instead of refusing them.

        Raises:
            NotLoadedError: neither a reranker nor an embedding model is loaded.
            ContextLengthError: a document is too long.
        """
        body = rerank_body(query, documents, top_n=top_n, model=model, truncate=truncate)
        ranking = await on_loop(self.backend.portal, self.backend.rerank(body))
        return RerankResult(ranking, show=self._show_ranking)

    rerank, arerank = both(_rerank)

    # Tables

    map, amap = of_backend(batch_map.map_rows)
    embed_frame, aembed_frame = of_backend(search.embed_frame)
    search, asearch = of_backend(search.search)
    evaluate, aevaluate = of_backend(evaluate.evaluate)
    compare, acompare = of_backend(compare.compare)

    @property
    def experiments(self) -> Experiments:
        """The stored evaluations, oldest first: ``lab.experiments.df``, ``lab.experiments[-1]``.

        They are in the file ``experiments.db`` in the lab's home. If the server runs in another process, the file is in
        the default home of this machine.
        """
        return Experiments(self.backend.home / FILE, self.backend)

    async def _bench(
        self,
        *,
        # The default token counts are those of llama-bench.
        prompt_tokens: int | Sequence[int] = 512,
        output_tokens: int | Sequence[int] = 128,
        concurrency: int | Sequence[int] = 1,
        requests: int | None = None,
        warm_up: int = 1,
        arrival: Arrival | Sequence[Arrival] = CLOSED,
        cache: Cache | Sequence[Cache] = "cold",
        seed: int | Sequence[int] = 0,
        repeats: int = 1,
        compare: Measured | Sequence[Measured] = (),
        engines: str | Sequence[str] = (),
        names: str | Sequence[str] = (),
        record: bool | Path | str = True,
    ) -> pd.DataFrame:
        """Measure the loaded model over HTTP, and return a table with one row for each request, failed ones included.
        Notebooks show its summary; ``.df`` shows the rows.

        ``lmx_lab.bench.summary`` computes medians with intervals from the table, ``lmx_lab.bench.by_concurrency`` plots
        it. The table also has the server's own measurements: ``queue_ms``, ``server_ttft_ms`` and so on.

        Interrupting ``bench`` stops running requests and returns the rows so far, with ``.attrs["interrupted"]`` true.
        Cancelling ``abench`` stops running requests; the rows of a recorded run can be loaded.

        Args:
            prompt_tokens, output_tokens, concurrency, requests, warm_up, arrival, cache, seed, repeats: The fields of
                ``lmx_lab.bench.Sweep``.
            compare: Addresses of other chat-format servers, or targets of ``lmx_lab.bench``, which are measured in
                turns with this lab.
            engines: Engines to compare, such as ``["mlx", "llama.cpp"]``. The lab loads its model with each of them in
                turns, without other options, for all cases of a repeat. Other clients get answers of the same engine.
                At the end, the model is loaded with its previous engine.
            names: Names of the sides in tables and plots: of the engines (by default theirs) or the lab, then of the
                targets in ``compare``.
            record: Whether to store the run, in ``bench`` in the lab's home, or a folder for it; ``.attrs["path"]`` is
                its file.

        Raises:
            NotLoadedError: no model is loaded.
            UnusableModelError: one of the engines cannot run the model; nothing was measured.
            InvalidRequestError: an argument is invalid.
            MissingPackageError: pandas is not installed.
        """
        plan = Sweep(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
            requests=requests,
            warm_up=warm_up,
            arrival=arrival,
            cache=cache,
            seed=seed,
            repeats=repeats,
        )
        # Imported here, because the HTTP client takes a tenth of the time in which a server starts.
        from lmx_lab.bench.runner import measure

        return await measure(self.backend, plan, compare=compare, record=record, engines=engines, names=names)

    bench, abench = both(_bench)

    clients, aclients = of_backend(results.clients)
    stop_request, astop_request = of_backend(results.stop_request)

    # Look inside

    explore, aexplore = of_backend(branches.explore)
    timeline, atimeline = of_backend(timeline.timeline)
    hooks, ahooks = of_backend(traces.hooks)
    trace, atrace = of_backend(traces.trace)
    logit_lens, alogit_lens = of_backend(traces.logit_lens)
    attention, aattention = of_backend(traces.attention)
    direct_logit_attribution, adirect_logit_attribution = of_backend(traces.direct_logit_attribution)
    patch, apatch = of_backend(patching.patch)
    steering_vector, asteering_vector = of_backend(probes.steering_vector)
    probe, aprobe = of_backend(probes.probe)

    @property
    def requests(self) -> RequestList:
        """The recorded requests, oldest first: ``lab.requests[-1].replay()``, ``lab.requests.df``."""
        return RequestList(self.server.records, self.backend)

    # Show

    @property
    def workbench(self) -> Workbench:
        """The state that the lab's panels share."""
        if self._workbench is None or self._workbench.backend is not self._shown:
            # The panels of the previous workbench show another lab now.
            return self._use(Workbench(self._shown))
        return self._workbench

    def _take_over(self, workbench: Workbench | None) -> Workbench:
        """Show this lab in the panels of another one, if there are any, and start to record its measurements."""
        workbench = workbench or Workbench(self._shown)
        workbench.follow(self._shown)
        return self._use(workbench)

    def _use(self, workbench: Workbench) -> Workbench:
        self._workbench = workbench
        # Without a reference to the lab, so that a remote connection is also closed when its lab is deleted.
        self._server.when_closed(functools.partial(workbench.suspend_if_shown, self._shown))
        return workbench

    def panel(self, *names: str) -> ipywidgets.DOMWidget:
        """Return the named panels as one widget.

        The panels are ``models``, ``metrics``, ``chat``, ``rerank``, ``lens``, ``timeline`` and ``events``; by default
        all of them except ``lens`` and ``timeline``, and ``events`` only if there is a daemon. Each panel exists once:
        displaying it again shows the same panel in another place.

        Raises:
            InvalidRequestError: there is no panel of this name.
            MissingPackageError: anywidget or ipywidgets is not installed.
        """
        widget = self._layout().compose_panels(self.workbench, names)
        self._server.panels_shown()
        return widget

    def metrics(self) -> MetricsPanel:
        """Return the live measurements; ``.df`` has those of the last 15 minutes as a data frame."""
        return cast("MetricsPanel", self.panel("metrics"))

    def snapshot(self) -> Snapshot:
        """Return the lab at this moment: server, models, measurements, versions, machine."""
        samples = self.workbench.history.samples
        backend = self.workbench.backend
        models = self.workbench.submit(backend.models()).result(30.0)
        return take_snapshot(backend.state(), models, samples[-1] if samples else None)

    def report(self, path: str | os.PathLike[str], *results: object) -> Path:
        """Write one self-contained HTML file: the given results, the snapshot, charts of the last 15 minutes, the
        requests, and the content of the chat and rerank panels.

        Args:
            results: Objects that notebooks display, such as a token lens, an evaluation, a data frame or a figure. A
                text before a result is its title.

        Raises:
            InvalidRequestError: the path cannot be written.
        """
        history = self.workbench.history
        sections = self._layout().report_sections(self.workbench) if self.workbench.panels else []
        text = report_html(self.snapshot(), history.samples, history.requests, sections, results)
        return write_report(path, text)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.status.items())

    def _repr_html_(self) -> str:
        rows = ((name, Html(f"<code>{html.escape(value)}</code>")) for name, value in self.status.items())
        shown = html_table((), rows, row_names=True)
        if code := self.backend.state().phone_code:
            image = f"<img alt='QR code of the LAN address' src='{html.escape(code)}' width='180' height='180'>"
            shown += f"<details><summary>QR code for phones</summary>{image}</details>"
        return shown

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the compact models panel, and the facts for other frontends and for saved notebooks."""
        facts = {"text/plain": repr(self), "text/html": self._repr_html_()}
        try:
            return self._layout().card(self.workbench, facts, **options)
        except MissingPackageError:
            return facts

    def _ipython_display_(self) -> None:
        try:
            self._layout()
        except MissingPackageError:
            raise NotImplementedError from None  # IPython then uses the MIME bundle.
        self.workbench.static_views.show(self._repr_mimebundle_(), self._repr_html_)

    def _show_ranking(self, result: RerankResult) -> None:
        """Display a ranking as a sortable table, in the same widget each time. See ``_layout`` for the errors."""
        layout = self._layout()
        if result.widget is None or result.widget.comm is None:
            result.widget = layout.RerankPanel(self.workbench, result=result.ranking)
        widget, metadata = result.widget._repr_mimebundle_() or ({}, {})
        bundle = {**widget, "text/plain": repr(result), "text/html": result._repr_html_()}
        self.workbench.static_views.show((bundle, metadata))

    def _layout(self) -> types.ModuleType:
        """Return the module that creates the widgets.

        Raises:
            MissingPackageError: anywidget or ipywidgets is not installed.
        """
        with optional_imports("a panel"):
            # Imported here, because widgets are optional, and a server without a notebook does not need them.
            from lmx_lab.panels import layout
        return layout

    # Connect

    @property
    def url(self) -> str:
        """The server's address. If the server runs in this process, it is the address for programs on this machine."""
        return self.backend.url

    @property
    def lan_url(self) -> str | None:
        """The address for other hosts; None if only this machine is served."""
        return next(iter(self.server.addresses.lan_urls), None)

    @property
    def proxy_url(self) -> str | None:
        """The address through the proxy of JupyterHub, Binder, Colab or VS Code; None if there is no such proxy."""
        return self.server.addresses.proxy_url

    @property
    def openai(self) -> dict[str, Any]:
        """Arguments for a chat-format client: ``OpenAI(**lab.openai)``. Requests of this client are recorded."""
        arguments = {"base_url": f"{self.url}/v1", "api_key": self.backend.api_key or "lmx-lab"}
        if self._local is None:
            return arguments
        return {**arguments, "default_headers": self._local.services.inference.recording.own_headers}

    @property
    def server(self) -> LocalServer:
        """The server of this process.

        Raises:
            AttributeError: the server runs in another process.
        """
        if self._local is None:
            raise AttributeError(
                f"the server at {self.url} runs in another process, so this lab has no settings, server or requests"
            )
        return self._local

    @property
    def settings(self) -> Settings:
        return self.server.settings

    @property
    def daemon(self) -> LabDaemon | None:
        """The running daemon of this lab; None if it was not started, was stopped, or the lab is attached."""
        return None if self._local is None else self._local.running_daemon

    def start_daemon(self, *, explicit_port: bool = False, tools: PythonTools | None = None) -> LabDaemon:
        """Start a daemon for this lab, or return the running one. ``launch(daemon=True)`` also does this.

        Args:
            explicit_port: Whether ``settings.daemon_port`` is required; otherwise the next free port is used.
            tools: Python functions of a previous daemon to keep.

        Raises:
            DaemonRunningError: another process runs a daemon in this home; the lab keeps running.
            HostingError: the daemon could not be started; the lab keeps running.
        """
        show = lambda: cast("EventsPanel", self.panel("events"))  # noqa: E731
        return self.server.start_daemon(self.workbench, show, explicit_port=explicit_port, tools=tools)


for _name in sum(NAMES.values(), ()):
    if hasattr(Lab, f"a{_name}"):
        _method = getattr(Lab, _name)
        _method.__doc__ = f"{inspect.cleandoc(_method.__doc__)}\n\n``await lab.a{_name}(...)`` does the same."


def attach(url: str | AsyncLabClient | LabClient, *, api_key: str | None = None) -> Lab:
    """Return a lab for the server at this address, with the methods of a launched lab: ``with attach(url) as lab``.

    Blocking methods work in scripts, in cells and beside running event loops, because the connection has its own loop.
    ``stop()``, or deleting the lab, closes the connection; the server keeps running. ``panel()`` keeps the connection
    open until panels of another connection to the same address are shown.

    Args:
        url: The address that the server prints, or one through a proxy, with or without ``/v1`` or a slash at its end;
            or the name of a lab that is announced on the local network (see ``discover()``); or a client, whose address
            and key the lab uses for its own connection.
        api_key: The server's key, or Jupyter's token if Jupyter is in front of it.

    Raises:
        UnreachableError: no LMX Lab server answers at the address, or none is announced under the name.
        UnauthorizedError: the server needs a key, or another one.
    """
    # Imported here, because a lab of this process needs no HTTP client.
    from lmx_lab.notebook.discovery import find_address, is_name
    from lmx_lab.notebook.remote import RemoteServer

    if not isinstance(url, str):
        from lmx_lab.client import AsyncLabClient, LabClient

        if not isinstance(url, AsyncLabClient | LabClient):
            raise InvalidRequestError(
                f"url is {url!r:.80}; pass an address such as 'http://192.168.1.20:8400', or a client", param="url"
            )
        if api_key is not None:
            raise InvalidRequestError(
                "a client has a key of its own; leave api_key out, or pass an address", param="api_key"
            )
        api_key, url = url.api_key, url.url
    server = RemoteServer(find_address(url) if is_name(url) else url, api_key=api_key)
    lab = Lab.over(server)
    try:
        lab.start()
    except BaseException:
        lab.stop()
        raise
    return lab
