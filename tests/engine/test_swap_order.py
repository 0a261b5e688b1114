"""Whose turn it is: everybody who waits for a model goes in with it, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.swap_order import SHARE_S, Line, Ticket

SHARE = 4


def line(*models: str | None, now: float = 0.0) -> Line:
    found = Line(share=SHARE)
    join(found, *models, now=now)
    return found


def join(found: Line, *models: str | None, now: float = 0.0) -> list[Ticket]:
    tickets = [found.ticket(model, now) for model in models]
    for ticket in tickets:
        found.add(ticket)
    return tickets


def order(found: Line, loaded: str | None, *, now: float = 0.0) -> list[str | None]:
    """Who goes in, one after the other, if nobody comes or goes meanwhile."""
    taken = []
    while (ticket := found.take(loaded, now=now, busy=False)) is not None:
        loaded = ticket.model or loaded
        taken.append(ticket.model)
    return taken


def test_all_that_wait_for_a_model_go_in_together() -> None:
    assert order(line("a", "b", "a", "b", "a"), "a") == ["a", "a", "a", "b", "b"]


def test_whatever_is_loaded_is_never_waited_for() -> None:
    assert order(line("b", None, "a"), "a") == [None, "a", "b"]


def test_the_longest_waiting_request_says_which_model_is_next() -> None:
    assert order(line("c", "b", "c", "b"), "a") == ["c", "c", "b", "b"]


def test_within_a_model_the_order_is_that_of_arrival() -> None:
    found = Line(share=SHARE)
    first, second = found.ticket("a", 0.0), found.ticket("a", 0.0)
    found.add(second)
    found.add(first)
    assert found.take("a", now=0.0, busy=False) is first
    assert found.take("a", now=0.0, busy=False) is second


def test_who_comes_late_passes_for_a_while() -> None:
    found = line("b")
    join(found, "a", now=SHARE_S / 2)
    assert order(found, "a", now=SHARE_S / 2) == ["a", "b"]


def test_who_comes_late_does_not_pass_who_has_waited_long() -> None:
    found = line("b")
    assert found.take("a", now=0.0, busy=True) is None
    join(found, "a", now=SHARE_S)
    assert order(found, "a", now=SHARE_S) == ["b", "a"]


def test_only_a_share_passes() -> None:
    found = line("b")
    assert found.take("a", now=0.0, busy=True) is None
    join(found, *["a"] * (SHARE + 1))
    assert order(found, "a") == ["a"] * SHARE + ["b", "a"]


def test_who_waited_when_the_turn_began_goes_in_however_long_others_wait() -> None:
    found = line("c", *["b"] * (SHARE + 3))
    assert found.take("b", now=SHARE_S * 5, busy=False) is not None
    assert order(found, "b", now=SHARE_S * 5) == ["b"] * (SHARE + 2) + ["c"]


def test_a_busy_engine_is_kept_for_latecomers_until_the_share_is_used() -> None:
    found = line("b")
    assert found.take("a", now=SHARE_S - 0.1, busy=True) is None
    ticket = found.take("a", now=SHARE_S, busy=True)
    assert ticket is not None
    assert (ticket.model, len(found)) == ("b", 0)


def test_who_leaves_is_not_called() -> None:
    found = Line(share=SHARE)
    first, _ = join(found, "a", "a")
    found.discard(first)
    found.discard(first)
    assert order(found, "a") == ["a"]


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c"]), max_size=6), max_size=12))
def test_nobody_starves_and_nobody_is_lost(arrivals: list[list[str]]) -> None:
    """Whoever comes while the line moves, at most the share passes a ticket in each turn, and all go in."""
    found, loaded, gone = Line(share=SHARE), "a", 0
    for models in arrivals:
        join(found, *models)
        ticket = found.take(loaded, now=0.0, busy=False)
        if ticket is not None:
            assert ticket.model is not None
            loaded, gone = ticket.model, gone + 1
            assert ticket.passed <= SHARE
    assert gone + len(order(found, loaded)) == sum(map(len, arrivals))
