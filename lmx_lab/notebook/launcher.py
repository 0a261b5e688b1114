"""Start a lab, keep the one that runs, or put another in its place: what a launch cell does each time it is run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lmx_lab.errors import DaemonRunningError, HostingError, InvalidRequestError
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.notebook.addresses import is_lan
from lmx_lab.notebook.arguments import model_name
from lmx_lab.notebook.lab import Lab
from lmx_lab.notebook.loop_choice import LoopChoice, choose_loop
from lmx_lab.sanitize import print_warnings
from lmx_lab.settings import PREFIX, Settings

PATIENCE_S = 10.0


def _registry() -> types.ModuleType:
    # A module without a file: autoreload leaves it alone, so a re-run cell finds the lab that runs.
    registry = sys.modules.setdefault("_lmx_lab_registry", types.ModuleType("_lmx_lab_registry"))
    for name, value in (("lab", None), ("workbench", None), ("lock", threading.RLock()), ("starting", False)):
        registry.__dict__.setdefault(name, value)
    return registry


_REGISTRY: Any = _registry()


def launch(
    model: str | os.PathLike[str] | None = None,
    *,
    loop: LoopChoice = "auto",
    lan: bool = False,
    port: int | None = None,
    daemon: bool = False,
    **settings: Any,
) -> Lab:
    """Start the inference server in this process, or return the one that runs if the arguments are the same.

    Changed arguments restart it in place, on its port unless another is asked for, without a model unless one is named.
    ``model`` is loaded before this returns (downloaded first where needed). Also ``await launch()``, ``with launch()``
    and ``async with launch()``.

    Args:
        loop: ``kernel`` serves on the running event loop, ``thread`` on one of its own, where a busy cell does not
            delay other clients. ``auto`` is ``kernel`` in a notebook on loopback, else ``thread``.
        lan: listen on all interfaces, so that other hosts reach the server.
        port: exactly this one, 0 for any free one; by default 8400 or the next free one.
        daemon: also start the daemon, ``lab.daemon``, in front of this server. One that runs goes on; where changed
            arguments restart the server, the daemon restarts with its sessions and its Python functions.
        settings: any field of ``Settings``.

    Raises:
        PortTakenError: the explicit port is in use; what runs goes on.
        DaemonRunningError: the home has a daemon elsewhere; the server runs nevertheless, see ``current()``.
        HostingError: the server could not start; nothing of it is left.
        InvalidRequestError: an argument that is no setting, or of the wrong type.
        LabError: the model, or the ``embedder`` or ``reranker`` of the settings, could not be loaded; the server runs
            nevertheless, see ``current()``.
    """
    print_warnings()
    if lan is True:
        settings.setdefault("host", "0.0.0.0")
    chosen = Settings.read(port=port, **settings)
    if lan not in (True, False) or (lan and not is_lan(chosen.host)):
        raise InvalidRequestError(f"lan is {lan!r} and host {chosen.host!r}; leave one of them out", param="lan")
    explicit = is_explicit(port)
    name = None if model is None else model_name(model)
    with _turn():
        lab = before = current()
        if lab is None or not _fits(lab, chosen, loop, explicit=explicit):
            _REGISTRY.starting = True
            try:
                lab = _replace(chosen, loop, explicit=explicit)
            finally:
                _REGISTRY.starting = False
    lab.pin_encoders()
    if name is not None:
        lab.load(name)
    if daemon:
        # Last: turns that wait since its last end run at once, and need the model.
        _start_daemon(lab, before, explicit=_chosen("DAEMON_PORT", settings.get("daemon_port")))
    return lab


def _start_daemon(lab: Lab, before: Lab | None, *, explicit: bool) -> None:
    with _turn():
        try:
            lab.start_daemon(explicit_port=explicit, tools=before.server.daemon_tools if before is not None else None)
        except DaemonRunningError as exc:
            raise DaemonRunningError(f"{exc.message}. The lab itself runs, at {lab.url}") from exc


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """One launch at a time. One that is under way may need the very loop on which the next one would wait for it."""
    if not _REGISTRY.lock.acquire(timeout=PATIENCE_S):
        raise HostingError("another launch() is under way; wait for it, then call launch() again")
    try:
        if _REGISTRY.starting:
            # The lock lets its own thread in, and a nested loop can run other cells' code on it.
            raise HostingError("another launch() is under way on this loop; wait for it, then call launch() again")
        yield
    finally:
        _REGISTRY.lock.release()


def current() -> Lab | None:
    """The lab that ``launch()`` started in this process, if it still runs."""
    lab: Lab | None = _REGISTRY.lab
    return lab if lab is not None and lab.running else None


def is_explicit(port: int | None) -> bool:
    """Whether somebody chose the port, so that no other will do."""
    return _chosen("PORT", port)


def _chosen(name: str, value: object) -> bool:
    return value is not None or bool(os.environ.get(PREFIX + name))


def _fits(lab: Lab, settings: Settings, loop: LoopChoice, *, explicit: bool) -> bool:
    """Whether launching with these arguments would end in just this lab."""
    same_port = (settings.port, explicit) == (lab.settings.port, lab.server.explicit_port) or settings.port == lab.port
    same_settings = replace(settings, port=0) == replace(lab.settings, port=0)
    return same_port and same_settings and (loop == lab.server.loop_choice or choose_loop(loop, settings) == lab.mode)


def _replace(settings: Settings, loop: LoopChoice, *, explicit: bool) -> Lab:
    """Start a new lab; the old one is stopped as late as can be, so that a mistake costs nothing."""
    lab = Lab(settings, loop=loop, explicit_port=explicit)
    old: Lab | None = _REGISTRY.lab
    if current() is None and old is not None:
        # Stopped already, or its loop has ended without it: then its engine still has to.
        _stop(old)
        old = None
    if old is None:
        sock = bind(settings.host, settings.port, explicit=explicit)
    elif _keeps_port(old, settings, explicit=explicit):
        bind(settings.host, 0, explicit=True).close()
        _stop(old)
        sock = bind(settings.host, old.port, explicit=explicit and settings.port != 0)
    else:
        sock = bind(settings.host, settings.port, explicit=explicit)
        try:
            _stop(old)
        except BaseException:
            sock.close()
            raise
    lab.start(sock)
    _REGISTRY.lab = lab
    # The panels stay where they are in the notebook, and show the new lab.
    _REGISTRY.workbench = lab.take_over(_REGISTRY.workbench)
    return lab


def _keeps_port(old: Lab, settings: Settings, *, explicit: bool) -> bool:
    free_choice = not explicit or settings.port == 0
    return settings.port == old.port or (free_choice and settings.port == old.settings.port)


def _stop(old: Lab) -> None:
    old.stop()
    _REGISTRY.lab = None
