"""Constrain answers to schemas, regular expressions and grammars."""
