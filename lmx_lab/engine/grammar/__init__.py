"""Constrain answers to JSON schemas, regular expressions and grammars."""
