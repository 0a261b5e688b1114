"""``lmx-lab pull`` and ``lmx-lab models``: what is on disk, and how it comes there."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from lmx_lab.cli.app import app, out, say
from lmx_lab.settings import Settings


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A starter (smollm2-135m, minilm-l6), org/name, or a .gguf file.")],
) -> None:
    """Fetch a model, so that it can be loaded."""
    from lmx_lab.progress import bar
    from lmx_lab.weights import Catalog

    with bar(model) as shown:
        entry = Catalog(Settings.read()).fetch(model, shown.update)
    say(f"{entry.id}: {entry.size_bytes / 1e6:.0f} MB at {entry.path}")


@app.command()
def models() -> None:
    """List the models on disk."""
    from lmx_lab.weights import Catalog
    from lmx_lab.weights.starters import STARTERS

    settings = Settings.read()
    entries = Catalog(settings).scan()
    table = Table("id", "kind", "format", "quantization", "size", "context", "from", box=None)
    for entry in entries:
        size, context = f"{entry.size_bytes / 1e6:.0f} MB", str(entry.context_length or "")
        cells = (entry.id, entry.kind, entry.format, entry.quantization or "", size, context, entry.source)
        table.add_row(*(Text(cell) for cell in cells))
    if entries:
        # Whole lines for programs; a terminal's are wrapped to fit.
        out.print(table, width=None if out.is_terminal else 500)
    else:
        say(f"no models in {settings.models_folder} or the hub cache; try: lmx-lab pull smollm2-135m")
    missing = sorted(set(STARTERS) - {entry.id for entry in entries})
    if entries and missing:
        say(f"starters to pull: {', '.join(missing)}")
