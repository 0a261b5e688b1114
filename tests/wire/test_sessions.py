"""The fields of a session, which are described once for requests and once for keyword arguments."""

from typing import get_type_hints

from lmx_lab.client.daemon import SessionFields
from lmx_lab.wire.sessions import ChangeSession


def test_the_keyword_arguments_of_a_change_are_the_fields_of_its_body():
    """Type checkers need a ``TypedDict`` to tell None from an omitted argument."""
    assert set(get_type_hints(SessionFields)) == set(ChangeSession.model_fields)
