"""Tool calls out of the pieces in which servers of different makes send them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmx_lab.errors import EngineError

CALLS = 128
CALL_CHARACTERS = 1_000_000
"""Of all arguments of one answer."""


@dataclass(frozen=True, kw_only=True)
class CallPiece:
    """What one delta says of a call."""

    index: int | None = None
    """Missing in some servers; 0 for every call in others."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, kw_only=True)
class WholeCall:
    id: str | None
    name: str
    arguments: str
    """As the model wrote them."""


@dataclass(kw_only=True)
class _Growing:
    id: str | None
    name: str
    arguments: list[str] = field(default_factory=list)


class CallAssembly:
    """Fed with pieces in their order, it has the calls of one answer."""

    def __init__(self) -> None:
        self._calls: list[_Growing] = []
        self._by_index: dict[int, _Growing] = {}
        self._characters = 0

    def add(self, piece: CallPiece) -> None:
        """
        Raises:
            EngineError: more calls, or longer ones, than any answer may have.
        """
        call = self._continued(piece) or self._begun(piece)
        call.id = call.id or piece.id
        call.name = call.name or piece.name or ""
        self._characters += len(piece.arguments)
        if self._characters > CALL_CHARACTERS:
            raise EngineError(f"the model's tool calls have more than {CALL_CHARACTERS:,} characters; ask for less")
        if piece.arguments:
            call.arguments.append(piece.arguments)

    def _continued(self, piece: CallPiece) -> _Growing | None:
        """The call that this goes on with; None if it begins one."""
        if piece.index is None:
            # Without a place, whatever has a name or an id of its own is another call.
            known = next((call for call in self._calls if piece.id and call.id == piece.id), None)
            latest = self._calls[-1] if self._calls and not piece.name and not piece.id else None
            return known or latest
        call = self._by_index.get(piece.index)
        # Ollama has sent every call under the index 0.
        is_another = call is not None and piece.id and call.id and piece.id != call.id and piece.name
        return None if is_another else call

    def _begun(self, piece: CallPiece) -> _Growing:
        if len(self._calls) == CALLS:
            raise EngineError(f"the model asked for more than {CALLS} tool calls at once; ask for less")
        call = _Growing(id=piece.id, name=piece.name or "")
        self._calls.append(call)
        if piece.index is not None:
            self._by_index[piece.index] = call
        return call

    def calls(self) -> tuple[WholeCall, ...]:
        """In the order in which they began."""
        return tuple(WholeCall(id=call.id, name=call.name, arguments="".join(call.arguments)) for call in self._calls)
