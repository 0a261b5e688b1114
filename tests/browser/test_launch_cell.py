"""Test the launch cell in JupyterLab."""

import pytest
from playwright.sync_api import expect


@pytest.fixture(scope="module", autouse=True)
def notebook(tab, jupyterlab):
    jupyterlab.write("launch.ipynb", ["import lmx_lab\nlab = lmx_lab.launch('tiny', port=0)\nlab"])
    tab.open("launch.ipynb")
    yield
    tab.close_notebook()


def test_the_launch_cell_shows_the_lab_and_its_addresses(tab):
    shown = tab.run(0)
    url = tab.kernel("print(lab.url)")
    expect(shown).to_contain_text(url)
    expect(shown).to_contain_text("tiny")
