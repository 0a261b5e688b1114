"""Launch labs: start a lab, return the running one, or replace it if the arguments have changed."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from lmx_lab.errors import ArgumentError, DaemonRunningError, HostingError, InvalidRequestError
from lmx_lab.http.uvicorn_server import REQUEST_LOGGERS, bind
from lmx_lab.notebook.addresses import is_lan
from lmx_lab.notebook.arguments import model_name
from lmx_lab.notebook.lab import Lab
from lmx_lab.notebook.local_server import LoopChoice, choose_loop
from lmx_lab.sanitize import print_warnings
from lmx_lab.settings import PREFIX, Settings
from lmx_lab.values.models import EngineChoice

LOCK_S = 10.0
"""Maximum time to wait for another ``launch()``."""
SLOW_S = 3.0
"""A launch that takes at least this time shows the duration of its stages."""
SHOWN_S = 0.1
"""A stage that takes at least this time is shown."""


def _registry() -> types.ModuleType:
    # A module without a file, which autoreload does not reload, so that a cell that is run again finds the lab.
    registry = sys.modules.setdefault("_lmx_lab_registry", types.ModuleType("_lmx_lab_registry"))
    for name, value in (("lab", None), ("workbench", None), ("lock", threading.RLock()), ("starting", False)):
        registry.__dict__.setdefault(name, value)
    return registry


_REGISTRY: Any = _registry()


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

    Changed arguments restart the server on the same port, unless ``port`` is another one. The restarted server has no
    model, unless ``model`` is given. The result can also be used as ``await launch()``, ``with launch()`` and
    ``async with launch()``.

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
        PortTakenError: the given port is in use; a running lab keeps running.
        DaemonRunningError: another process runs a daemon in this home; the server is running, see ``current()``.
        HostingError: the server could not start; all parts that had started were stopped.
        InvalidRequestError: an argument is not a setting, or has a wrong type.
        LabError: the model, the ``embedder`` or the ``reranker`` could not be loaded; the server is running.
    """
    # In a notebook the metrics panel shows warnings about requests of other programs, not the output of a cell.
    print_warnings(without=REQUEST_LOGGERS if "ipykernel" in sys.modules else ())
    stages = LaunchStages()
    chosen = _read_settings(lan, port, settings)
    explicit = is_explicit(port)
    name = None if model is None else model_name(model)
    with _exclusive_launch():
        lab = before = current()
        if lab is None or not _fits(lab, chosen, loop, explicit=explicit):
            _REGISTRY.starting = True
            try:
                lab = _replace(chosen, loop, explicit=explicit)
            finally:
                _REGISTRY.starting = False
    stages.end("the server")
    lab.pin_encoders()
    stages.end("the embedder and the reranker")
    if name is not None:
        lab.load(name, engine=engine)
        stages.end(name)
    if daemon:
        # Last, because turns that were interrupted by the daemon's last stop start immediately, and need the model.
        _start_daemon(lab, before, explicit=_is_set("DAEMON_PORT", settings.get("daemon_port")))
        stages.end("the daemon")
    stages.show_if_slow()
    return lab


class LaunchStages:
    """The duration of each stage of a launch."""

    def __init__(self) -> None:
        self._ended_at = time.monotonic()
        self._durations: list[tuple[str, float]] = []

    def end(self, name: str) -> None:
        """Record the end of a stage. A stage begins when the previous one ends."""
        began_at, self._ended_at = self._ended_at, time.monotonic()
        self._durations.append((name, self._ended_at - began_at))

    def show_if_slow(self) -> None:
        """Show the duration of the stages if the launch took longer than ``SLOW_S``, in a notebook or on a terminal."""
        if (total := sum(seconds for _, seconds in self._durations)) > SLOW_S:
            parts = [f"{name} {seconds:.1f} s" for name, seconds in self._durations if seconds >= SHOWN_S]
            text = f"The launch took {total:.1f} s: {', '.join(parts)}."
            ipython: Any = sys.modules.get("IPython")
            if ipython is not None and ipython.get_ipython() is not None:
                ipython.display.display({"text/plain": text}, raw=True)
            elif sys.stderr is not None and sys.stderr.isatty():
                print(text, file=sys.stderr)


def _read_settings(lan: bool, port: int | None, settings: Mapping[str, Any]) -> Settings:
    _check_names(settings)
    on_lan = {"host": "0.0.0.0"} if lan is True else {}
    chosen = Settings.read(port=port, **{**on_lan, **settings})
    if lan not in (True, False) or (lan and not is_lan(chosen.host)):
        raise InvalidRequestError(
            f"lan is {lan!r} and host is {chosen.host!r}, which contradict each other; omit one of them", param="lan"
        )
    return chosen


def _check_names(settings: Mapping[str, object]) -> None:
    names = [*inspect.signature(launch).parameters][:-1] + [each.name for each in fields(Settings)]
    if unknown := settings.keys() - set(names):
        raise ArgumentError.unknown("launch", min(unknown), names)


def _start_daemon(lab: Lab, before: Lab | None, *, explicit: bool) -> None:
    with _exclusive_launch():
        try:
            lab.start_daemon(explicit_port=explicit, tools=before.server.daemon_tools if before is not None else None)
        except DaemonRunningError as exc:
            raise DaemonRunningError(f"{exc.message}. The lab itself is running at {lab.url}") from None


@contextlib.contextmanager
def _exclusive_launch() -> Iterator[None]:
    """Allow one launch at a time. The waiting time is limited, because the running launch may need the event loop on
    which the next launch waits."""
    if not _REGISTRY.lock.acquire(timeout=LOCK_S):
        raise HostingError("another launch() is running; wait for its end, then call launch() again")
    try:
        if _REGISTRY.starting:
            # The lock is reentrant, and a nested loop can run the code of other cells in the thread that holds it.
            raise HostingError("another launch() is running on this loop; wait for its end, then call launch() again")
        yield
    finally:
        _REGISTRY.lock.release()


def current() -> Lab | None:
    """Return the running lab that ``launch()`` has started in this process; None if there is none."""
    lab: Lab | None = _REGISTRY.lab
    return lab if lab is not None and lab.running else None


def is_explicit(port: int | None) -> bool:
    """Return whether the port was given, as an argument or in the environment, so that no other port may be used."""
    return _is_set("PORT", port)


def _is_set(name: str, value: object) -> bool:
    return value is not None or bool(os.environ.get(PREFIX + name))


def _fits(lab: Lab, settings: Settings, loop: LoopChoice, *, explicit: bool) -> bool:
    """Return whether a launch with these arguments would result in the same lab."""
    same_port = (settings.port, explicit) == (lab.settings.port, lab.server.explicit_port) or settings.port == lab.port
    same_settings = replace(settings, port=0) == replace(lab.settings, port=0)
    return same_port and same_settings and (loop == lab.server.loop_choice or choose_loop(loop) == lab.mode)


def _replace(settings: Settings, loop: LoopChoice, *, explicit: bool) -> Lab:
    """Start a new lab. The old one is stopped as late as possible, so that it keeps running if an argument is wrong."""
    lab = Lab(settings, loop=loop, explicit_port=explicit)
    try:
        sock = _free_port(settings, explicit=explicit)
    except BaseException:
        lab.stop()
        raise
    lab.start(sock)
    _REGISTRY.lab = lab
    # The existing panels of the notebook show the new lab.
    _REGISTRY.workbench = lab.take_over(_REGISTRY.workbench)
    return lab


def _free_port(settings: Settings, *, explicit: bool) -> socket.socket:
    """Stop the old lab, and return a listening socket for the new one."""
    old: Lab | None = _REGISTRY.lab
    if current() is None and old is not None:
        # The old lab was stopped, or its event loop has ended; in that case its engine still has to be stopped.
        _stop(old)
        old = None
    if old is None:
        return bind(settings.host, settings.port, explicit=explicit)
    if _keeps_port(old, settings, explicit=explicit):
        bind(settings.host, 0, explicit=True).close()
        _stop(old)
        return bind(settings.host, old.port, explicit=explicit and settings.port != 0)
    sock = bind(settings.host, settings.port, explicit=explicit)
    try:
        _stop(old)
    except BaseException:
        sock.close()
        raise
    return sock


def _keeps_port(old: Lab, settings: Settings, *, explicit: bool) -> bool:
    any_port = not explicit or settings.port == 0
    return settings.port == old.port or (any_port and settings.port == old.settings.port)


def _stop(old: Lab) -> None:
    old.stop()
    _REGISTRY.lab = None
