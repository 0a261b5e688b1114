"""Copy the notebooks to a folder in which they can be changed: ``python tools/course.py FOLDER``.

Copies that exist are kept, because they contain the work of the user.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not (copy := folder / path.name).exists():
            notebook = nbformat.read(path, as_version=4)
            # JupyterLab would add it when the notebook is opened, which would count as a change.
            notebook.metadata.language_info = IPythonKernel.language_info
            nbformat.write(notebook, copy)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
