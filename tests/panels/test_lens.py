"""Test the lens panel without a browser: following answers, scoring, branches."""

from dataclasses import replace

import pytest

import lmx_lab
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.panels.lens import LensPanel
from tests.support.labs import serving
from tests.support.panels import Reader, Refused, panels_of

PANEL = LensPanel


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), "echo") as lab:
        yield lab


@pytest.fixture
def workbench(echo):
    with panels_of(LocalBackend(echo.server)) as workbench:
        yield workbench


def texts(panel):
    return "".join(token[0] for token in panel.answer.get("tokens", ()))


def test_the_panel_follows_the_newest_answer_and_scores_it(reader, echo):
    echo.chat("<think>mm</think>wide sea", temperature=0, logprobs=3)
    reader.until(lambda panel: "wide·sea" in texts(panel))
    tokens = reader.panel.answer["tokens"]
    assert {part for _, part, *_ in tokens} == {"reasoning", "text"}
    assert [len(others) for *_, others in tokens] == [3] * len(tokens)
    assert reader.panel.answer["refusal"] == ""
    echo.chat("not scored", temperature=0)
    reader.until(lambda panel: "not·scored" in texts(panel) and not panel.busy)
    assert all(logprob is not None for _, _, logprob, *_ in reader.panel.answer["tokens"])
    assert "log-probability" in reader.panel.snapshot_html()
    reader.ask("follow", follows=False)
    echo.chat("ignored")
    assert "not·scored" in texts(reader.panel)
    reader.ask("follow", follows=True)
    reader.until(lambda panel: "ignored" in texts(panel))


def test_a_long_answer_is_scored_on_request(workbench, echo):
    reader = Reader(LensPanel(workbench, automatic_tokens=10))
    echo.chat("a longer answer of some words", temperature=0)
    reader.until(lambda panel: panel.answer.get("text") == "a longer answer of some words")
    assert reader.panel.answer["scored"] is False
    reader.ask("score")
    reader.until(lambda panel: panel.answer["scored"] and not panel.busy)
    assert "longer" in texts(reader.panel).replace("·", " ")


def test_an_alternative_becomes_a_branch_that_can_be_shown_and_removed(reader, echo):
    echo.chat("hello wide sea", temperature=0, logprobs=3)
    reader.until(lambda panel: "hello·wide" in texts(panel))
    _, _, token = reader.panel.answer["tokens"][1][6][1]
    reader.ask("branch", at=1, token=token)
    reader.until(lambda panel: len(panel.branches) == 2 and not panel.busy)
    root, branch = reader.panel.branches
    assert (root["shown"], branch["shown"], branch["depth"]) == (False, True, 1)
    assert branch["place"].startswith("at 1: ")
    assert reader.panel.answer["name"] == branch["id"]
    # The branch is recorded, and does not replace the tree.
    assert echo.requests[-1].answer is not None
    assert "branch 1" in reader.panel.snapshot_html()
    reader.ask("show", name=root["id"])
    reader.until(lambda panel: panel.answer["name"] == root["id"])
    with pytest.raises(Refused, match="at is 99"):
        reader.ask("branch", at=99, token=token)
    with pytest.raises(Refused, match="first answer"):
        reader.ask("prune", name=root["id"])
    with pytest.raises(Refused, match="no branch 'x'"):
        reader.ask("show", name="x")
    reader.ask("prune", name=branch["id"])
    reader.until(lambda panel: panel.branches == [])
    reader.ask("branch", at=0, token=10**8)
    reader.until(lambda panel: "echo knows" in panel.error)


def test_an_explored_answer_is_shown_with_all_its_tokens(reader, echo):
    tree = echo.explore("hello wide sea", width=2, depth=2, max_tokens=6, temperature=0)
    newest = echo.requests[-1]
    assert newest.answer in {branch.ids for branch in tree}
    assert [token.token for token in newest.lens()] == list(newest.answer)
    reader.until(lambda panel: len(panel.answer.get("tokens", ())) == len(newest.answer) and not panel.busy)
    assert reader.panel.answer["refusal"] == ""


def test_the_panel_says_why_alternatives_cannot_be_clicked(echo):
    echo.chat("hello sea", temperature=0, logprobs=2)
    unknown = replace(echo.requests[-1].record, answer=None)

    async def record():
        return unknown

    backend = LocalBackend(echo.server)
    backend.record = record
    with panels_of(backend) as workbench:
        reader = Reader(LensPanel(workbench))
        reader.until(lambda panel: "hello" in texts(panel))
        assert reader.panel.answer["refusal"] == "the engine did not report the token ids of this answer"


def test_the_panel_says_that_no_answers_are_recorded(tmp_path):
    with serving(tmp_path, "echo", record="off") as lab:
        workbench = lab.workbench
        reader = Reader(LensPanel(workbench))
        reader.until(lambda panel: 'record="off"' in panel.error)
        assert reader.panel.answer == {}
        workbench.suspend()


def test_the_panel_of_an_attached_lab_shows_what_it_needs(echo):
    with lmx_lab.attach(echo.url) as far:
        workbench = far.workbench
        reader = Reader(LensPanel(workbench))
        reader.until(lambda panel: "an attached lab" in panel.error)
        with pytest.raises(Refused, match="no answer yet"):
            reader.ask("score")
        workbench.suspend()
