"""Run every code block of README and ``docs``, in order, with real kernels, servers and models.

A block of Python is a cell of one kernel for the whole page, or a program if its first line names a file. A block of
bash that starts a server runs until the end of the page. ``page_runner`` lists everything that is changed in the code.
"""

import pytest

from tests.docs.page_runner import PageRunner
from tests.support.docs import PAGES, ROOT, code_blocks
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.long

NO_CODE = {"text", "mermaid", "yaml"}
"""Languages of blocks that are not run: output of a program or a model, diagrams, and manifests."""
TESTED_ELSEWHERE = {
    "clients.md": "other projects' clients, some in an environment of their own: tests/other_clients",
    "cluster.md": "Dask and Ray in an environment of their own: tests/deploy",
}
"""Pages whose code is run by other tests, and why."""
RUN_PAGES = [
    page
    for page in PAGES
    if page.name not in TESTED_ELSEWHERE
    and any(not block.not_run for block in code_blocks(page) if block.language not in NO_CODE)
]


@pytest.fixture(scope="session")
def models(smollm2, minilm, smollm2_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    write_tiny_llama(folder / "tiny", smollm2.path, seed=0, context=2048)
    gguf = folder / f"{smollm2.id}-gguf"
    gguf.mkdir()
    (gguf / smollm2_gguf.name).symlink_to(smollm2_gguf)
    return {smollm2.id: smollm2.path, gguf.name: gguf, minilm.id: minilm.path, "tiny": folder / "tiny"}


@pytest.mark.timeout(900)  # A whole page, perhaps on a busy machine.
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, models, tmp_path):
    with PageRunner(tmp_path, models) as runner:
        for block in [it for it in code_blocks(page) if it.not_run is None and it.language not in NO_CODE]:
            try:
                runner.run(block)
            except AssertionError as exc:
                raise AssertionError(f"{block.location} fails: {exc}") from exc


def test_few_blocks_are_not_run_and_each_gives_a_reason():
    not_run = [block for page in RUN_PAGES for block in code_blocks(page) if block.not_run is not None]
    assert all(len(block.not_run or "") > 10 for block in not_run)
    # What installs the package, and ``make bench``.
    assert len(not_run) <= 8, [block.location for block in not_run]
    comments = sum(page.read_text(encoding="utf-8").count("<!-- not run") for page in RUN_PAGES)
    assert comments == len(not_run), "the comment must be on the line before its block, with the reason after a colon"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_declares_its_language(page):
    assert {block.language for block in code_blocks(page)} <= {"bash", "python"} | NO_CODE
