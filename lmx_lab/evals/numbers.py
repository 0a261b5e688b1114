"""Read the number that a text states, as people write numbers."""

from __future__ import annotations

import math
import re
import unicodedata
from contextlib import suppress

REWRITTEN = (
    (r"\{,\}", ","),
    (r"\\(?:times|cdot)(?![a-zA-Z])", "*"),
    (r"\\pm(?![a-zA-Z])", "±"),
    (r"(?<=\d)(?=[¼-¾⅐-⅞]|\\[dt]?frac)", " "),
    (r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r"\1\2/\3\4"),
    (r"\\(?:[a-zA-Z]+|[,;:! ])", " "),
    (r"\\([%$])", r"\1"),
    (r"[⁺⁻⁰¹²³⁴-⁹]+", r"^\g<0>"),
    (r"\s?(?:±|\+/-)\s?\d+(?:[.,]\d+)*", ""),
    (r"(?<![\w)\]%] )\u2212 ", "-"),
)
"""Patterns of LaTeX and Unicode, with the plain text of the same meaning. Tolerances are removed."""
SIGNS = str.maketrans("\u2010\u2011\u2012\u2013\u2212\u00d7\u00b7\u22c5\u2044\u2019", "-----***/'")
"""Maps hyphens, dashes, minus signs, signs of multiplication, slashes and apostrophes to characters of ASCII."""
LETTERS = "A-WYZa-wyzÀ-ÖØ-öø-ӿ"
"""Alphabetic letters except x, which is also a sign of multiplication. In Chinese, for example, numbers follow words
without a space."""
CURRENCY = r"(?:[A-Z]{0,2}[$€£¥₹₩₽]|(?:USD|EUR|GBP|CHF|JPY|CNY|INR|Rs)\.?) ?"
TOKEN = re.compile(
    # A name such as GPT-4, Qwen2.5-7B or x_1, or
    rf"(?P<name>(?<!\w)(?!{CURRENCY}\d)[{LETTERS}xX][{LETTERS}xX_]*(?:-[{LETTERS}xX_]+)*-?\d(?:\w|[-.](?=\w))*)"
    # a number, except an exponent, with its currency and sign: a fraction, or digits
    rf"|(?<![{LETTERS}\d^])(?<!\^[-+{{(])(?<!\^[{{(][-+])(?P<before>{CURRENCY})?"
    rf"(?P<sign>(?<![{LETTERS}xX\d_)\]%])[-+]|\b(?:minus|negative) )?(?P<currency>{CURRENCY})?"
    r"(?:(?:(?P<whole>\d{1,3}) )?(?P<over>\d+) ?/ ?(?P<under>\d+)(?![\d/]|[.,]\d)"
    r"|(?P<digits>[1-9]\d{0,2}(?: \d{3})+(?!\d)(?:[.,]\d+)?|\d+(?:[.,'_]\d+)*|(?<![\w.])\.\d+)"
    # with an exponent
    r"(?:[eE](?P<e>[-+]?\d+)|(?P<ten> ?[x*] ?10)?(?: ?\^ ?|\*\*)[({]?(?P<power>[-+]?\d+)[)}]?)?)"
    # and its unit.
    r"(?P<percent> ?(?:%|per ?cent\b|pct\b))?"
    r"(?: ?(?P<scale>thousand|million|billion|trillion)\b|(?P<letter>k|K|M|B|bn|mn)\b)?"
)
JOINED = re.compile(r"(?: ?(?:[^\W\d_]+|[$€£¥₹₩₽]|°[CF]?))?(?: *[-—~+*÷/^x] *| +(?:to|or|through|until) +|[.:])| ")
"""The text between two numbers that are a range, alternatives, an expression, a date or a time, without brackets and
marks of Markdown. A single space joins them only if the second number has a sign."""
WITH_POINT = re.compile(r"\d*\.?\d+|[1-9]\d{0,2}([,'_ ])\d{3}(?:\1\d{3})*(?:\.\d+)?|[1-9]\d?(?:,\d\d)+,\d{3}(?:\.\d+)?")
"""Numbers with a decimal point. Digits are in groups of three or, in India, of two."""
WITH_COMMA = re.compile(r"\d+,\d+|[1-9]\d{0,2}([.' ])\d{3}(?:\1\d{3})*,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}")
SCALES = {
    **{"k": 1e3, "thousand": 1e3, "m": 1e6, "mn": 1e6, "million": 1e6},
    **{"b": 1e9, "bn": 1e9, "billion": 1e9, "trillion": 1e12},
}


def read_number(text: str, *, is_whole: bool = False) -> tuple[float, ...]:
    """Return the possible values of the last number in a text; none if there is no number, or it is unclear.

    There are two if the number is a percentage (50 and 0.5 for ``50%``), or has a letter that can be a unit (5,000,000
    and 5 for ``5M``). Names that contain digits are not numbers. A range, a date or an expression is not one number.

    Args:
        is_whole: Whether the text must consist only of the number.
    """
    for pattern, plain in REWRITTEN:
        text = re.sub(pattern, plain, text)
    # Normalization affects, among others, spaces and digits of other widths, and fractions such as ½.
    text = unicodedata.normalize("NFKC", text).translate(SIGNS).strip()
    tokens = list(TOKEN.finditer(text))
    numbers = [token for token in tokens if token["name"] is None]
    if not numbers or (is_whole and numbers[0].span() != (0, len(text))):
        return ()
    last = numbers[-1]
    for previous in numbers[-2:-1]:
        between = re.sub(r"\*\*|[()\[\]{}_]", "", text[previous.end() : last.start()])
        is_pair = between == " and " and text[: previous.start()].rstrip(" *([{_").lower().endswith("between")
        if is_pair or (JOINED.fullmatch(between) and (between != " " or last["sign"])):
            return ()
    # An overflow, a division by 0, or a complex number.
    with suppress(OverflowError, ZeroDivisionError, TypeError, ValueError):
        number = _value(last)
        if math.isfinite(number):
            letter, scale = last["letter"], SCALES.get((last["scale"] or last["letter"] or "").lower(), 1)
            if last["percent"]:
                return number, number / 100
            is_clear = letter not in ("K", "M", "B") or last["currency"] or last["before"]
            return (number * scale,) if is_clear else (number * scale, number)
    return ()


def _value(token: re.Match[str]) -> float:
    """Return the number of a token without its unit.

    Raises:
        ValueError: the digits are not one number, such as those of a list, a date or a version.
    """
    number: float
    if token["over"]:
        number = int(token["whole"] or 0) + int(token["over"]) / int(token["under"])
    else:
        digits = token["digits"]
        if not WITH_POINT.fullmatch(digits):
            if not WITH_COMMA.fullmatch(digits):
                raise ValueError(digits)
            digits = digits.replace(".", "").replace(",", ".")
        plain = re.sub(r"[^\d.]", "", digits)
        exponent = int(token["e"] or token["power"] or 0)
        is_power = token["power"] and not token["ten"]
        # Not a product with 10.0**exponent, which would be rounded.
        number = float(plain) ** exponent if is_power else float(f"{plain}e{exponent}")
    return number if (token["sign"] or "+") == "+" else -number
