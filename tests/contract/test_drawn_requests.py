"""Requests that schemathesis draws from the documents, and chains of them: whatever they are, the answers are as
described, their status, headers, body and code of failure."""

from __future__ import annotations

import re

from lmx_lab.lab import Lab
from tests.contract.keeping import EXAMPLES, Contract

SINGLE = ("--phases", "examples,coverage,fuzzing")
CHAINS = ("--phases", "stateful", "--mode", "positive")
CHAIN_EXAMPLES = 6 * EXAMPLES


def assert_whole(said: str) -> None:
    """All operations were asked that were meant."""
    found = re.search(r"Selected: (\d+)/\d+\s+Tested: (\d+)", said)
    assert found is not None, said
    assert found[1] == found[2] != "0", said


def covered(said: str) -> int:
    """How many of the document's links were followed."""
    found = re.search(r"API Links: +(\d+) covered", said)
    assert found is not None, said
    return int(found[1])


def test_the_inference_server_keeps_its_document(server: Contract, lab: Lab) -> None:
    # Without a model nearly all would be one refusal.
    lab.load("tiny")
    assert_whole(server.draw(*SINGLE, "--exclude-tag", "admin"))


def test_its_administration_keeps_its_document(server: Contract) -> None:
    assert_whole(server.draw(*SINGLE, "--include-tag", "admin"))


def test_what_the_inference_server_lists_can_be_read_loaded_and_unloaded(server: Contract) -> None:
    assert covered(server.draw(*CHAINS, examples=CHAIN_EXAMPLES)) >= 3


def test_the_daemon_keeps_its_document(api: Contract) -> None:
    assert_whole(api.draw(*SINGLE))


def test_what_the_daemon_has_made_can_be_read_changed_and_deleted(api: Contract) -> None:
    # Most chains begin with a session; servers of MCP need more luck.
    assert covered(api.draw(*CHAINS, examples=CHAIN_EXAMPLES)) >= 5
