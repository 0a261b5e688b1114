"""Fixtures of the grammar tests."""

import pytest

from lmx_lab.engine.grammar.compile import GrammarCompiler, read_token_table
from lmx_lab.engine.sandbox import SandboxPool
from tests.engine.grammar.grammars import WIDTH


@pytest.fixture(scope="package")
def tokenizer(smollm2):
    from mlx_lm import tokenizer_utils  # slow to import, and not needed by fast tests

    return tokenizer_utils.load(smollm2.path)


@pytest.fixture(scope="package")
def pool():
    pool = SandboxPool()
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def table(tokenizer):
    return read_token_table(tokenizer, width=WIDTH, markers=set())


@pytest.fixture(scope="package")
def compiler(table, pool):
    return GrammarCompiler(lambda: table, pool=pool)
