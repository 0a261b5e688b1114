"""Define lists of models and rankings of documents, as the methods of a lab return them, and compute vectors."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmx_lab.arguments import Texts, embeddings_body
from lmx_lab.backend import Backend, Ranking
from lmx_lab.blocking import on_loop
from lmx_lab.errors import MissingPackageError
from lmx_lab.results.frames import dtypes_of, make_table
from lmx_lab.results.pages import Displayed
from lmx_lab.results.tables import RecordList, align_columns, html_table
from lmx_lab.sanitize import single_line
from lmx_lab.values.outputs import EncodeReport, InputType, RerankMethod, Vectors
from lmx_lab.wire.admin import ModelRecord, ModelRecords, RunningRequest

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("rank", "score", "index", "document")
SHOWN_ROWS = 20
SHOWN_CHARACTERS = 200
LINE_CHARACTERS = 90


@dataclass(frozen=True, kw_only=True)
class RankedDocument:
    """A row of the result."""

    rank: int
    """Place in the order of relevance, starting at 1."""
    score: float
    index: int
    """Index among the given documents."""
    document: str


class RerankResult(Displayed, list[RankedDocument]):
    """The ranked documents, the most relevant first. Documents with equal scores keep their given order.

    Args:
        show: Displays the result as a widget; raises ``MissingPackageError`` where widgets are not installed.
    """

    def __init__(self, ranking: Ranking, *, show: Callable[[RerankResult], None] | None = None) -> None:
        super().__init__(
            RankedDocument(rank=rank, score=score, index=index, document=ranking.documents[index])
            for rank, (index, score) in enumerate(ranking.order, start=1)
        )
        self.ranking = ranking
        self.query = ranking.query
        self.model = ranking.model
        self.method: RerankMethod = ranking.method
        """How the scores were computed. With ``cosine``, they are cosine similarities from an embedding model."""
        self.tokens = ranking.tokens
        """Number of tokens that the model has read."""
        self.report: EncodeReport | None = ranking.report
        """The engine's report; None if the engine runs in another process."""
        self.widget: Any = None
        """The widget that displays the result; None before it is displayed for the first time."""
        self._show = show

    @property
    def df(self) -> pd.DataFrame:
        """The rows as a pandas data frame with the columns rank, score, index and document.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return make_table(map(vars, self), dtypes_of(RankedDocument))

    def _ipython_display_(self) -> None:
        # After a NotImplementedError, IPython uses the other representations.
        if self._show is None:
            raise NotImplementedError
        try:
            self._show(self)
        except MissingPackageError:
            raise NotImplementedError from None

    def __repr__(self) -> str:
        rows = [COLUMNS, *(_cells(row, LINE_CHARACTERS) for row in self[:SHOWN_ROWS])]
        return "\n".join([*align_columns(rows), self._footer()])

    def _repr_html_(self) -> str:
        table = html_table(COLUMNS, (_cells(row, SHOWN_CHARACTERS) for row in self[:SHOWN_ROWS]))
        return f"{table}<small>{html.escape(self._footer())}</small>"

    def _footer(self) -> str:
        more = f"{len(self) - SHOWN_ROWS} more · " if len(self) > SHOWN_ROWS else ""
        return f"{more}{single_line(self.model, LINE_CHARACTERS)} · {self.method}"


def _cells(row: RankedDocument, characters: int) -> tuple[str, ...]:
    return str(row.rank), f"{row.score:.4f}", str(row.index), single_line(row.document, characters)


SHOWN_FIELDS = (
    *("id", "loaded", "main", "pinned", "kind", "format", "engine", "quantization", "size_gb", "context_length"),
)


class ModelList(RecordList[ModelRecord]):
    """Model records, displayed as a table."""

    def __init__(self, found: ModelRecords) -> None:
        # ``main`` is shown if it has several candidates.
        has_choice = sum(record.loaded and not record.pinned for record in found.models) > 1
        super().__init__(found.models, ModelRecord, [name for name in SHOWN_FIELDS if name != "main" or has_choice])
        problems = dict.fromkeys(record.problem for record in found.models if record.problem)
        warnings = [f"{record.id}: {record.warning}" for record in found.models if record.warning]
        # The faster engine, why some models cannot be loaded, and what is wrong with others.
        self.notes = (*([found.preference.detail] if found.preference else []), *problems, *warnings)

    def cell(self, record: ModelRecord, name: str) -> str:
        is_unloading = name == "loaded" and record.unloading is not None
        return str(record.unloading) if is_unloading else super().cell(record, name)


class ClientList(RecordList[RunningRequest]):
    """The requests that wait or run, displayed as a table."""

    nothing = "no request waits or runs"

    def __init__(self, found: Iterable[RunningRequest]) -> None:
        super().__init__(found, RunningRequest)

    def cell(self, record: RunningRequest, name: str) -> str:
        if name == "age_s":
            return f"{record.age_s:.1f}"
        return (name == "client" and not record.client and "the notebook") or super().cell(record, name)


# Methods of a lab


async def clients(backend: Backend) -> ClientList:
    """Return who uses the server: the requests of all clients that wait or run, oldest first. ``.df`` is a data frame.

    A server on another machine returns only the requests of this machine.
    """
    return ClientList(await on_loop(backend.portal, backend.clients()))


async def stop_request(backend: Backend, id_: str) -> str:
    """Stop a request that waits or runs, and return its id. Its client gets the error ``request-stopped``.

    Args:
        id_: The id in ``lab.clients()``, or a unique beginning of it.

    Raises:
        NotFoundError: no request that waits or runs has this id, or several have it.
    """
    return await on_loop(backend.portal, backend.stop_request(id_))


async def models(backend: Backend) -> ModelList:
    """List the models on the server's disk, and which of them are loaded."""
    return ModelList(await on_loop(backend.portal, backend.models()))


async def embed(
    backend: Backend,
    texts: Texts,
    *,
    model: str | os.PathLike[str] | None = None,
    dimensions: int | None = None,
    input_type: InputType | None = None,
    truncate: bool = False,
) -> Vectors:
    """Return the vectors of texts in float32: a matrix with one row for each text, or one vector for a single text.

    Args:
        model: An embedding model in memory; by default the pinned one, otherwise the loaded one.
        dimensions: Keep this number of leading components, and normalize again.
        input_type: Selects the prompt in the model's files that precedes each text; many models have no prompts.
        truncate: Cut texts that are too long for the model, instead of refusing them.

    Raises:
        NotLoadedError: no embedding model is loaded.
        ContextLengthError: a text is too long.
    """
    body = embeddings_body(texts, model=model, dimensions=dimensions, input_type=input_type, truncate=truncate)
    return await on_loop(backend.portal, backend.embed(body))
