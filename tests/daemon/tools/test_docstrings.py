"""Parsing docstrings."""

from __future__ import annotations

from lmx_lab.daemon.tools.function_schema import function_schema, read_docstring


def test_docstrings_of_three_styles_are_parsed():
    def google(a: int, b: int) -> None:
        """Sum: of things.

        Arguments:
          a: first: of all
          b (int, optional): second

            goes on
        """

    def numpy(a: int, b: int) -> None:
        """Sum.

        Parameters
        ----------
        a : int
            first
        b
            second
            goes on

        Returns
        -------
        int
        """

    def sphinx(a: int, b: int) -> None:
        """Sum.

        :param a: first
        :param int b: second
            goes on
        :returns: nothing
        """

    assert read_docstring(google) == ("Sum: of things.", {"a": "first: of all", "b": "second goes on"})
    assert read_docstring(numpy) == ("Sum.", {"a": "first", "b": "second goes on"})
    assert read_docstring(sphinx) == ("Sum.", {"a": "first", "b": "second goes on"})
    assert read_docstring(lambda: 1) == ("", {})
    assert function_schema(google).parameters["properties"]["b"]["description"] == "second goes on"
