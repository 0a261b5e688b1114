"""Tests of measuring in a cell of a notebook."""

import pytest

from tests.support.kernels import Notebook
from tests.support.model_server import STALL, WORDS, Scripted, after_calibration, token

pytestmark = pytest.mark.slow


@pytest.fixture
def notebook(tmp_path):
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


@pytest.mark.parametrize("first_line", ["", "import asyncio; await asyncio.sleep(0)"])
def test_the_stop_button_returns_the_finished_requests(notebook, first_line):
    """In a cell with ``await``, the handler of ipykernel raises no exception."""
    with Scripted(after_calibration(WORDS, WORDS, [token("a"), STALL])) as server:
        output = notebook.interrupt(
            f"""
            {first_line}
            from lmx_lab.bench import Case, run
            case = Case(prompt_tokens=8, output_tokens=4, requests=4)
            rows = run("{server.url}", case, progress=lambda step: step.done == 2 and print("started"))
            print(len(rows), rows.attrs["interrupted"])
            """
        )
    assert output.error is None, output.message
    assert output.text.strip() == "2 True"
    assert notebook.run("import sys; print('mlx.core' in sys.modules)") == "False"
