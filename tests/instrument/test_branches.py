"""Test branches of answers, trees of them, and their expansion, on the echo engine."""

import asyncio
import json
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import lmx_lab
from lmx_lab.errors import InvalidRequestError, NotLoadedError
from lmx_lab.instrument import load_requests
from tests.support.labs import serving

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with serving(home, "echo", record_to=home / "requests.db") as lab:
        yield lab


def test_a_branch_with_the_same_token_repeats_the_answer_and_is_recorded(lab):
    reply = lab.chat("<think>mm hm</think>hello wide sea", temperature=0, logprobs=3)
    assert (reply.reasoning, reply.text) == ("mm hm", "hello wide sea")
    for at in (0, 3, len(reply.ids) - 1):
        branch = reply.branch(at, reply.ids[at])
        assert (branch.ids, branch.text, branch.reasoning) == (reply.ids, reply.text, reply.reasoning)
        assert (branch.finish_reason, branch.at, branch.parent) == ("stop", at, reply.tree().root)
        assert [token.logprob for token in branch.answer.tokens] == [token.logprob for token in reply.logprobs or ()]
    record = lab.requests[-1].record
    assert (record.prompt, record.answer, record.text) == (reply.prompt_ids, reply.ids, reply.text)
    replay = lab.requests[-1].replay()
    assert (replay.same, replay.changed) == (True, {})
    assert lab.requests[-1].branch(0, reply.ids[0]).ids == reply.ids


def test_another_token_changes_the_answer_from_its_position_on(lab):
    reply = lab.chat("hello wide sea", temperature=0, logprobs=3)
    branch = reply.branch(2, " sh", name="shore")
    assert branch.text == "hello sh"
    assert branch.ids[:2] == reply.ids[:2]
    assert branch.lens()[2].text == " sh"
    # Its token was not among the alternatives, so the tokens were scored.
    assert branch.lens().source == "scoring"
    nested = branch.branch(0, "Z")
    assert (nested.text, nested.tree()) == ("Z", reply.tree())
    same = reply.branch(np.int64(1), np.int64(reply.ids[1]))
    assert (type(same.at), type(same.token)) == (int, int)
    assert '"branch' in reply.tree().to_json()
    longer = lab.chat("hello sea", temperature=0, ignore_eos=True, max_tokens=9)
    assert len(longer.branch(1, "x").ids) == 9
    assert len(longer.branch(1, "x", max_tokens=4).ids) == 4
    assert longer.branch(8, "x").finish_reason == "length"


def test_stop_strings_and_the_sampling_of_the_request_apply_to_a_branch(lab):
    reply = lab.chat("hello sea", temperature=2, ignore_eos=True, max_tokens=30, stop=["zq"])
    one, other = (reply.branch(3, "x", seed=5) for _ in range(2))
    assert one.ids == other.ids
    assert len({reply.branch(3, "x").ids for _ in range(3)}) == 3
    assert reply.branch(3, "z").branch(4, "q").finish_reason == "stop"
    record = lab.requests[-1].record
    assert record.request["sampling"]["temperature"] == 2
    assert record.text.endswith("z") is False


def test_refusals_name_the_value_and_the_reason(lab):
    reply = lab.chat("a \N{GRINNING FACE} b", temperature=0)
    count = len(reply.ids)
    for at in (count, -1, 1.5, True):
        with pytest.raises(InvalidRequestError, match=f"the answer has {count} tokens"):
            reply.branch(at, 300)
    # " ", then the four bytes of the emoji.
    assert reply.branch(2, "x").text == "a x"
    for at, token, options, message in (
        (4, "x", {}, "position 4 is inside a character"),
        (0, 10_000_000, {}, "token has the token id 10000000; echo knows 0 to"),
        (0, "seaside", {}, "token has 'seaside', which is 3 tokens of echo"),
        (0, "", {}, "it must be the id or the text of one token"),
        (2, "x", {"max_tokens": 2}, "begins with 3 tokens, and max_tokens is 2"),
        (2, "x", {"seed": "7"}, "it must be a whole number"),
        (2, "x", {"max_tokens": 2.5}, "it must be a whole number"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            reply.branch(at, token, **options)
    forced = lab.chat("hello", tools=[TOOL], tool_choice="required")
    with pytest.raises(InvalidRequestError, match="forces a tool call"):
        forced.branch(0, forced.ids[0])
    with pytest.raises(InvalidRequestError, match="has no lab"):
        pickle.loads(pickle.dumps(reply)).branch(0, 300)
    with lmx_lab.attach(lab.url) as far:
        with pytest.raises(InvalidRequestError, match="server runs in another process"):
            far.chat("hello").branch(0, 300)
        with pytest.raises(InvalidRequestError, match="server runs in another process"):
            far.explore("hello")


def test_a_record_of_another_model_has_a_lens_and_its_error_names_the_weights_for_branches(lab):
    lab.chat("hello sea", logprobs=2)
    len(lab.requests)
    request = load_requests(lab.server.settings.record_to or "", lab.backend)[-1]
    original, known = request.record, request.record.provenance
    for changed, error, named in (
        (replace(known, model="gone"), NotLoadedError, r'lab\.load\("gone"\)'),
        (replace(known, format="mlx"), NotLoadedError, 'lab\\.load\\("echo", engine="mlx"\\)'),
        (known, InvalidRequestError, "0123abc"),
    ):
        record = replace(original, id=0, provenance=replace(changed, weights="0123abc"))
        request.record = record
        assert len(request.lens()) == len(record.logprobs)
        request.__dict__.pop("_tree", None)
        with pytest.raises(error, match=named):
            request.branch(0, 300)
        request.record = replace(record, logprobs=())
        with pytest.raises(error, match=named):
            request.lens()


def test_a_tree_is_walked_renamed_pruned_compared_and_exported(lab, tmp_path, monkeypatch):
    reply = lab.chat("hello wide sea", temperature=0, logprobs=3)
    tree = reply.tree()
    first = reply.branch(2, " sh", name="shore")
    second = reply.branch(0, "Z")
    third = first.branch(1, "q")
    assert list(tree) == [tree.root, first, third, second]
    assert [branch.name for branch in tree] == ["answer", "shore", "branch 3", "branch 2"]
    third.name = "deep"
    assert tree["deep"] is third
    with pytest.raises(InvalidRequestError, match="already a branch 'shore'"):
        third.name = "shore"
    with pytest.raises(InvalidRequestError, match="already a branch"):
        reply.branch(0, "Z", name="deep")
    with pytest.raises(InvalidRequestError, match="201 characters; the limit is 200"):
        third.name = 201 * "n"
    with pytest.raises(InvalidRequestError, match="control characters"):
        reply.branch(0, "Z", name="two\nlines")
    with pytest.raises(KeyError, match="the branches are answer, shore"):
        tree["missing"]
    assert "shore at 2, ' sh'" in repr(tree)
    assert "&#x27; sh&#x27;" in tree._repr_html_()
    diff = tree.diff("answer", "shore")
    assert diff.first_difference == 2
    assert tree.diff("shore", "shore").first_difference is None
    assert list(diff.df["change"]) == ["equal", "replace"]
    assert "<del> wide sea</del><ins> sh</ins>" in diff._repr_html_()
    assert diff.logprob == pytest.approx(tree.root.logprob - first.logprob)
    frame = tree.df
    assert list(frame["parent"][1:]) == ["answer", "shore", "answer"]
    assert list(frame["at"])[:2] == [pd.NA, 2]
    assert {str(frame[name].dtype) for name in ("at", "tokens")} == {"Int64", "int64"}
    assert list(frame["logprob"].isna()) == [False, False, True, True]
    document = json.loads(tree.save(tmp_path / "tree.json").read_text(encoding="utf-8"))
    assert document["prompt"] == list(reply.prompt_ids)
    assert [each["ids"] for each in document["branches"]] == [list(branch.ids) for branch in tree]
    for saver in (tree, tree.root.lens()):
        with pytest.raises(InvalidRequestError, match=f"no folder '{tmp_path}/missing'; create it first"):
            saver.save(tmp_path / "missing" / "file.html")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InvalidRequestError, match="cannot be written: Is a directory; use another path"):
        tree.save(tmp_path / "folder.json")
    with pytest.raises(InvalidRequestError, match=r"AnswerTree can be saved as \.html, \.json"):
        tree.save(tmp_path / "tree.png")
    for _ in range(1000 - len(tree)):
        tree.add(tree["shore"], 0, "Z", answer=second.answer)
    for add in (lambda: reply.branch(0, "Z"), lambda: tree.add(tree.root, 0, "Z", answer=second.answer)):
        with pytest.raises(InvalidRequestError, match="the tree has 1000 answers, which is the limit; remove some"):
            add()
    tree.prune("shore")
    assert [branch.name for branch in tree] == ["answer", "branch 2"]
    with pytest.raises(InvalidRequestError, match="first answer"):
        tree.prune(tree.root)


def test_the_most_probable_beginnings_are_expanded_together(lab):
    before = len(lab.requests)
    tree = lab.explore("hello wide sea", width=2, depth=2, temperature=0, max_tokens=8)
    assert [branch.name for branch in tree] == ["1-1", "1-2", "2-1", "2-2"]
    assert tree.root.text == "hello wide sea"
    assert tree["1-2"].ids[0] == tree.root.ids[0]
    for branch in tree:
        assert branch.answer.is_scored
        assert branch.logprob <= tree.root.logprob
    # The four answers are recorded, and their first tokens are not.
    assert len(lab.requests) - before == 4
    for arguments in ({"width": 0}, {"width": 9, "depth": 2}, {"depth": 1.5}, {"max_tokens": 1}):
        with pytest.raises(InvalidRequestError, match=next(iter(arguments))[:5]):
            lab.explore("hello", **arguments)
    message = r"explore selects the most probable tokens, and cannot continue after .* at position 0"
    with pytest.raises(InvalidRequestError, match=message) as refused:
        lab.explore("hello", width=2, depth=1, response_format={"type": "regex", "regex": "hello"})
    assert refused.value.message.endswith("leave out response_format, so that all tokens are allowed")


def test_answers_do_not_branch_inside_a_character(lab):
    text = "\N{GRINNING FACE} sea"
    tree = lab.explore(text, width=2, depth=3, temperature=0, max_tokens=8)
    # The first token is a part of the first character.
    assert tree.root.name == "1"
    assert tree.root.text == text


def test_branches_are_taken_on_a_running_loop(lab):
    async def take():
        reply = await lab.achat("hello sea", temperature=0)
        branches = await asyncio.gather(*[reply.abranch(1, text) for text in ("x", "y")])
        assert sorted(branch.text for branch in branches) == ["helx", "hely"]
        assert len(reply.tree()) == len({branch.name for branch in reply.tree()}) == 3
        recorded = await lab.requests[-1].abranch(0, "Z")
        assert recorded.text == "Z"
        return await lab.aexplore("hello", width=2, depth=1)

    assert len(asyncio.run(take())) == 2


def test_the_lens_marks_reasoning_and_calls_and_is_saved_as_a_page(lab, tmp_path):
    reply = lab.chat("<think>mm</think>hello\n", temperature=0, logprobs=2)
    lens = reply.lens()
    assert list(lens.parts) == sorted(lens.parts)
    assert set(lens.parts) == {"reasoning", "text"}
    assert "".join(token.text for token, part in zip(lens, lens.parts, strict=True) if part == "text")[:5] == "hello"
    page = lens.save(tmp_path / "lens.html").read_text(encoding="utf-8")
    assert page.count("tabindex='0'") == len(lens)
    assert "part of the reasoning" in page
    assert "⏎" in page
    assert "<script" not in page
    called = lab.chat("hello", tools=[TOOL], tool_choice="required", logprobs=1).lens()
    assert set(called.parts) == {"call"}
    assert len(lens.colored("rank").df) == len(lens)
