"""Removing secrets and control characters from the output of MCP servers."""

from lmx_lab.daemon.mcp.redaction import SecretRedactor, last_lines
from lmx_lab.daemon.mcp.stdio import OutputTail


def test_short_secrets_are_redacted_too():
    assert SecretRedactor(["1234", "abc"]).redact("1234 abc") == "*** abc"
    assert SecretRedactor(["1234", "abc"]).redact_bytes(b"1234 abc") == b"*** abc"


def test_a_tail_is_short_printable_and_without_secrets():
    tail = OutputTail(20_480)
    secret = "very-secret-value"
    for number in range(1000):
        tail.feed(f"line {number} \x1b[31m{secret}\x00\r\nüñ\u202e\n".encode())
    text = last_lines(SecretRedactor([f"Bearer {secret}", "short"]).redact(tail.text()))
    assert len(text.encode()) <= 16_384
    assert len(text.splitlines()) == 50
    assert text.splitlines()[-2] == "line 999 \ufffd[31m***\ufffd"
    assert secret not in text
    tail.feed(b"x" * 100_000)
    assert len(tail.text()) <= 20_480
    assert last_lines(tail.text()) == "x" * 2000
