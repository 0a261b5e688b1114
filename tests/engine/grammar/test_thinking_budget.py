"""When thoughts are ended, over made-up tokens."""

from __future__ import annotations

from lmx_lab.engine.grammar.mask import ThinkingBudget

START, END = 3, 4
NAMES = {
    START: b"<think>",
    END: b"</think>",
    10: b"hm ",
    11: "é".encode()[:1],
    12: "é".encode()[1:],
    13: b"</thi",
    14: b"nk>",
}


def budget(tokens: int, *, open: bool, end: tuple[int, ...] = (END,)) -> ThinkingBudget:
    return ThinkingBudget(tokens, markers=("<think>", "</think>"), end=end, open=open, bytes_of=lambda id_: NAMES[id_])


def forced(budget: ThinkingBudget, *tokens: int) -> list[int | None]:
    """What is forced before each token and after the last."""
    seen = [budget.forced]
    for token in tokens:
        budget.advance(token)
        seen.append(budget.forced)
    return seen


def test_thoughts_end_after_the_budget() -> None:
    assert forced(budget(2, open=True), 10, 10, END, 10, 10) == [None, None, END, None, None, None]


def test_a_budget_of_nothing_ends_thoughts_at_once() -> None:
    assert forced(budget(0, open=True), END, 10) == [END, None, None]
    assert forced(budget(0, open=False), START, END, 10) == [None, END, None, None]


def test_an_answer_without_thoughts_has_no_budget() -> None:
    assert forced(budget(1, open=False), 10, 10, 10) == [None] * 4


def test_a_marker_in_the_middle_of_an_answer_begins_no_thoughts() -> None:
    assert forced(budget(0, open=False), 10, START, 10) == [None] * 4


def test_thoughts_that_end_by_themselves_are_not_ended_again() -> None:
    assert forced(budget(2, open=True), 10, END, 10, 10, 10) == [None] * 6
    assert forced(budget(3, open=True), 10, 13, 14, 10, 10, 10) == [None] * 7


def test_a_marker_of_several_tokens_is_forced_whole() -> None:
    assert forced(budget(1, open=True, end=(13, 14)), 10, 13, 14, 10) == [None, 13, 14, None, None]


def test_a_budget_waits_for_the_end_of_a_character() -> None:
    assert forced(budget(1, open=True), 11, 12, END) == [None, None, END, None]
