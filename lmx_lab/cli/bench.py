"""``lmx-lab bench``: tokens per second of a model here, or of a server of any make."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmx_lab.cli.app import app, epilog, keep_what_is_made, note
from lmx_lab.cli.completion import complete_model
from lmx_lab.cli.exit_status import FAILED, INTERRUPTED
from lmx_lab.cli.folders import settings_with_folders
from lmx_lab.cli.parsing import Command
from lmx_lab.errors import InvalidRequestError, LabError, NotLoadedError, UnauthorizedError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from lmx_lab.bench import ChatTarget, Sweep, Target


PICTURES = (".pdf", ".png", ".svg")
HELP = """Measure tokens per second, with intervals.

Without --url the model is loaded in this process and measured without HTTP, as llama-bench and mlx_lm.benchmark do. \
With --compare it is served from here on a free port, so that both sides go over HTTP. With --url a server that runs \
is measured as its clients see it.

No prompt begins like another one, so that no cache helps, unless --warm is given. Ctrl-C prints what is there.
"""
Model = Annotated[
    str | None,
    typer.Option(help="An id (fetched if needed) or a path; with --url, its name.", autocompletion=complete_model),
]


CompareKey = Annotated[
    str | None, typer.Option(envvar="LMX_LAB_COMPARE_API_KEY", show_envvar=True, help="Key of --compare.")
]


@app.command(
    cls=Command,
    help=HELP,
    epilog=epilog(
        "lmx-lab bench --model smollm2-135m",
        "lmx-lab bench --url http://127.0.0.1:8400 -c 1,4,8 -r 3 --plot bench.png",
        "lmx-lab bench --url 127.0.0.1:8400 --compare 127.0.0.1:8080 -r 3 --json",
        needs="pip install 'lmx-lab[lab]' (for tables), and --model or --url",
        status="0 if every request ended well, 1 if one failed (in warm-up, too), 2 if an argument cannot be, 130 "
        "after Ctrl-C",
    ),
)
def bench(
    *,
    url: Annotated[str | None, typer.Option(help="A chat-format server that runs, of any make.")] = None,
    model: Model = None,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", "-p", help="One number, or several: 128,512.")
    ] = "512",
    output_tokens: Annotated[str, typer.Option("--output-tokens", "-n", help="The same of the answers.")] = "128",
    concurrency: Annotated[str, typer.Option("--concurrency", "-c", help="Requests at once, such as 1,4,8.")] = "1",
    requests: Annotated[
        int | None, typer.Option(help="Of each case. By default 8, and twice its concurrency at least.")
    ] = None,
    repeats: Annotated[
        int,
        typer.Option("--repeats", "-r", help="Of the whole; from 3 on there are intervals of ratios and total_tok_s."),
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests come at random times, so many a second; --concurrency is the most at once."),
    ] = None,
    warm: Annotated[bool, typer.Option(help="Prompts share their beginning, which a warm-up has left cached.")] = False,
    seed: Annotated[int, typer.Option(help="Of the prompts and the times.")] = 0,
    compare: Annotated[
        list[str] | None, typer.Option(help="Another server, which takes turns with the first. Repeatable.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LMX_LAB_API_KEY", show_envvar=True, help="Key of --url.")
    ] = None,
    compare_model: Annotated[str | None, typer.Option(help="By default the only one that --compare lists.")] = None,
    compare_api_key: CompareKey = None,
    record: Annotated[bool, typer.Option(help="Keep the run in the lab's home, for lmx_lab.bench.load().")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document in the place of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file, such as bench.png.")] = None,
) -> None:
    """Measure tokens per second."""
    if url is None and model is None:
        raise InvalidRequestError(
            "there is nothing to measure; give --model for one to load here, or --url of a server"
        )
    from lmx_lab.bench import ChatTarget, Closed, Poisson, Sweep, run

    plan = Sweep(
        prompt_tokens=_numbers("--prompt-tokens", prompt_tokens),
        output_tokens=_numbers("--output-tokens", output_tokens),
        concurrency=_numbers("--concurrency", concurrency),
        requests=requests,
        repeats=repeats,
        arrival=Closed() if rate is None else Poisson(per_second=rate),
        cache="warm" if warm else "cold",
        seed=seed,
    )
    _check_extras(plot)
    others = [ChatTarget(one, model=compare_model, api_key=compare_api_key) for one in compare or ()]
    _check_there(others)
    with _first(url, model, api_key, plan, served=bool(others)) as first:
        rows = run([first, *others], plan, record=record)
    _say_all(rows, as_json=as_json, plot=plot)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequestError(f"{option} is {text!r:.80}; give whole numbers, as in 1,4,8", param=option) from None


def _check_extras(plot: Path | None) -> None:
    """Before anything is measured for minutes.

    Raises:
        InvalidRequestError: what tables or plots need is missing, or the plot could not be written.
    """
    from lmx_lab.bench.sample import frame

    try:
        frame(())
        if plot is not None:
            import_module("lmx_lab.bench.plots")
    except ImportError as exc:
        raise InvalidRequestError(str(exc)) from exc
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise InvalidRequestError(f"--plot is {str(plot)!r}; its end can be {', '.join(PICTURES)}", param="--plot")
    if plot is not None and (plot.is_dir() or not plot.parent.is_dir()):
        raise InvalidRequestError(f"--plot is {str(plot)!r}; give a file in a folder that is there", param="--plot")


def _check_there(targets: Iterable[ChatTarget]) -> None:
    """A table in which every request has failed for one reason says it later, and less clearly.

    Raises:
        LabError: nobody is there, wants another key, or has no such model. What else is amiss, the requests will tell.
    """
    from lmx_lab.client.errors import was_sent

    for target in targets:
        try:
            asyncio.run(target.describe())
        except UnauthorizedError:
            raise
        except NotLoadedError:
            # A lab may bring one when it is asked, or know it by another name.
            asyncio.run(_asked(target))
        except LabError as exc:
            if not was_sent(exc):
                raise


async def _asked(target: ChatTarget) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    async with aclosing(target.ask(body)) as chunks:
        async for _ in chunks:
            pass


@contextmanager
def _first(url: str | None, model: str | None, api_key: str | None, plan: Sweep, *, served: bool) -> Iterator[Target]:
    """What is measured; a model of this process is there as long as the block."""
    from lmx_lab.bench import ChatTarget, EngineTarget

    if url is not None:
        first = ChatTarget(url, model=model, api_key=api_key)
        _check_there([first])
        yield first
        return
    from lmx_lab.lab import Lab

    assert model is not None
    settings = settings_with_folders(host="127.0.0.1", port=0)
    most = max(case.concurrency for case in plan.cases())
    if most > settings.slots:
        note(f"{most} at once are more than {settings.slots} slots: some will wait. LMX_LAB_SLOTS={most} makes room")
    with Lab(settings, loop="thread") as lab:
        note(f"loading {model}")
        lab.load(model)
        keep_what_is_made()
        yield ChatTarget(lab.url, api_key=settings.api_key, name="lab") if served else EngineTarget(lab.engine)


def _say_all(rows: pd.DataFrame, *, as_json: bool, plot: Path | None) -> None:
    """Print it, draw it, and exit."""
    from lmx_lab.cli.bench_tables import print_document, print_tables

    if as_json:
        print_document(rows)
    else:
        print_tables(rows)
    if rows.attrs["path"]:
        note(f"kept in {rows.attrs['path']}")
    if plot is not None and (~rows["warm_up"]).any():
        _chart(rows).savefig(plot)
        note(f"drawn into {plot}")
    if rows.attrs["interrupted"]:
        note("interrupted: this is what was there")
        sys.exit(INTERRUPTED)
    if rows["error"].notna().any():
        sys.exit(FAILED)


def _chart(rows: pd.DataFrame) -> Figure:
    from lmx_lab.bench import by_concurrency, by_prompt_length

    lengths_alone = rows["concurrency"].nunique() == 1 and rows["prompt_tokens_wanted"].nunique() > 1
    return by_prompt_length(rows) if lengths_alone else by_concurrency(rows)
