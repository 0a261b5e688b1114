"""Run a notebook headless in a real kernel and print what happened: ``python notebooks/demo.py NOTEBOOK``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CELL_TIMEOUT_S = 600


def main(path: Path) -> int:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    quiet = ["--log-level=40"]
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources, extra_arguments=quiet)
    client.on_cell_executed = show
    print(f"running {path.name} in a kernel of its own", flush=True)
    try:
        client.execute()
    except CellExecutionError:
        # The cell's error output has been printed.
        return 1
    except (CellTimeoutError, DeadKernelError) as exc:
        print(f"{type(exc).__name__}: {str(exc).strip().splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


def show(cell: Any, **_: Any) -> None:
    """Print a cell as a session would show it."""
    print(*(f">>> {line}" for line in cell.source.splitlines()), sep="\n")
    # A stream arrives in pieces, whatever else comes as a whole.
    pieces = [text_of(output) for output in cell.get("outputs", ())]
    print("".join(pieces).rstrip(), end="\n\n", flush=True)


def text_of(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    data = output.get("data", {})
    return str(data.get("text/plain", "")) + "\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
