"""Run a notebook without a browser, and print its cells and outputs: ``python tools/demo.py NOTEBOOK``."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CELL_TIMEOUT_S = 600
UPDATE_S = 2.0
COLOURS = re.compile(r"\x1b\[[\d;]*m")


class PrintingClient(NotebookClient):
    """Prints each cell when it starts, and its outputs when they arrive."""

    _updated_at = 0.0

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        """Print also updates of a display, which are those of a progress bar, at most one every ``UPDATE_S``."""
        if msg["msg_type"] == "update_display_data" and time.monotonic() - self._updated_at >= UPDATE_S:
            self._updated_at = time.monotonic()
            show(msg["content"]["data"].get("text/plain", ""))
        return super().process_message(msg, cell, cell_index)

    def output(self, outs: Any, msg: Any, display_id: str | None, cell_index: int) -> Any:
        output = super().output(outs, msg, display_id, cell_index)
        if output is not None:
            show(text_of(output))
        return output


def main(path: Path) -> int:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    quiet = ["--log-level=40"]
    client = PrintingClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources, extra_arguments=quiet)
    client.on_cell_execute = show_source
    client.on_cell_executed = lambda **_: print()
    print(f"running {path.name} in a new kernel", flush=True)
    try:
        client.execute()
    except CellExecutionError:
        # The error was printed as an output of its cell.
        return 1
    except (CellTimeoutError, DeadKernelError) as exc:
        print(f"{type(exc).__name__}: {str(exc).strip().splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


def show_source(cell: Any, **_: Any) -> None:
    print(*(f">>> {line}" for line in cell.source.splitlines()), sep="\n", flush=True)


def show(text: str) -> None:
    print(text if sys.stdout.isatty() else COLOURS.sub("", text), end="", flush=True)


def text_of(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}\n"
    data = output.get("data", {})
    return str(data.get("text/plain", "")) + "\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
