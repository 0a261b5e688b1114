"""Run the inference server of ``lmx-lab serve`` until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import lmx_lab
from lmx_lab.cli import STARTED_S
from lmx_lab.cli.process import freeze_objects
from lmx_lab.cli.terminal import print_line
from lmx_lab.engine import ModelManager
from lmx_lab.engine.tokenizing.templates import prepare_rendering
from lmx_lab.settings import Settings
from lmx_lab.urls import qr_half_blocks
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEvent


async def run_server(settings: Settings, spec: LoadSpec | None, *, explicit_port: bool, stopped: Future[None]) -> None:
    """Start the server, load the models, and return when a signal or an error has ended the server.

    Args:
        spec: The model to load at the start; None loads none.
        explicit_port: Whether the caller chose the port, which then must be free.
        stopped: Done after the first signal.
    """
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(signalled.set)

    # Since Python 3.14, ``wrap_future`` does not wake the loop if a signal handler on its thread ends the future.
    stopped.add_done_callback(wake)
    stop = asyncio.create_task(signalled.wait(), name="lmx-lab stop")
    engine = ModelManager(settings)
    async with contextlib.AsyncExitStack() as stack:
        tasks: list[asyncio.Future[Any]] = [stop]
        stack.callback(engine.stop)
        stack.push_async_callback(_cancel, tasks)
        # The first load of the server, if there is any, begins before the imports.
        first: asyncio.Task[LoadReport] | None = None
        if (chosen := next((each for each in (*engine.unpinned(), spec) if each is not None), None)) is not None:
            # The load and the server import it at the same time, which can fail with a partially initialized module.
            import numpy.typing  # noqa: F401

            prepare_rendering()
            first = asyncio.create_task(engine.load(chosen), name=f"lmx-lab load {chosen.model:.80}")
            tasks.append(first)
            await _wait_for_files(engine, first, stop)
        # This imports the modules of the server, which takes about as long as the load of a small model. Meanwhile,
        # the threads of the load wait for Python's lock at each step: 0.5 ms, and 5 ms by default.
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(0.0005)
        try:
            lab = lmx_lab.Lab(settings, loop="thread", explicit_port=explicit_port, engine=engine)
        finally:
            sys.setswitchinterval(usual_s)
        await lab.astart()
        stack.push_async_callback(lab.astop)
        # Again, because the tasks end before the lab.
        stack.push_async_callback(_cancel, tasks)
        freeze_objects()
        start = asyncio.create_task(_start(lab, spec, first), name="lmx-lab start")
        server = asyncio.create_task(lab.server.wait(), name="lmx-lab server")
        tasks += [start, server]
        await asyncio.wait([start, stop, server], return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            await asyncio.wait([stop, server], return_when=asyncio.FIRST_COMPLETED)
        print_line("stopping")


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_files(engine: ModelManager, load: asyncio.Task[LoadReport], stop: asyncio.Future[Any]) -> None:
    """Wait until the files of a model were found or are being downloaded, or until the load has ended.

    Before that, imports would delay the load, because both need Python's lock.
    """
    loop, found = asyncio.get_running_loop(), asyncio.Event()

    def observe(_: ModelEvent) -> None:
        loop.call_soon_threadsafe(found.set)

    engine.add_observer(observe)
    waiting = asyncio.create_task(found.wait(), name="lmx-lab files")
    await asyncio.wait([load, waiting, stop], return_when=asyncio.FIRST_COMPLETED)
    await _cancel([waiting])
    engine.remove_observer(observe)


async def _start(lab: lmx_lab.Lab, spec: LoadSpec | None, first: asyncio.Task[LoadReport] | None) -> None:
    """Load the models, and print the server's addresses.

    Args:
        first: The load of the first model, which has begun.
    """
    if lab.server.port != lab.settings.port != 0:
        print_line(
            f"port {lab.settings.port} is in use, so the server uses port {lab.server.port}; to choose another, use "
            "--port"
        )
    if first is not None and first.done():
        first.result()
    await lab.apin_encoders()
    if spec is not None:
        # Joins the load if it is in progress.
        report = await lab.aload(spec.model, **spec.options)
        if first is not None and first.done() and first.result().model == report.model:
            # If the load has ended before, the later report has no duration.
            report = first.result()
        print_line(repr(report))
    seconds = f"started in {time.perf_counter() - STARTED_S:.1f} s"
    print_line(
        f"LMX Lab is ready at {lab.url}  (chat format: {lab.url}/v1, docs: {lab.url}/docs; {seconds})", style="bold"
    )
    for url in lab.server.addresses.lan_urls:
        print_line(f"on the LAN at {url}", style="bold")
    if lab.server.announced_name:
        print_line(f"announced on the LAN as {lab.server.announced_name}")
    if lab.lan_url is not None and lab.settings.page and sys.stdout.isatty() and (code := qr_half_blocks(lab.lan_url)):
        print_line(f"the chat page for phones:\n{code}")
    if spec is None and not lab.server.engine.snapshot.pinned:
        print_line("no model is loaded yet: load one with lmx-lab load, or start with --model")
