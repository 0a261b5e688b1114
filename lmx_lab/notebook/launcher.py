"""Launch labs: start a lab, return the running one, or replace it if the arguments have changed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Unpack

from lmx_lab.arguments import model_name
from lmx_lab.blocking import Portal, in_thread, on_loop, run_steps
from lmx_lab.engine import ModelManager
from lmx_lab.engine.lookup import NONE_LOADED
from lmx_lab.errors import ArgumentError, DaemonRunningError, HostingError, InvalidRequestError, LabError
from lmx_lab.http.uvicorn_server import REQUEST_LOGGERS, bind
from lmx_lab.notebook.addresses import Addresses, is_lan
from lmx_lab.notebook.lab import Lab
from lmx_lab.notebook.loading import show_check, show_load
from lmx_lab.notebook.local import REQUESTS_S, LocalBackend, LoopChoice, choose_loop
from lmx_lab.portal import BACKGROUND
from lmx_lab.sanitize import print_warnings
from lmx_lab.settings import PREFIX, Settings
from lmx_lab.values.models import EngineChoice, LoadOptions, LoadSpec, ModelEntry
from lmx_lab.values.plan import LoadPlan
from lmx_lab.wire.admin import load_spec

if TYPE_CHECKING:
    from lmx_lab.notebook.daemon import LabDaemon


# A module without a file, which autoreload does not reload, so that a cell that is run again finds the lab.
_REGISTRY: Any = sys.modules.setdefault("_lmx_lab_registry", types.ModuleType("_lmx_lab_registry"))
for _name, _value in (("lab", None), ("workbench", None), ("lock", threading.RLock()), ("starting", False)):
    vars(_REGISTRY).setdefault(_name, _value)


def launch(
    model: str | os.PathLike[str] | None = None,
    *,
    engine: EngineChoice = "auto",
    loop: LoopChoice = "auto",
    lan: bool = False,
    port: int | None = None,
    daemon: bool = False,
    **settings: Any,
) -> Lab:
    """Start an inference server in this process, or return the running one if the arguments are the same.

    Changed arguments restart the server, on the same port unless ``port`` is another one, and without a model unless
    ``model`` is given. Settings, ports, and the files and sizes of the models are checked first, while the running lab
    answers: an error or an interrupt leaves it as it is. Then its models are unloaded. If the load of a new one fails,
    the running lab loads its models again. ``await``, ``with`` and ``async with`` can be used on the result.

    Args:
        model: Id or path of a model to load before this returns. It is downloaded if necessary.
        engine: Engine that must run ``model``; ``auto`` is the fastest one.
        loop: ``kernel`` serves in the thread of the running event loop while that loop is free, and in another thread
            while a cell blocks it; ``thread`` always serves in another thread. ``auto`` is ``kernel`` in a notebook.
        lan: Whether to listen on all interfaces, so that other hosts can reach the server.
        port: The exact port, or 0 for any free port; by default 8400 or the next free port.
        daemon: Whether to also start a daemon, ``lab.daemon``, which uses this server. A running daemon is kept. If
            changed arguments restart the server, the daemon restarts with its sessions and its Python functions.
        settings: Any field of ``Settings``.

    Raises:
        InvalidRequestError: an argument is not a setting, or has a wrong type or value.
        PortTakenError, DaemonRunningError: the given port is in use, or another process runs a daemon in this home.
        HostingError: the server could not start; all parts that had started were stopped.
        LabError: a model could not be loaded. Without a running lab, errors of models and of the daemon leave the new
            server running; see ``current()``.
    """
    # In a notebook the metrics panel shows warnings about requests of other programs, not the output of a cell.
    print_warnings(without=REQUEST_LOGGERS if "ipykernel" in sys.modules else ())
    stages = LaunchStages()
    chosen = _read_settings(lan, port, settings)
    explicit = _is_set("PORT", port)
    explicit_daemon_port = _is_set("DAEMON_PORT", settings.get("daemon_port"))
    spec = None if model is None else load_spec(model_name(model), {"engine": engine})
    with exclusive_launch():
        lab = before = current()
        if lab is None or not _fits(lab, chosen, loop, explicit=explicit):
            if before is not None and daemon:
                # Imported here, because MCP takes half a second to import.
                from lmx_lab.daemon.daemon import check_daemon

                check_daemon(chosen, explicit_port=explicit_daemon_port, replaced=before.daemon)
            lab = _replace(chosen, loop, spec, explicit=explicit, stages=stages)
    stages.end("the server")
    lab.pin_encoders()
    stages.end("the embedder and the reranker")
    if spec is not None:
        lab.load(spec.model, **spec.options)
        stages.end(spec.model)
    if daemon:
        # Last, because turns that were interrupted by the daemon's last stop start immediately, and need the model.
        tools = before.server.daemon_tools if before is not None else None
        with exclusive_launch():
            try:
                lab.start_daemon(explicit_port=explicit_daemon_port, tools=tools)
            except DaemonRunningError as exc:
                raise DaemonRunningError(f"{exc.message}. The lab itself is running at {lab.url}") from None
        stages.end("the daemon")
    stages.show_if_slow()
    return lab


class LaunchStages:
    """The duration of each stage of a launch.

    Args:
        slow_s: A launch that takes longer shows the duration of its stages.
        shown_s: A stage that takes at least this time is shown.
    """

    def __init__(self, *, slow_s: float = 3.0, shown_s: float = 0.1) -> None:
        self._slow_s, self._shown_s = slow_s, shown_s
        self._ended_at = time.monotonic()
        self._durations: list[tuple[str, float]] = []

    def end(self, name: str) -> None:
        """Record the end of a stage. A stage begins when the previous one ends."""
        began_at, self._ended_at = self._ended_at, time.monotonic()
        self._durations.append((name, self._ended_at - began_at))

    def show_if_slow(self) -> None:
        """Show the duration of the stages if the launch took longer than ``slow_s``, in a notebook or on a terminal."""
        if (total := sum(seconds for _, seconds in self._durations)) > self._slow_s:
            parts = [f"{name} {seconds:.1f} s" for name, seconds in self._durations if seconds >= self._shown_s]
            text = f"The launch took {total:.1f} s: {', '.join(parts)}."
            ipython: Any = sys.modules.get("IPython")
            if ipython is not None and ipython.get_ipython() is not None:
                ipython.display.display({"text/plain": text}, raw=True)
            elif sys.stderr is not None and sys.stderr.isatty():
                print(text, file=sys.stderr)


def _read_settings(lan: bool, port: int | None, settings: Mapping[str, Any]) -> Settings:
    names = [*inspect.signature(launch).parameters][:-1] + [each.name for each in fields(Settings)]
    if unknown := settings.keys() - set(names):
        raise ArgumentError.unknown("launch", min(unknown), names)
    on_lan = {"host": "0.0.0.0"} if lan is True else {}
    chosen = Settings.read(port=port, **{**on_lan, **settings})
    if lan not in (True, False) or (lan and not is_lan(chosen.host)):
        raise InvalidRequestError(
            f"lan is {lan!r} and host is {chosen.host!r}, which contradict each other; omit one of them", param="lan"
        )
    return chosen


@contextlib.contextmanager
def exclusive_launch(limit_s: float = 10.0) -> Iterator[None]:
    """Allow one launch at a time. The waiting time is limited, because the running launch may need the event loop on
    which the next launch waits.

    Raises:
        HostingError: another launch runs on this loop, or did not end within ``limit_s``.
    """
    if not _REGISTRY.lock.acquire(timeout=limit_s):
        raise HostingError("another launch() is running; wait for its end, then call launch() again")
    try:
        if _REGISTRY.starting:
            # The lock is reentrant, and a nested loop can run the code of other cells in the thread that holds it.
            raise HostingError("another launch() is running on this loop; wait for its end, then call launch() again")
        _REGISTRY.starting = True
        try:
            yield
        finally:
            _REGISTRY.starting = False
    finally:
        _REGISTRY.lock.release()


def current() -> Lab | None:
    """Return the running lab that ``launch()`` has started in this process; None if there is none."""
    lab: Lab | None = _REGISTRY.lab
    return lab if lab is not None and lab.running else None


def plan(model: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> LoadPlan:
    """Return what a load of a model would use in memory, and whether it fits now, after models in memory were unloaded,
    or not on this machine. The lab that ``launch()`` has started answers, with its models and settings; without one,
    no models are in memory. Only headers of files are read, those of a model that is not on disk from the hub.

    Args:
        options: ``LoadOptions``, such as ``context_length=8192``.

    Raises:
        LabError: there is no such model, or it cannot be loaded with these options; the message contains the reason.
    """
    if (lab := current()) is not None:
        return lab.plan(model, **options)
    spec = load_spec(model_name(model), options)
    return Portal(lambda: BACKGROUND.thread).run(ModelManager(Settings.read()).plan(spec))


def _is_set(name: str, value: object) -> bool:
    """Return whether a setting was given, as an argument or in the environment, so that no other value may be used."""
    return value is not None or bool(os.environ.get(PREFIX + name))


def _fits(lab: Lab, settings: Settings, loop: LoopChoice, *, explicit: bool) -> bool:
    """Return whether a launch with these arguments would result in the same lab."""
    given, before = (settings.port, explicit), (lab.settings.port, lab.server.explicit_port)
    same_port = not explicit or given == before or settings.port == lab.server.port
    same_settings = replace(settings, port=0) == replace(lab.settings, port=0)
    return same_port and same_settings and (loop == lab.server.loop_choice or choose_loop(loop) == lab.server.mode)


def _replace(
    settings: Settings, loop: LoopChoice, spec: LoadSpec | None, *, explicit: bool, stages: LaunchStages
) -> Lab:
    """Start a new lab in place of the old one, which is stopped only when the new one has its port and its models.

    Args:
        spec: The model that the new lab loads; None if it loads none.
    """
    old: Lab | None = _REGISTRY.lab
    lab = Lab(settings, loop=loop, explicit_port=explicit)
    sock: socket.socket | None = None
    try:
        if old is not None and current() is None:
            # The old lab was stopped, or its event loop has ended; in that case its engine still has to be stopped.
            _stop(old)
            old = None
        sock = _reserve_port(settings, old, explicit=explicit)
        if old is not None:
            specs = [*lab.server.engine.unpinned(), *([spec] if spec is not None else [])]
            run_steps(_move_models(old, lab, specs, stages))
    except BaseException:
        if sock is not None:
            sock.close()
        lab.stop()
        raise
    try:
        if old is not None:
            _stop(old)
    finally:
        # Also after an interrupted stop, because the old lab has ended in this case, too.
        try:
            if sock is None:
                assert old is not None
                sock = bind(settings.host, old.server.port, explicit=explicit and settings.port != 0)
            lab.start(sock)
        except BaseException as exc:
            lab.stop()
            if old is None or not isinstance(exc, HostingError):
                raise
            raise type(exc)(
                f"{exc.message}; the lab at {old.url} has ended, call launch() again", param=exc.param
            ) from exc
        _REGISTRY.lab = lab
        # The existing panels of the notebook show the new lab.
        _REGISTRY.workbench = lab._take_over(_REGISTRY.workbench)
    return lab


def _reserve_port(settings: Settings, old: Lab | None, *, explicit: bool) -> socket.socket | None:
    """Return a listening socket for a new lab; None if it takes over the port of the old lab."""
    if old is None or (explicit and settings.port not in (0, old.server.port)):
        return bind(settings.host, settings.port, explicit=explicit)
    bind(settings.host, 0, explicit=True).close()
    if explicit and settings.port != 0 and not is_lan(old.settings.host):
        # Another program may have this port on an address at which the old lab does not listen.
        for address in Addresses(settings=settings, port=settings.port).lan_names:
            bind(address, settings.port, explicit=True).close()
    return None


async def _move_models(old: Lab, lab: Lab, specs: Sequence[LoadSpec], stages: LaunchStages) -> None:
    """Check the models of a new lab while the old one answers, then load them in place of its models. The
    steps run on the loop of the old lab, which continues meanwhile.
    """
    portal, backend, entries = old.server.portal, LocalBackend(lab.server), list[ModelEntry]()
    for spec in specs:
        entries.append(await show_check(portal, backend, spec, beside=entries))
    stages.end("the checks")
    if not specs:
        return
    daemon = old.daemon
    try:
        if daemon is not None:
            # First, because its turns send requests to the old lab.
            await on_loop(portal, asyncio.to_thread(daemon.stop))
        await on_loop(portal, old.server.engine.make_room(entries[-1].id, limit_s=REQUESTS_S))
        stages.end("the end of running answers")
        for spec in specs:
            await show_load(portal, backend, spec)
            stages.end(spec.model)
    except LabError as exc:
        kept = await _take_back(old, daemon)
        raise type(exc)(f"{exc.message.removesuffix(NONE_LOADED)}; {kept}", param=exc.param) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(await _take_back(old, daemon)) from None
    except BaseException:
        await _take_back(old, daemon)
        raise


async def _take_back(old: Lab, daemon: LabDaemon | None) -> str:
    """Restore a lab that was not replaced: load its models and start its daemon again. Return the end of the error
    message, which describes the result.
    """
    try:
        model = await on_loop(old.server.portal, old.server.engine.take_back())
        kept = "the running lab was not replaced" + (f", and {model} is loaded in it again" if model else "")
    except LabError as exc:
        kept = f"the running lab was not replaced, but its model could not be loaded again: {exc.message}"
    if daemon is not None:
        try:
            await in_thread(functools.partial(old.start_daemon, tools=daemon.python_tools))
        except LabError as exc:
            kept += f"; its daemon could not be started again: {exc.message}"
    return kept


def _stop(old: Lab) -> None:
    old.stop()
    _REGISTRY.lab = None
