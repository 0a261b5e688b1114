"""Fixtures of the grammar tests."""

import pytest

from lmx_lab.engine.grammar.compile import GrammarCompiler, GrammarSandbox, read_token_table
from tests.engine.grammar.grammars import WIDTH


@pytest.fixture(scope="package")
def tokenizer(smollm2):
    from mlx_lm import tokenizer_utils  # slow to import, and not needed by fast tests

    return tokenizer_utils.load(smollm2.path)


@pytest.fixture(scope="package")
def sandbox():
    sandbox = GrammarSandbox()
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="package")
def compiler(tokenizer, sandbox):
    return GrammarCompiler(read_token_table(tokenizer, width=WIDTH, markers=set()), sandbox)
