"""The composition root: ``launch()`` builds engine, server and host, wires them, and hands out a ``Lab``.

The server runs on the kernel's own loop or on a thread of its own, in this process either way. Every blocking verb has
an ``a…`` twin; both do the same work on the server's loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import html
import os
import socket
import sys
import types
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import psutil
from pydantic import ValidationError

from lmx_lab import links
from lmx_lab.engine import Engine, GenerationReport, LoadReport
from lmx_lab.errors import HostingError, InvalidRequestError
from lmx_lab.guard import GuardPolicy, local_policy
from lmx_lab.hosting import Host, bind, serve
from lmx_lab.loops import LoopThread, run_nested
from lmx_lab.progress import bar
from lmx_lab.replies import Reply, ReplyStream
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.server.admin import records
from lmx_lab.server.chat import collect
from lmx_lab.server.errors import invalid
from lmx_lab.server.translate import timings, usage
from lmx_lab.settings import PREFIX, Settings
from lmx_lab.weights import Catalog
from lmx_lab.wire.admin import ModelEvent, ModelRecord
from lmx_lab.wire.chat import ChatRequest

T = TypeVar("T")
LoopChoice = Literal["auto", "kernel", "thread"]
LoopMode = Literal["kernel", "thread"]
Prompt = str | Sequence[Mapping[str, Any]]
EVERYWHERE = ("0.0.0.0", "::")
# A module without a file: autoreload leaves it alone, so a re-run cell finds the lab that runs.
_REGISTRY = sys.modules.setdefault("_lmx_lab_registry", types.ModuleType("_lmx_lab_registry"))


def launch(
    model: str | None = None, *, loop: LoopChoice = "auto", lan: bool = False, port: int | None = None, **settings: Any
) -> Lab:
    """Start the inference server in this process, or return the one that runs if the arguments are the same.

    Changed arguments restart it in place. ``model`` is loaded before this returns (downloaded first where needed).
    Also ``await launch()``, ``with launch() as lab`` and ``async with``.

    Args:
        loop: ``kernel`` serves on the running event loop, ``thread`` on one of its own, where a busy cell does not
            delay other clients. ``auto`` is ``kernel`` in a notebook on loopback, else ``thread``.
        lan: listen on all interfaces, so that other hosts reach the server.
        port: exactly this one, 0 for any free one; by default 8400 or the next free one.
        settings: any field of ``Settings``.

    Raises:
        PortTakenError: the explicit port is in use.
        InvalidRequestError: an argument that is no setting, or of the wrong type.
        LabError: the model could not be loaded; the server runs nevertheless, see ``current()``.
    """
    explicit = port is not None or PREFIX + "PORT" in os.environ
    chosen = Settings.read(
        host="0.0.0.0" if lan and "host" not in settings else settings.pop("host", None), port=port, **settings
    )
    lab = _running_with(chosen, loop, explicit=explicit) or _restart(chosen, loop, explicit=explicit)
    if model is not None:
        lab.load(model)
    return lab


def current() -> Lab | None:
    """The lab that ``launch()`` started in this process, if it still runs."""
    lab: Lab | None = getattr(_REGISTRY, "lab", None)
    return lab if lab is not None and lab.running else None


def _running_with(settings: Settings, loop: LoopChoice, *, explicit: bool) -> Lab | None:
    lab = current()
    same = lab is not None and lab.settings == settings and lab.explicit_port == explicit
    return lab if same and lab is not None and lab.mode == choose_loop(loop, settings) else None


def _restart(settings: Settings, loop: LoopChoice, *, explicit: bool) -> Lab:
    """Replace what runs. Another port is bound first, so that a taken one costs nothing."""
    old = current()
    sock = None
    if old is None or settings.port != old.settings.port:
        sock = bind(settings.host, settings.port, explicit=explicit)
    if old is not None:
        old.stop()
    lab = Lab(settings, loop=loop, explicit_port=explicit)
    lab.start(sock)
    _REGISTRY.lab = lab  # type: ignore[attr-defined]
    return lab


def choose_loop(loop: LoopChoice, settings: Settings) -> LoopMode:
    """The loop that ``auto`` means here.

    Raises:
        InvalidRequestError: ``kernel`` where no loop runs.
    """
    try:
        asyncio.get_running_loop()
        running = True
    except RuntimeError:
        running = False
    if loop == "kernel" and not running:
        raise InvalidRequestError("loop='kernel' needs a running event loop, as in a notebook; use loop='thread'")
    if loop == "auto":
        return "kernel" if running and not _is_lan(settings.host) else "thread"
    if loop not in ("kernel", "thread"):
        raise InvalidRequestError(f"loop is {loop!r}; it can be auto, kernel or thread", param="loop")
    return loop


def _is_lan(host: str) -> bool:
    return host not in ("localhost", "::1", "[::1]") and not host.startswith("127.")


def lan_addresses() -> list[str]:
    """This machine's IPv4 addresses on its networks, loopback and link-local left out."""
    found = [a.address for group in psutil.net_if_addrs().values() for a in group if a.family == socket.AF_INET]
    return sorted(a for a in found if not a.startswith(("127.", "169.254.")))


class Lab:
    """A running inference server and the verbs on it. Made by ``launch()``; ``stop()`` ends it."""

    def __init__(self, settings: Settings, *, loop: LoopChoice = "auto", explicit_port: bool = True) -> None:
        self.settings = settings
        self.mode = choose_loop(loop, settings)
        self.explicit_port = explicit_port
        self.catalog = Catalog(settings)
        self.engine = Engine(settings)
        self.port = settings.port
        self._server: InferenceServer = create_server(
            engine=self.engine, catalog=self.catalog, settings=settings, policy=lambda: self._policy
        )
        self._thread: LoopThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[Host] | None = None
        self._host: Host | None = None
        self._stopped = False

    # Lifetime

    def start(self, sock: socket.socket | None = None) -> None:
        """Bind, start the engine, begin to serve. On the kernel's loop, requests are answered once the cell ends or
        awaits; until then they wait in the socket.

        Raises:
            HostingError, PortTakenError: nothing was left behind.
        """
        sock = sock or bind(self.settings.host, self.settings.port, explicit=self.explicit_port)
        self.port = sock.getsockname()[1]
        atexit.register(self._stop_at_exit)
        try:
            self.engine.start()
            if self.mode == "thread":
                self._thread = LoopThread()
                self._thread.start()
                self._loop = self._thread.loop
                self._host = self._thread.run(self._serve(sock))
            else:
                self._loop = asyncio.get_running_loop()
                self._serving = self._loop.create_task(self._serve(sock), name="lmx-lab start")
        except BaseException:
            sock.close()
            self._stop_at_exit()
            raise

    async def _serve(self, sock: socket.socket) -> Host:
        self._host = await serve(self._server.asgi, sock, ws_max_bytes=self.settings.max_body_bytes)
        return self._host

    @property
    def running(self) -> bool:
        """Whether the server accepts requests, or will as soon as its loop gets to run."""
        starting = self._serving is not None and not self._serving.done()
        return not self._stopped and (starting or (self._host is not None and self._host.running))

    def stop(self) -> None:
        """Stop serving, unload, free the port. Running requests have 3 s to end. Idempotent."""
        if not self._stopped:
            self._block(self._stop())
            self._close()

    async def astop(self) -> None:
        if not self._stopped:
            await self._hand_over(self._stop())
            await asyncio.to_thread(self._close)

    async def _stop(self) -> None:
        if self._serving is not None:
            await asyncio.wait({self._serving})
        if self._host is not None:
            await self._host.stop()
        self._server.feed.close()

    def _close(self) -> None:
        self._stopped = True
        self.engine.stop()
        if self._thread is not None:
            self._thread.stop()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        if self._host is not None:
            self._host.stop_at_exit()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ready().__await__()

    async def __aenter__(self) -> Self:
        return await self._ready()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.astop()

    async def _ready(self) -> Self:
        """Wait until requests are accepted; a start that failed raises here."""
        if self._serving is not None:
            await asyncio.shield(self._serving)
        return self

    # Addresses

    @cached_property
    def _policy(self) -> GuardPolicy:
        names = [socket.gethostname().lower(), f"{socket.gethostname().lower()}.local", *lan_addresses()]
        reachable = names if self.settings.host in EVERYWHERE else [self.settings.host]
        hosts = [f"{links.bracketed(name)}:{self.port}" for name in reachable]
        return local_policy(
            self.port,
            hosts=[*hosts, *self.settings.allowed_hosts],
            origins=self.settings.cors_origins,
            key=self.settings.api_key,
        )

    @property
    def url(self) -> str:
        """The address for programs on this machine."""
        return links.local_url(self.settings.host, self.port)

    @property
    def lan_url(self) -> str | None:
        """The address for other hosts; None when only this machine is served."""
        if not _is_lan(self.settings.host):
            return None
        addresses = lan_addresses() if self.settings.host in EVERYWHERE else [self.settings.host]
        return next(iter(links.lan_urls(addresses, self.port)), None)

    @property
    def proxy_url(self) -> str | None:
        """The address through the notebook's web front (Hub, Binder, Colab, VS Code); None where there is none."""
        return links.proxy_url(self.port, os.environ)

    @property
    def openai(self) -> dict[str, str]:
        """Arguments for a chat-format client: ``OpenAI(**lab.openai)``.

        On the kernel's loop call it from another process or through ``asyncio.to_thread``: a cell that waits for its
        own kernel's server waits for ever.
        """
        return {"base_url": f"{self.url}/v1", "api_key": self.settings.api_key or "lmx-lab"}

    # Models

    def load(self, model: str) -> LoadReport:
        """Load a model by id (fetched first where needed) or path, in the place of what is loaded; shows progress.

        Raises:
            LabError: why not, and what is loaded now.
        """
        return self._block(self._load(model))

    async def aload(self, model: str) -> LoadReport:
        return await self._hand_over(self._load(model))

    async def _load(self, model: str) -> LoadReport:
        async with _shown(model, self._server):
            return await self._server.loader.load(model, local=True)

    def unload(self) -> float:
        """Unload the model; returns the GB (10^9 bytes) that this freed."""
        return self._block(self._server.loader.unload()) / 1e9

    async def aunload(self) -> float:
        return await self._hand_over(self._server.loader.unload()) / 1e9

    def models(self) -> ModelList:
        """What is on disk, and which of it is loaded."""
        return ModelList(records(self.catalog.scan(), self.engine.snapshot))

    async def amodels(self) -> ModelList:
        return await asyncio.to_thread(self.models)

    # Chat

    def chat(self, prompt: Prompt, *, stream: bool = False, **parameters: Any) -> Reply | ReplyStream:
        """Ask the loaded model; ``prompt`` is a text or a list of messages.

        With ``stream=True`` iterate the result for text as it comes. Interrupting the kernel ends the generation.

        Args:
            parameters: of the chat format: ``temperature``, ``top_p``, ``max_tokens``, ``stop``; also ``system``.

        Raises:
            NotLoadedError: load a model first.
            InvalidRequestError: a parameter that does not exist or is out of range.
        """
        request = _chat_request(prompt, parameters)
        if stream:
            return self._block(self._stream(request))
        return self._block(self._chat(request))

    async def achat(self, prompt: Prompt, **parameters: Any) -> Reply:
        return await self._hand_over(self._chat(_chat_request(prompt, parameters)))

    async def astream(self, prompt: Prompt, **parameters: Any) -> ReplyStream:
        """``async for piece in await lab.astream("…")``."""
        return await self._hand_over(self._stream(_chat_request(prompt, parameters)))

    async def _chat(self, request: ChatRequest) -> Reply:
        _, stream = await self._server.chat.start(request)
        text = await collect(stream)
        return self._reply(text, self._server.chat.ended(stream.report, None))

    async def _stream(self, request: ChatRequest) -> ReplyStream:
        _, stream = await self._server.chat.start(request)
        return ReplyStream(stream, self._reply, self._block, self._hand_over)

    def _reply(self, text: str, report: GenerationReport) -> Reply:
        return Reply(
            text=text,
            model=report.model,
            finish_reason=report.finish_reason,
            usage=usage(report),
            timings=timings(report),
            report=report,
        )

    # The way to the server's loop

    def _block(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work where the server runs, and wait. An interrupt cancels it."""
        if self._thread is not None:
            return self._thread.run(work)
        if self._loop is None or self._stopped:
            work.close()
            raise HostingError("this lab is not running; launch() starts one")
        return run_nested(self._loop, work)

    async def _hand_over(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is not None:
            return await asyncio.wrap_future(self._thread.submit(work))
        return await work

    # Looks

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._facts().items())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'><code>{html.escape(value)}</code></td></tr>"
            for name, value in self._facts().items()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        now = self.engine.snapshot
        model = f"{now.model} ({now.model_memory_bytes / 1e9:.2f} GB)" if now.model else "none loaded"
        facts = {
            "LMX Lab": f"{'running' if self.running else 'stopped'} on {self._place()}",
            "address": self.url,
            "LAN address": self.lan_url or "",
            "browser address": self.proxy_url or "",
            "model": model,
        }
        return {name: value for name, value in facts.items() if value}

    def _place(self) -> str:
        return "the kernel's loop" if self.mode == "kernel" else "a thread of its own"


class ModelList(list[ModelRecord]):
    """Model records, shown as a table in a notebook."""

    def _repr_html_(self) -> str:
        names = ["id", "loaded", "kind", "format", "quantization", "size_gb", "context_length"]
        head = "".join(f"<th>{name}</th>" for name in names)
        rows = "".join(
            f"<tr>{''.join(f'<td>{_cell(getattr(record, name))}</td>' for name in names)}</tr>" for record in self
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return html.escape(f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value))


def _chat_request(prompt: Prompt, parameters: dict[str, Any]) -> ChatRequest:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if (system := parameters.pop("system", None)) is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        return ChatRequest.model_validate({"model": "default", "messages": messages, **parameters})
    except ValidationError as exc:
        raise invalid(exc) from exc


@contextlib.asynccontextmanager
async def _shown(model: str, server: InferenceServer) -> AsyncIterator[None]:
    """A progress bar that follows the loads of this server."""
    with bar(model) as shown, server.feed.subscribe() as events:

        async def follow() -> None:
            async for event in events:
                if isinstance(event, ModelEvent) and event.total_bytes:
                    shown.update(event)

        task = asyncio.create_task(follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
