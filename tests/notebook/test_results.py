"""Test rerank results as rows, data frames and tables; the text of documents is untrusted."""

import pytest

from lmx_lab.backend import Ranking
from lmx_lab.notebook.results import COLUMNS, SHOWN_CHARACTERS, RankedDocument, RerankResult


def result(documents, scores, model="minilm", top_n=None):
    best = sorted(range(len(documents)), key=lambda index: -scores[index])
    order = tuple((index, float(scores[index])) for index in best[:top_n])
    ranking = Ranking(query="q", documents=documents, order=order, model=model, method="cosine", tokens=9)
    return RerankResult(ranking, show=lambda result: None)


def test_rows_are_numbered_by_relevance():
    ranked = result(["a", "b", "c"], [0.25, 0.5, 0.25])
    assert list(ranked) == [
        RankedDocument(rank=1, score=0.5, index=1, document="b"),
        RankedDocument(rank=2, score=0.25, index=0, document="a"),
        RankedDocument(rank=3, score=0.25, index=2, document="c"),
    ]
    assert (len(ranked), ranked[-1].index, [row.rank for row in ranked[:2]]) == (3, 2, [1, 2])
    assert (ranked.method, ranked.model, ranked.query) == ("cosine", "minilm", "q")


def test_top_n_limits_the_rows():
    assert [row.document for row in result(["a", "b", "c"], [1, 2, 3], top_n=2)] == ["c", "b"]


def test_the_data_frame_has_the_same_rows():
    frame = result(["a", "b"], [0.25, 0.5]).df
    assert list(frame.columns) == list(COLUMNS)
    assert frame.values.tolist() == [[1, 0.5, 1, "b"], [2, 0.25, 0, "a"]]
    assert result([], []).df.dtypes.to_dict() == frame.dtypes.to_dict()


def test_the_text_is_a_table():
    assert repr(result(["a\nb", "c"], [0.5, 0.25])).splitlines() == [
        "rank  score   index  document",
        "1     0.5000  0      a b",
        "2     0.2500  1      c",
        "minilm · cosine",
    ]


@pytest.mark.parametrize("document", ["\x1b[2Jgone", "a\rb", "\u202edrawkcab", "\x9b2J", "a\u2028b"])
def test_control_characters_are_not_printed(document):
    assert all(line.isprintable() for line in repr(result([document], [1])).split("\n"))


def test_html_in_a_document_or_a_name_stays_text():
    shown = result(["<script>x</script>", "&amp;"], [1, 0], model="<img src=x>")._repr_html_()
    assert "<script" not in shown
    assert "<img" not in shown
    assert "&lt;script&gt;x" in shown
    assert "&amp;amp;" in shown


def test_long_documents_and_lists_are_shortened():
    ranked = result(["word " * 300_000] * 10_000, [1.0] * 10_000)
    for shown in (ranked._repr_html_(), repr(ranked)):
        assert len(shown) < 100 * SHOWN_CHARACTERS
        assert "9980 more" in shown
        assert "…" in shown
    assert len(ranked[0].document) == 1_500_000
