"""Tests of the tokens with which a model fills a gap in a text."""

import json
from dataclasses import replace

import pytest

from lmx_lab.values.models import ECHO
from lmx_lab.weights.tokenizer_files import NAMES, InfillTokens, can_infill, find_infill_tokens


@pytest.mark.parametrize("names", NAMES)
def test_the_tokens_of_each_family_are_found(names):
    vocabulary = {"a": 0, names[2]: 5, names[0]: 6, names[1]: 7, "<|endoftext|>": 8, "<EOT>": 9}
    assert find_infill_tokens(vocabulary.get) == InfillTokens(6, 7, 5, frozenset({8, 9}))
    del vocabulary[names[1]]
    assert find_infill_tokens(vocabulary.get) is None


def test_a_folder_is_searched_without_parsing_its_tokenizer(tmp_path):
    entry = replace(ECHO, format="mlx", path=tmp_path)
    assert can_infill(ECHO)
    assert not can_infill(entry)
    file = tmp_path / "tokenizer.json"
    for names in NAMES:
        for ascii_only in (False, True):
            tokens = [{"content": name} for name in names]
            file.write_text(json.dumps({"added_tokens": tokens}, ensure_ascii=ascii_only), encoding="utf-8")
            assert can_infill(entry)
        file.write_text(json.dumps({"added_tokens": tokens[:2]}), encoding="utf-8")
        assert not can_infill(entry)
