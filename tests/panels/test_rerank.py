"""Test the rerank panel without a browser: forms, tables, copies."""

import asyncio
import json
import random
import re
from dataclasses import replace

import pytest

from lmx_lab.backend import Ranking
from lmx_lab.errors import NotLoadedError
from lmx_lab.panels.rerank import (
    CELL_CHARACTERS,
    MAX_CHARACTERS,
    MAX_TSV_CHARACTERS,
    PAGE_ROWS,
    RerankPanel,
    bar_lengths,
    documents_in,
)
from lmx_lab.panels.workbench import Workbench
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.embeddings import INPUT_LIMIT
from tests.support.labs import serving
from tests.support.models import write_tiny_bert
from tests.support.panels import WAIT_S, Reader, Refused

PANEL = RerankPanel
PAIR = "Bread is baked.\nSea water is salty."
ORDER = ((1, 0.75), (0, -0.25))
RANKED = Ranking(query="q", documents=PAIR.split("\n"), order=ORDER, model="minilm", method="cosine", tokens=12)


def rows(*documents, scores=None, order=None):
    """Return a ranking of documents in the given order; by default, scores decrease."""
    indices = order or list(range(len(documents)))
    values = scores or [1 - number / 10 for number in range(len(documents))]
    given = [document for _, document in sorted(zip(indices, documents, strict=True))]
    order = list(zip(indices, values, strict=True))
    return Ranking(query="q", order=order, documents=given, model="m", method="cosine", tokens=9)


def table_of(result, workbench):
    return Reader(RerankPanel(workbench, result=result))


def column(reader, at):
    return [row["cells"][at] for row in reader.panel.table["rows"]]


# Ranking


def test_documents_are_ranked_and_shown_the_best_first(reader, backend):
    assert reader.ask("rank", query="How salty?", documents=PAIR, top_n=2) is None
    reader.until(lambda panel: panel.busy)
    reader.give(backend.rankings, RANKED)
    reader.until(lambda panel: not panel.busy and panel.table)
    assert backend.requests == [("rerank", ("How salty?", PAIR.split("\n"), 2))]
    table = reader.panel.table
    assert [row["cells"] for row in table["rows"]] == [
        [1, "0.7500", "Sea water is salty.", 1, "▲1"],
        [2, "-0.2500", "Bread is baked.", 0, "▼1"],
    ]
    assert [row["change"] for row in table["rows"]] == ["up 1", "down 1"]
    assert re.fullmatch(r"2 documents by cosine, minilm in \d+ ms: How salty\?", table["caption"])
    assert reader.panel.request == {"query": "How salty?", "documents": PAIR}


def test_a_failed_ranking_is_reported_and_the_table_stays(reader, backend):
    reader.ask("rank", query="q", documents=PAIR)
    reader.give(backend.rankings, RANKED)
    reader.until(lambda panel: not panel.busy and panel.table)
    for error, words in ((NotLoadedError("load a reranker first"), "load a reranker"), (ValueError("x"), "a bug")):
        reader.ask("rank", query="q", documents=PAIR)
        reader.give(backend.rankings, error)
        reader.until(lambda panel, words=words: words in panel.error and not panel.busy)
        assert len(reader.panel.table["rows"]) == 2
    reader.ask("rank", query="q", documents=PAIR)
    reader.until(lambda panel: panel.busy and not panel.error)


def test_loads_of_other_models_are_not_shown_during_a_ranking(reader, backend, workbench):
    async def send(event):
        reader.panel.model_event(event)
        reader.panel.flush()
        return str(reader.panel.activity)

    def after(**event):
        return workbench.submit(send(ModelEvent(**event))).result(WAIT_S)

    reader.ask("rank", query="q", documents=PAIR)
    reader.until(lambda panel: panel.busy)
    assert after(model="b", stage="download") == "Ranking…"
    assert after(model="a", stage="load") == "Loading a…"
    assert after(model="b", stage="loaded") == "Loading a…"
    assert after(model="a", stage="loaded") == "Ranking…"
    reader.give(backend.rankings, RANKED)
    reader.until(lambda panel: not panel.busy)


@pytest.mark.parametrize("begun", [True, False], ids=["running", "before its start"])
def test_a_ranking_can_be_cancelled(reader, backend, workbench, begun):
    async def rank_and_cancel():
        await reader.panel.do_rank({"query": "q", "documents": PAIR})
        await reader.panel.do_cancel({})

    if begun:
        reader.ask("rank", query="q", documents=PAIR)
        reader.until(lambda panel: panel.busy)
        reader.ask("cancel")
    else:
        workbench.submit(rank_and_cancel()).result(WAIT_S)
    reader.until(lambda panel: not panel.busy and "Cancelled" in panel.error)
    reader.ask("cancel")
    assert reader.ask("rank", query="q", documents=PAIR) is None
    reader.give(backend.rankings, RANKED)
    reader.until(lambda panel: panel.table and not panel.busy and not panel.error)


def test_a_new_ranking_is_in_the_snapshot_before_its_frame(backend):
    workbench = Workbench(backend, frame_s=WAIT_S)
    panel = RerankPanel(workbench)

    async def ranked():
        panel.show(problem="a frame, so that the next one waits")
        await panel.do_rank({"query": "q", "documents": PAIR})
        await backend.rankings.put(RANKED)
        await asyncio.wait({panel.task})
        return str(panel.snapshot_html())

    assert "Sea water" in workbench.submit(ranked()).result(WAIT_S)
    workbench.suspend()


def test_a_second_ranking_is_refused(reader):
    reader.ask("rank", query="q", documents=PAIR)
    with pytest.raises(Refused, match="model-busy"):
        reader.ask("rank", query="q", documents=PAIR)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"query": " "}, "query"),
        ({"query": None}, "query"),
        ({"query": "x" * 10_001}, "10000"),
        ({"documents": ""}, "no documents"),
        ({"documents": " \n \r\n"}, "no documents"),
        ({"documents": None}, "no documents"),
        ({"documents": "[]"}, "not a list of texts"),
        ({"documents": "[1, 2]"}, "not a list of texts"),
        ({"documents": '{"a": "b"}'}, "not a list of texts"),
        ({"documents": '["a", null]'}, "not a list of texts"),
        # If it were skipped, the others would have wrong indices.
        ({"documents": '["a", "", "b"]'}, "document 1"),
        ({"documents": '["a", "b]'}, "brackets"),
        ({"documents": "[" * 100_000 + "]"}, "brackets"),
        ({"documents": "x" * (MAX_CHARACTERS + 1)}, "2,000,000"),
        ({"documents": "x\n" * (INPUT_LIMIT + 1)}, "16,384"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": 1.5}, "whole"),
        ({"top_n": "3"}, "top_n"),
        ({"top_n": True}, "top_n"),
        ({"top_n": INPUT_LIMIT + 1}, "top_n"),
    ],
)
def test_invalid_rankings_are_refused_with_a_reason(reader, backend, fields, words):
    with pytest.raises(Refused) as refused:
        reader.ask("rank", **{"query": "q", "documents": PAIR, **fields})
    assert refused.value.code == "invalid-request"
    assert words in refused.value.message
    assert len(refused.value.message) < 300
    assert not backend.requests
    assert not reader.panel.busy


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("a\r\n\n  b \rc", ["a", "  b ", "c"]),
        ("a\x0bb\u2028c", ["a\x0bb\u2028c"]),
        ('["a\\nb", {"text": "c", "id": 1}]', ["a\nb", "c"]),
        ("[1] a footnote\n[2] another", ["[1] a footnote", "[2] another"]),
        ("x" * 1_000_000, ["x" * 1_000_000]),
        ("a\n" * INPUT_LIMIT, ["a"] * INPUT_LIMIT),
    ],
)
def test_documents_are_lines_or_a_list(text, documents):
    assert documents_in(text) == documents


def test_half_surrogate_pairs_are_replaced(reader, backend):
    reader.ask("rank", query="\ud800", documents="a\udc00\nb")
    reader.give(backend.rankings, RANKED)
    reader.until(lambda panel: panel.table)
    json.dumps([reader.panel.table, reader.panel.request], ensure_ascii=False).encode()
    reader.ask("tsv").encode()


# The table


def test_the_table_of_a_result_does_not_depend_on_the_server(workbench, backend):
    reader = table_of(rows("a", "b", "c", order=[2, 1, 0]), workbench)
    backend.set_state(state="stopped", note="run the launch cell again")
    reader.ask("sort", column="index")
    reader.until(lambda panel: column(reader, 3) == [0, 1, 2])
    assert (reader.panel.form, reader.panel.server) == (False, {})
    assert [row["change"] for row in reader.panel.table["rows"]] == ["down 2", "unchanged", "up 2"]
    assert reader.panel.table["caption"] == "3 documents by cosine, m: q"


@pytest.mark.parametrize(
    ("by", "first", "again"),
    [
        ("score", [1, 2, 3, 4], [4, 3, 2, 1]),
        ("document", [3, 1, 2, 4], [4, 2, 1, 3]),
        ("index", [2, 4, 3, 1], [1, 3, 4, 2]),
        ("change", [1, 3, 2, 4], [4, 2, 3, 1]),
    ],
)
def test_every_column_sorts_both_ways(workbench, by, first, again):
    reader = table_of(rows("b", "C", "a", "d", order=[3, 0, 2, 1]), workbench)
    for ranks in (first, again, first):
        reader.ask("sort", column=by)
        reader.until(lambda panel, ranks=ranks: panel.table["sort"] == by and column(reader, 0) == ranks)
    assert reader.panel.table["descending"] == (by in {"score", "change"})
    reader.ask("sort", column="rank")
    reader.until(lambda panel: column(reader, 0) == [1, 2, 3, 4])
    reader.ask("sort", column="rank")
    reader.until(lambda panel: column(reader, 0) == [4, 3, 2, 1])


def test_ten_thousand_long_documents_are_a_page_in_the_widget(workbench):
    random.seed(6)
    count = 10_000
    order = random.sample(range(count), count)
    reader = table_of(rows(*[f"{number} " + "x" * 5000 for number in order], order=order), workbench)
    pages = -(-count // PAGE_ROWS)
    for number, page in ((pages - 1, pages - 1), (pages, pages - 1), (INPUT_LIMIT, pages - 1), (-1, 0)):
        reader.ask("page", page=number)
        reader.until(lambda panel, page=page: panel.table["page"] == page)
    reader.ask("sort", column="index")
    reader.until(lambda panel: column(reader, 3) == list(range(PAGE_ROWS)))
    reader.ask("page", page=1)
    reader.until(lambda panel: panel.table["range"] == "101 to 200 of 10,000")
    assert len(json.dumps(reader.panel.table)) < 60_000
    assert len(reader.panel.snapshot_html()) < 20_000


@pytest.mark.parametrize(
    ("request_name", "fields"),
    [("page", {"page": "2"}), ("page", {"page": -2}), ("sort", {"column": "x"}), ("sort", {})],
)
def test_invalid_requests_of_a_table_are_refused(workbench, request_name, fields):
    reader = table_of(rows("a"), workbench)
    with pytest.raises(Refused, match="invalid-request"):
        reader.ask(request_name, **fields)


@pytest.mark.parametrize("what", ["sort", "page", "document", "tsv"])
def test_without_a_result_requests_of_the_table_are_refused(reader, what):
    with pytest.raises(Refused, match="no result yet"):
        reader.ask(what, column="rank")


def test_a_long_document_is_clipped_until_it_is_expanded(workbench):
    long, huge = "a" * 1000, "b" * (2 * 100_000)
    reader = table_of(rows(long, huge, "short"), workbench)
    assert [len(text) for text in column(reader, 2)] == [CELL_CHARACTERS, CELL_CHARACTERS, 5]
    assert [row["more"] for row in reader.panel.table["rows"]] == [True, True, False]
    assert reader.ask("document", rank=1) == long
    assert len(reader.ask("document", rank=2)) == 100_000
    for rank in (0, 4, "1"):
        with pytest.raises(Refused, match="rank"):
            reader.ask("document", rank=rank)


@pytest.mark.parametrize(
    ("scores", "lengths"),
    [
        ([0.9, 0.5, 0.0], [0.9, 0.5, 0.0]),
        ([0.6, 0.0, -0.2], [0.667, 0.167, 0.0]),
        ([8.0, -2.0, -12.0], [1.0, 0.5, 0.0]),
        ([-3.0, -5.0, -11.0], [1.0, 0.75, 0.0]),
        ([9.0, 3.0], [1.0, 0.333]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([float("nan"), 2.0, float("inf")], [0.0, 1.0, 0.0]),
    ],
)
def test_a_longer_bar_is_a_better_score(scores, lengths):
    assert list(map(bar_lengths(scores), scores)) == lengths


def test_non_finite_scores_can_be_sorted_and_sent(workbench):
    reader = table_of(rows("a", "b", "c", scores=[float("inf"), float("nan"), 1.0]), workbench)
    reader.ask("sort", column="score")
    reader.until(lambda panel: panel.table["sort"] == "score")
    assert column(reader, 1) == ["inf", "1.0000", "nan"]
    json.dumps(reader.panel.table, allow_nan=False)


def test_a_table_is_copied_in_its_sort_order(workbench):
    reader = table_of(rows("b\tc\nd\\n", "a\r\x00", order=[1, 0], scores=[0.5, -1e-7]), workbench)
    assert reader.ask("tsv").split("\n") == [
        "rank\tscore\tdocument\tindex\tchange",
        "1\t0.5\tb\\tc\\nd\\\\n\t1\t1",
        "2\t-1e-07\ta\\r\\x00\t0\t-1",
    ]
    reader.ask("sort", column="document")
    assert [line[0] for line in reader.ask("tsv").split("\n")] == ["r", "2", "1"]


@pytest.mark.parametrize("document", ['=WEBSERVICE("x")', "+1", "-1", "@x", ' =HYPERLINK("x")', "\uff1d1"])
def test_no_spreadsheet_computes_a_document(workbench, document):
    assert table_of(rows(document), workbench).ask("tsv").split("\t")[6] == "'" + document


def test_copying_too_much_text_is_refused(workbench):
    reader = table_of(rows("x" * (MAX_TSV_CHARACTERS + 1)), workbench)
    with pytest.raises(Refused, match="df has all of them"):
        reader.ask("tsv")


def test_the_snapshot_shows_documents_as_text(workbench):
    result = replace(rows("<script>x</script>", "&amp;"), query="<img src=x>")
    text = RerankPanel(workbench, result=result).snapshot_html()
    assert "&lt;script&gt;x" in text
    assert "&amp;amp;" in text
    assert "<script" not in text
    assert "<img" not in text
    assert "no result" in RerankPanel(workbench).snapshot_html()


# A real lab


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    home = tmp_path_factory.mktemp("bert-home")
    write_tiny_bert(home / "models" / "tiny-bert")
    with serving(home, "tiny-bert") as lab:
        yield lab


@pytest.mark.slow
def test_a_real_lab_ranks_as_its_own_verb_does(bert):
    reader = Reader(RerankPanel(bert.workbench))
    reader.ask("rank", query="How salty is the sea?", documents=PAIR + "\n<b>salt</b>")
    reader.until(lambda panel: panel.table or panel.error)
    expected = bert.rerank("How salty is the sea?", [*PAIR.split("\n"), "<b>salt</b>"])
    assert column(reader, 2) == [row.document for row in expected]
    assert column(reader, 1) == [f"{row.score:.4f}" for row in expected]
    bert.unload()
    reader.ask("rank", query="q", documents=PAIR)
    reader.until(lambda panel: "load" in panel.error.lower())
