"""Run the inference server of ``lmx-lab serve`` until a signal."""

from __future__ import annotations

import asyncio
import contextlib

import lmx_lab
from lmx_lab.cli.process import freeze_objects, stop_on_signals
from lmx_lab.cli.terminal import print_line
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec


def run_server(settings: Settings, spec: LoadSpec | None, *, explicit_port: bool) -> None:
    """Start the server, load the models, and return when a signal or an error has ended the server.

    Args:
        spec: The model to load at the start; None loads none.
        explicit_port: Whether the caller chose the port, which then must be free.
    """
    asyncio.run(_run(settings, spec, explicit_port=explicit_port))


async def _run(settings: Settings, spec: LoadSpec | None, *, explicit_port: bool) -> None:
    stop = _stop_event()
    lab = lmx_lab.Lab(settings, loop="kernel", explicit_port=explicit_port)
    await lab.astart()
    freeze_objects()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(lab.astop)
        tasks = [
            asyncio.create_task(coro, name=f"lmx-lab {name}")
            for name, coro in (("start", _start(lab, spec)), ("stop", stop.wait()), ("server", lab.wait()))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
                await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        print_line("stopping")


def _stop_event() -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets. The second one ends the process by its default action."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def set_stop(_: int) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has already ended.
            loop.call_soon_threadsafe(stop.set)

    stop_on_signals(set_stop)
    return stop


async def _start(lab: lmx_lab.Lab, spec: LoadSpec | None) -> None:
    """Load the models, and print the server's addresses."""
    if lab.port != lab.settings.port != 0:
        print_line(
            f"port {lab.settings.port} is in use, so the server uses port {lab.port}; to choose another, use --port"
        )
    for name in (lab.settings.embedder, lab.settings.reranker):
        if name is not None:
            print_line(f"loading {name}, which stays in memory")
    await lab.apin_encoders()
    if spec is not None:
        print_line(f"loading {spec.model}")
        report = await lab.aload(spec.model, **spec.options)
        print_line(repr(report))
    print_line(f"LMX Lab is ready at {lab.url}  (chat format: {lab.url}/v1, docs: {lab.url}/docs)", style="bold")
    for url in lab.lan_urls:
        print_line(f"on the LAN at {url}", style="bold")
    if spec is None and not lab.engine.snapshot.pinned:
        print_line("no model is loaded yet: load one with lmx-lab load, or start with --model")
