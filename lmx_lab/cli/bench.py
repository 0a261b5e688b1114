"""Provide ``lmx-lab bench``: measure tokens per second of a model in this process, or of any chat-format server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lmx_lab

# This package imports its modules on first use.
from lmx_lab import bench as benchmark
from lmx_lab.cli import FAILED, INTERRUPTED
from lmx_lab.cli.completion import complete_model
from lmx_lab.cli.options import Command, epilog, settings_with_folders
from lmx_lab.cli.process import freeze_objects
from lmx_lab.cli.terminal import print_line, print_note
from lmx_lab.errors import InvalidRequestError, LabError, NotLoadedError, UnauthorizedError, counted
from lmx_lab.extras import install_command

if TYPE_CHECKING:
    import pandas as pd

    from lmx_lab.bench.case import Case
    from lmx_lab.bench.targets import ChatTarget, Target

app = typer.Typer()
PLOT_SUFFIXES = (".pdf", ".png", ".svg")


@app.command(
    cls=Command,
    help="""Measure tokens per second, with intervals.

Without --url, the model is loaded in this process and measured without HTTP, as llama-bench and mlx_lm.benchmark do. \
With --compare, it is served on a free port, so that both sides are measured over HTTP. With --url, a running server \
is measured over HTTP.

With --engine, once for each engine, the lab loads the model with these engines in turns, to compare them. A running \
lab loads it with its previous engine at the end.

All prompts begin differently, so that no prefix cache is used, unless --warm is given. Ctrl-C or SIGTERM stops the \
run and prints the results so far. If standard error is not a terminal, it gets a line after each round, which is one \
repeat of a case on all sides, with an estimate of the remaining time.
""",
    epilog=epilog(
        "lmx-lab bench --model smollm2-135m",
        "lmx-lab bench --url http://127.0.0.1:8400 -c 1,4,8 -r 3 --plot bench.png",
        "lmx-lab bench --model smollm2-135m --engine mlx --engine llama.cpp -r 3",
        "lmx-lab bench --url 127.0.0.1:8400 --compare 127.0.0.1:8080 -r 3 --json",
        needs=f"{install_command('pandas')} (for tables), and --model or --url",
        status="0 if all requests succeeded, 1 if one failed (warm-up included), 2 if an argument is not valid, 130 "
        "after Ctrl-C or SIGTERM",
    ),
)
def bench(
    *,
    url: Annotated[str | None, typer.Option(help="Address of a running chat-format server.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Id (downloaded if needed) or path of the model; with --url, its name on the server.",
            autocompletion=complete_model,
        ),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="Engine that runs the model: mlx or llama.cpp. Repeatable.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a side in tables and plots, in the order of --engine (or the only side) and --compare. "
            "Repeatable."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", "-p", help="Prompt length; one number or several, such as 128,512.")
    ] = "512",
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", "-n", help="Answer length; one number or several.")
    ] = "128",
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Concurrent requests; one number or several, such as 1,4,8.")
    ] = "1",
    requests: Annotated[
        int | None,
        typer.Option(help="Number of requests of each case. By default 8, or twice the concurrency if that is more."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option("--repeats", "-r", help="Repeats of all cases. Intervals of ratios and total_tok_s need 3."),
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Send requests at random times with this mean rate per second, at most --concurrency in parallel."
        ),
    ] = None,
    warm: Annotated[
        bool, typer.Option(help="Use prompts with a common start, which the warm-up puts into the prefix cache.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the times for --rate.")] = 0,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Address of another server, measured alternately with the first one. Repeatable."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LMX_LAB_API_KEY", show_envvar=True, help="API key of the --url server.")
    ] = None,
    compare_model: Annotated[
        str | None, typer.Option(help="Model of the --compare servers. By default the only model that a server lists.")
    ] = None,
    compare_api_key: Annotated[
        str | None,
        typer.Option(envvar="LMX_LAB_COMPARE_API_KEY", show_envvar=True, help="API key of the --compare servers."),
    ] = None,
    record: Annotated[bool, typer.Option(help="Store the run in the lab's home, for lmx_lab.bench.load().")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this file, such as bench.png.")] = None,
) -> None:
    """Measure tokens per second."""
    if url is None and model is None:
        raise InvalidRequestError("there is nothing to measure; give --model to load a model, or --url of a server")
    import asyncio

    sweep: dict[str, Any] = {
        "prompt_tokens": _numbers("--prompt-tokens", prompt_tokens),
        "output_tokens": _numbers("--output-tokens", output_tokens),
        "concurrency": _numbers("--concurrency", concurrency),
        "requests": requests,
        "repeats": repeats,
        "cache": "warm" if warm else "cold",
        "seed": seed,
    }
    if rate is not None:
        sweep["arrival"] = benchmark.Poisson(per_second=rate)
    plan = benchmark.Sweep(**sweep)
    # Check before the measurement that the tables and the plot can be made.
    benchmark.frame(())
    if plot is not None:
        import_module("lmx_lab.bench.plots")

        if plot.suffix.lower() not in PLOT_SUFFIXES:
            raise InvalidRequestError(
                f"--plot is {str(plot)!r}; its suffix must be one of {', '.join(PLOT_SUFFIXES)}", param="--plot"
            )
        if plot.is_dir() or not plot.parent.is_dir():
            raise InvalidRequestError(f"--plot is {str(plot)!r}; give a file in an existing folder", param="--plot")
    others = [benchmark.ChatTarget(one, model=compare_model, api_key=compare_api_key) for one in compare or ()]
    asyncio.run(_check_reachable(others))
    engines, names = list(engine or ()), list(name or ())
    with _stopped_by_sigterm():
        if url is not None:
            first = benchmark.ChatTarget(url, model=model, api_key=api_key)
            asyncio.run(_check_reachable([first]))
        if url is None:
            assert model is not None
            with _served_model(model, engines, plan, others, names) as targets:
                rows = benchmark.run(targets, plan, record=record, names=names)
        elif engines:
            with lmx_lab.attach(url, api_key=api_key) as lab:
                if model is not None:
                    lab.load(model)
                rows = lab.bench(**sweep, engines=engines, names=names, compare=others, record=record)
        else:
            rows = benchmark.run([first, *others], plan, record=record, names=names)
        _report(rows, as_json=as_json, plot=plot)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM stop the block in the same way as Ctrl-C, unless it is ignored."""

    def interrupt(number: int, frame: object) -> None:
        # Shells start programs in the background with SIGINT ignored.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequestError(
            f"{option} is {text!r:.80}; give whole numbers, such as 1,4,8", param=option
        ) from None


async def _check_reachable(targets: Iterable[ChatTarget]) -> None:
    """Check before the measurement that the targets can be used. Other errors are reported when the requests fail.

    Raises:
        LabError: a server does not answer, refuses the key, or does not have the model.
    """
    from lmx_lab.client.connection import was_sent

    for target in targets:
        try:
            await target.describe()
        except UnauthorizedError:
            raise
        except NotLoadedError:
            # The lab may load the model when a request names it, or have it under another name.
            body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
            async with aclosing(target.ask(body)) as chunks:
                async for _ in chunks:
                    pass
        except LabError as exc:
            if not was_sent(exc):
                raise


@contextmanager
def _served_model(
    model: str, engines: Sequence[str], plan: Sequence[Case], others: Sequence[ChatTarget], names: Sequence[str]
) -> Iterator[list[Target]]:
    """Load a model in this process for the duration of the block, and provide all targets."""
    from lmx_lab.bench.runner import Measurement
    from lmx_lab.bench.targets import EngineTarget, engine_sides

    settings = settings_with_folders(host="127.0.0.1", port=0)
    concurrency = max(case.concurrency for case in plan)
    if concurrency > settings.slots:
        print_note(
            f"the concurrency {concurrency} exceeds the {counted(settings.slots, 'slot')}, so some requests will "
            f"wait; set LMX_LAB_SLOTS={concurrency} to avoid this"
        )
    with lmx_lab.Lab(settings, loop="thread") as lab:
        own: Target = EngineTarget(lab.server.engine)
        if others:
            own = benchmark.ChatTarget(lab.url, api_key=settings.api_key, name="lab")
        sides = engine_sides(own, lab.backend, model, engines)
        targets: list[Target] = [*sides, *others] if sides else [own, *others]
        Measurement(targets, plan, names=names)  # Raises before the load if the names are not valid.
        print_note(f"loading {model}")
        # The last engine is the first one that the measurement loads.
        lab.load(model, **sides[-1].spec.options if sides else {})
        freeze_objects()
        yield targets


def _report(rows: pd.DataFrame, *, as_json: bool, plot: Path | None) -> None:
    """Print and plot the results, then exit."""
    from lmx_lab.cli.bench_tables import print_document, print_tables

    rounds = rows.attrs["rounds"]
    partial = f"interrupted: partial results, {rounds['finished']} of {rounds['planned']} rounds have finished"
    if rows.attrs["interrupted"]:
        # In the same output as the tables; JSON has the same in its fields.
        (print_note if as_json else print_line)(partial)
    (print_document if as_json else print_tables)(rows)
    if rows.attrs["path"]:
        print_note(f"stored in {rows.attrs['path']}")
    if plot is not None and (~rows["warm_up"]).any():
        only_lengths_vary = rows["concurrency"].nunique() == 1 and rows["prompt_tokens_wanted"].nunique() > 1
        figure = (benchmark.by_prompt_length if only_lengths_vary else benchmark.by_concurrency)(rows)
        assert figure is not None
        figure.save(plot)
        print_note(f"plot written to {plot}")
    if rows.attrs["interrupted"]:
        sys.exit(INTERRUPTED)
    if rows["error"].notna().any():
        sys.exit(FAILED)
