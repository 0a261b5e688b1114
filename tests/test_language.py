"""Test that code and documentation avoid phrases for which plain technical English has a better one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("lmx_lab", "docs", "notebooks", "README.md", "SECURITY.md", "CHANGELOG.md")
SUFFIXES = frozenset({".py", ".md", ".ipynb", ".js", ".css", ".html"})
GENERATED = ("lmx_lab/panels/built", "lmx_lab/panels/uplot", "lmx_lab/server/built")
"""Folders with generated or vendored files."""
SEPARATOR = r"(?:\s|#|//|\*)+"
"""What may be between two words of a phrase: also a line break, with the marks of a comment."""
REPLACEMENTS = {
    r"anew": "again",
    r"as ever": "as before",
    r"as it stands": "unchanged",
    r"(?:am|are|be|been|being|get|gets|is|was|were) told": "receives, gets the error, is notified",
    r"(?:become|becomes|became|come|comes|came) of (?:it|them|that|this)": "the result is",
    r"but for": "except",
    r"comes? about": "happens",
    r"everybody": "all clients, all callers, each user",
    r"for want of": "because there is no",
    r"(?:give|gives|gave|given|giving) up": "cancel, stop waiting, abandon",
    r"(?:go|goes|going|gone|went) on": "continue, keep running, resume",
    r"(?:are|be|is|was) had": "is available, is obtained",
    r"has (?:nothing )?to say": "the message, the output",
    r"in the place of": "instead of, replaces",
    r"in vain": "without success",
    r"knows? no": "has no, does not support",
    r"licences?": "license",
    r"lest": "so that … not",
    r"(?:let|lets|letting) go": "release, close",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"nobody": "no client, no caller, nothing",
    r"nothing of (?:it|its|the|them)": "none of it",
    r"somebody": "a client, a user, another process",
    r"so[ -]manieth": "the number of …, starting at 1",
    r"stands? in": "is in",
    r"to be had": "available",
    r"what (?:it|they|he) (?:says?|said)": "the message, the output",
    r"who asks": "the caller, the client",
    r"whoever": "the caller, any client",
    r"(?<!there\x20)(?:are|is|was) no (?!longer|more|better|other|one)[a-z]+": "is not a",
}
"""Phrases in lower case, as regular expressions with a space between words, and what to write instead."""


def phrase_pattern(phrase):
    return re.compile(rf"(?<![\w-])(?:{phrase.replace(' ', SEPARATOR)})(?![\w-])")


PATTERNS = {phrase_pattern(phrase): replacement for phrase, replacement in REPLACEMENTS.items()}
ANY_PHRASE = phrase_pattern("|".join(REPLACEMENTS))
"""All phrases, because a search for each would take several times as long, as would one that ignores the case."""


def texts():
    """Yield the path of each checked file, relative to the root, and its text."""
    for place in PLACES:
        start = ROOT / place
        for path in sorted(start.rglob("*")) if start.is_dir() else [start]:
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and not name.startswith(GENERATED):
                yield name, path.read_text(encoding="utf-8")


def problems(name, text):
    """Yield each phrase of a text to replace, with its file and line."""
    lowered = text.lower()
    for match in ANY_PHRASE.finditer(lowered):
        line = lowered.count("\n", 0, match.start()) + 1
        replacement = next(each for pattern, each in PATTERNS.items() if pattern.match(lowered, match.start()))
        yield f"{name}:{line}: {' '.join(match[0].split())!r}; write instead: {replacement}"


# Part of make check.
@pytest.mark.slow
def test_no_text_has_a_phrase_to_replace():
    found = [problem for name, text in texts() for problem in problems(name, text)]
    assert not found, f"{len(found)} phrases to replace:\n" + "\n".join(found)


def test_a_phrase_is_found_across_lines_and_only_as_whole_words():
    text = "# The reader goes\n# on. An anewly defined word\nis not a problem."
    assert list(problems("a.py", text)) == ["a.py:1: 'goes # on'; write instead: continue, keep running, resume"]
