"""Define ``Lab``: the methods that use and display an inference server, in this process or another.

Every method that uses the server is written once, as a coroutine function, from which ``lmx_lab.blocking.both``
derives a blocking and an awaitable method. Importing this module imports neither the engine nor the server, nor the
widgets, which are optional.
"""

from __future__ import annotations

import functools
import html
import os
import socket
import types
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from lmx_lab.backend import Backend, LabAccess
from lmx_lab.bench.case import Arrival, Cache, Closed, Sweep
from lmx_lab.blocking import Portal, awaited, both, on_loop, run_steps
from lmx_lab.errors import MissingPackageError
from lmx_lab.extras import optional_imports
from lmx_lab.instrument.branches import AnswerTree, explore
from lmx_lab.instrument.requests import RequestList
from lmx_lab.instrument.verbs import InstrumentVerbs
from lmx_lab.notebook.arguments import (
    Documents,
    Prompt,
    Texts,
    chat_request,
    embeddings_body,
    model_name,
    rerank_body,
)
from lmx_lab.notebook.evaluate import EvaluateVerbs
from lmx_lab.notebook.lab_server import LabServer
from lmx_lab.notebook.load_progress import show_load, show_unload
from lmx_lab.notebook.map import MapVerbs
from lmx_lab.notebook.probing import ProbeVerbs
from lmx_lab.notebook.reply import ModelList, Reply, ReplyStream, json_shape, read_reply
from lmx_lab.notebook.report import Snapshot, report_html, take_snapshot, write_report
from lmx_lab.notebook.rerank_result import RerankResult
from lmx_lab.notebook.search import SearchVerbs
from lmx_lab.notebook.tracing import TraceVerbs
from lmx_lab.panels.workbench import Workbench
from lmx_lab.results.tables import Html, html_table
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadOptions, LoadReport, LoadSpec
from lmx_lab.values.outputs import InputType, Vectors

if TYPE_CHECKING:
    import ipywidgets
    import pandas as pd

    from lmx_lab.bench.runner import Measured
    from lmx_lab.daemon.tools.python_tools import PythonTools
    from lmx_lab.engine import ModelManager
    from lmx_lab.notebook.daemon import LabDaemon
    from lmx_lab.notebook.local import LocalServer, LoopChoice, LoopMode
    from lmx_lab.panels.events import EventsPanel
    from lmx_lab.panels.metrics import MetricsPanel
    from lmx_lab.weights import Catalog

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""Default token counts of ``bench``; llama-bench has the same defaults."""
CLOSED = Closed()
MODELS_TIMEOUT_S = 30.0
"""Maximum time to list the models for a snapshot."""


class Lab(
    MapVerbs,
    EvaluateVerbs,
    SearchVerbs,
    ProbeVerbs,
    TraceVerbs,
    InstrumentVerbs,
):
    """An inference server, in this process or another one, with methods to load models and to send requests.

    ``launch()`` and ``attach()`` return a lab, and ``stop()`` ends it. Every blocking method that uses the server has
    an awaitable form, whose name begins with ``a``: ``chat`` and ``achat``. Programs with their own event loop
    use the class directly: ``async with Lab(settings) as lab``. Some properties (``settings``, ``engine``, ``lan_url``,
    ``daemon`` and so on) exist only if the server runs in this process.
    """

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
        self._set(server, LocalBackend(server))

    @classmethod
    def over(cls, server: LabServer, backend: Backend) -> Lab:
        """Return a lab for a server in another process."""
        lab = cls.__new__(cls)
        lab._local = None
        lab._set(server, backend)
        return lab

    def _set(self, server: LabServer, backend: Backend) -> None:
        self._server = server
        self._backend = backend

    @property
    def _portal(self) -> Portal:
        return self._server.portal

    @property
    def _access(self) -> LabAccess:
        return LabAccess(self._backend, self._portal)

    # Lifetime

    async def _start(self, sock: socket.socket | None = None) -> None:
        """Start the server, or connect to it, and return when it accepts requests. Does nothing if it was started.

        Args:
            sock: A listening socket for a server of this process, instead of a new one.

        Raises:
            HostingError, PortTakenError: the server could not start; all that had been started was stopped.
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

    async def wait(self) -> None:
        """Wait until the server has ended for any reason. Can be awaited on any loop."""
        await self.server.wait()

    # Models

    async def _load(self, model: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> LoadReport:
        """Load a model by its id or path in place of the loaded one, and show the progress.

        A model that is not on disk is downloaded if the server runs in this process. A path is a path on the server's
        machine. Interrupting this call cancels the load, and the previous model is loaded again.

        Args:
            options: ``LoadOptions``: ``engine="mlx"``, the engine that must run the model; ``wait``, whether running
                answers of the loaded model may finish, as in ``unload``.

        Raises:
            AdminForbiddenError: the server allows this only to callers on its machine.
            LabError: the load has failed; the message contains the reason, and the model that is now loaded.
        """
        return await show_load(self._portal, self._backend, LoadSpec.with_options(model_name(model), options))

    load, aload = both(_load)

    async def _pin_encoders(self) -> None:
        """Load the models that the settings ``embedder`` and ``reranker`` name, and keep them in memory.

        ``launch()``, ``with`` and ``async with`` do this. Models that are in memory already are not loaded again.

        Raises:
            LabError: one of them could not be loaded; the server still runs.
        """
        for spec in self._server.unpinned():
            await show_load(self._portal, self._backend, spec)

    pin_encoders, apin_encoders = both(_pin_encoders)

    async def _unload(self, model: str | os.PathLike[str] | None = None, *, wait: bool | None = None) -> float:
        """Unload the model, and show how many running answers are left; returns the freed memory in GB (10^9 bytes).

        Interrupting this call does not cancel the unload. Another call joins it, and can change ``wait``. While a model
        is being loaded, its load is cancelled instead, and the previous model is loaded again; but with the name of the
        previous model, ``wait`` changes only how long the load waits for the answers of that model.

        Args:
            model: The loaded model, or the one whose load is cancelled; None for any.
            wait: Whether running answers may finish: True without a time limit, False not at all, None within the
                setting ``drain_s``, 30 s by default. Answers that have not ended by then raise ``NotLoadedError``.

        Raises:
            InvalidRequestError: the model of this name is pinned, or not loaded.
            ModelBusyError: a model is being loaded in place of the named one.
        """
        name = None if model is None else model_name(model)
        return await show_unload(self._portal, self._backend, name, wait=wait)

    unload, aunload = both(_unload)

    async def _models(self) -> ModelList:
        """List the models on the server's disk, and which of them are loaded."""
        return ModelList.of(await on_loop(self._portal, self._backend.models()))

    models, amodels = both(_models)

    # Chat

    async def _chat(self, /, prompt: Prompt, **parameters: Any) -> Reply:
        """Ask the loaded model, and return the complete reply. The parameters are those of ``chat``."""
        shape = json_shape(parameters.get("response_format"))
        return await on_loop(
            self._portal, read_reply(self._backend, chat_request(prompt, parameters), shape, lab=self._access)
        )

    async def _stream(self, /, prompt: Prompt, **parameters: Any) -> ReplyStream:
        """Stream a reply: ``async for piece in await lab.astream("…")``. The parameters are those of ``chat``."""
        stream = await on_loop(self._portal, self._backend.generate(chat_request(prompt, parameters)))
        return ReplyStream(stream, self._access, json_shape(parameters.get("response_format")))

    achat = awaited(_chat)
    astream = awaited(_stream)

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
                ``ignore_eos``, ``tools``, ``tool_choice``, ``reasoning_effort``, ``logprobs``, which may be the number
                of alternatives, ``logprob_tokens``, tokens to report whatever their rank, ``steer``, a list of
                ``Steer``, and ``response_format``, which may be the class of a pydantic model. ``n`` is not supported,
                because a reply has one text.

        Raises:
            NotLoadedError: no model is loaded.
            InvalidRequestError: a parameter does not exist or is out of range.
        """
        if stream:
            return run_steps(self._stream(prompt, **parameters))
        return run_steps(self._chat(prompt, **parameters))

    async def _explore(
        self, /, prompt: Prompt, *, width: int = 3, depth: int = 2, max_tokens: int = 64, **parameters: Any
    ) -> AnswerTree:
        """Generate the answers that begin with the most probable tokens, all together, and return them as a tree.

        At each of the first ``depth`` positions, the ``width`` most probable tokens are taken, which makes up to
        ``width ** depth`` answers. They are recorded.

        Args:
            width: Number of tokens at each position, up to 20.
            depth: Number of positions; there may be up to 64 answers.
            max_tokens: Maximum length of each answer.
            parameters: Other parameters of ``chat``.

        Raises:
            NotLoadedError: no model is loaded.
            InvalidRequestError: a parameter does not exist or is out of range, or the server runs in another process.
        """
        request = chat_request(prompt, parameters)
        return await on_loop(
            self._portal,
            explore(self._backend, request, self._access, width=width, depth=depth, max_tokens=max_tokens),
        )

    explore, aexplore = both(_explore)

    # Vectors and scores

    async def _embed(
        self,
        texts: Texts,
        *,
        model: str | os.PathLike[str] | None = None,
        dimensions: int | None = None,
        input_type: InputType | None = None,
        truncate: bool = False,
    ) -> Vectors:
        """Return the vectors of texts in float32: a matrix with one row for each text, or one vector for a single text.

        Args:
            model: An embedding model in memory; by default the pinned one, otherwise the loaded one.
            dimensions: Keep this number of leading components, and normalize again.
            input_type: Selects the prompt in the model's files that precedes each text; many models have no prompts.
            truncate: Cut texts that are too long for the model, instead of refusing them.

        Raises:
            NotLoadedError: no embedding model is loaded.
            ContextLengthError: a text is too long.
        """
        body = embeddings_body(texts, model=model, dimensions=dimensions, input_type=input_type, truncate=truncate)
        return await on_loop(self._portal, self._backend.embed(body))

    embed, aembed = both(_embed)

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
        ranking = await on_loop(self._portal, self._backend.rerank(body))
        return RerankResult(ranking, show=self._show_ranking)

    rerank, arerank = both(_rerank)

    # Speed

    async def _bench(
        self,
        *,
        prompt_tokens: int | Sequence[int] = PROMPT_TOKENS,
        output_tokens: int | Sequence[int] = OUTPUT_TOKENS,
        concurrency: int | Sequence[int] = 1,
        requests: int | None = None,
        warm_up: int = 1,
        arrival: Arrival | Sequence[Arrival] = CLOSED,
        cache: Cache | Sequence[Cache] = "cold",
        seed: int | Sequence[int] = 0,
        repeats: int = 1,
        compare: Measured | Sequence[Measured] = (),
        record: bool | Path | str = True,
    ) -> pd.DataFrame:
        """Measure the loaded model over HTTP, and return a table with one row for each request, failed ones included.

        ``lmx_lab.bench.summary`` computes medians with intervals from the table, ``lmx_lab.bench.by_concurrency`` plots
        it. The table also has the server's own measurements: ``queue_ms``, ``server_ttft_ms`` and so on.

        Interrupting ``bench`` stops running requests and returns the rows so far, with ``.attrs["interrupted"]`` true.
        Cancelling ``abench`` stops running requests; the rows of a recorded run can be loaded.

        Args:
            prompt_tokens, output_tokens, concurrency, requests, warm_up, arrival, cache, seed, repeats: The fields of
                ``lmx_lab.bench.Sweep``.
            compare: Addresses of other chat-format servers, or targets of ``lmx_lab.bench``, which are measured in
                turns with this lab.
            record: Whether to store the run, in ``bench`` in the lab's home, or a folder for it; ``.attrs["path"]`` is
                its file.

        Raises:
            NotLoadedError: no model is loaded.
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
        from lmx_lab.notebook.bench import measure

        return await measure(self._server, plan, compare=compare, record=record, workbench=self.workbench)

    bench, abench = both(_bench)

    # Addresses

    @property
    def url(self) -> str:
        """The server's address. If the server runs in this process, it is the address for programs on this machine."""
        return self._server.url

    @property
    def openai(self) -> dict[str, Any]:
        """Arguments for a chat-format client: ``OpenAI(**lab.openai)``. Requests of this client are recorded."""
        arguments = {"base_url": f"{self.url}/v1", "api_key": self._server.api_key or "lmx-lab"}
        if self._local is None:
            return arguments
        return {**arguments, "default_headers": self._local.services.inference.recording.own_headers}

    # Display

    @property
    def workbench(self) -> Workbench:
        """The state that the lab's panels share."""
        if self._workbench is None or self._workbench.backend is not self._backend:
            # The panels of the previous workbench show another lab now.
            return self._use(Workbench(self._backend))
        return self._workbench

    def take_over(self, workbench: Workbench | None) -> Workbench:
        """Show this lab in the panels of another one, if there are any, and start to record its measurements."""
        workbench = workbench or Workbench(self._backend)
        workbench.follow(self._backend)
        return self._use(workbench)

    def _use(self, workbench: Workbench) -> Workbench:
        self._workbench = workbench
        # Without a reference to the lab, so that a remote connection is also closed when its lab is deleted.
        self._server.when_closed(functools.partial(workbench.suspend_if_shown, self._backend))
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
        models = self.workbench.submit(self._backend.models()).result(MODELS_TIMEOUT_S)
        return take_snapshot(self._backend.state(), models, samples[-1] if samples else None)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML file: the snapshot, charts of the last 15 minutes, the requests, and the
        content of the chat and rerank panels.

        Raises:
            InvalidRequestError: the path cannot be written.
        """
        history = self.workbench.history
        sections = self._layout().report_sections(self.workbench) if self.workbench.panels else []
        text = report_html(self.snapshot(), history.samples, history.requests, sections)
        return write_report(path, text)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._server.facts().items())

    def _repr_html_(self) -> str:
        shown = facts_html(self._server.facts())
        if code := self._backend.state().phone_code:
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

    # A server in this process

    @property
    def server(self) -> LocalServer:
        """The server of this process.

        Raises:
            AttributeError: the server runs in another process.
        """
        if self._local is None:
            raise AttributeError(
                f"the server at {self.url} runs in another process, so this lab has no settings, engine or requests"
            )
        return self._local

    @property
    def settings(self) -> Settings:
        return self.server.settings

    @property
    def mode(self) -> LoopMode:
        """``kernel`` if the kernel's event loop runs the server while it is free, ``thread`` if only a thread does."""
        return self.server.mode

    @property
    def engine(self) -> ModelManager:
        return self.server.engine

    @property
    def catalog(self) -> Catalog:
        """The models on this disk."""
        return self.server.catalog

    @property
    def port(self) -> int:
        return self.server.addresses.port

    @property
    def lan_url(self) -> str | None:
        """The address for other hosts; None if only this machine is served."""
        return next(iter(self.lan_urls), None)

    @property
    def lan_urls(self) -> list[str]:
        """All addresses for other hosts, the most likely one first."""
        return self.server.addresses.lan_urls

    @property
    def proxy_url(self) -> str | None:
        """The address through the proxy of JupyterHub, Binder, Colab or VS Code; None if there is no such proxy."""
        return self.server.addresses.proxy_url

    @property
    def proxy_path(self) -> str | None:
        """The path of this server on pages of the notebook's Jupyter server; None without jupyter-server-proxy."""
        return self.server.addresses.proxy_path

    @property
    def requests(self) -> RequestList:
        """The recorded requests, oldest first: ``lab.requests[-1].replay()``, ``lab.requests.df``."""
        return RequestList(self.server.recorder.store, self._access)

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


def facts_html(facts: Mapping[str, str]) -> str:
    """Return the lines that describe a lab as a table in HTML."""
    rows = ((name, Html(f"<code>{html.escape(value)}</code>")) for name, value in facts.items())
    return html_table((), rows, row_names=True)
