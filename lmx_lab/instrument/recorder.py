"""Record the requests of a server, and hash the files of its models in the background."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from lmx_lab.instrument.store import RecordStore
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.recording import NO_HASH, Record
from lmx_lab.weights.fingerprint import known_content_digest, marks_digest
from lmx_lab.weights.tokenizer_files import chat_templates

log = logging.getLogger(__name__)


class RequestRecorder:
    """Stores the records of one lab until it is closed.

    Args:
        path: SQLite file; None stores the last records in memory.

    Raises:
        InvalidRequestError: the file cannot be opened, or is not a recording.
    """

    def __init__(self, path: Path | None) -> None:
        self.store = RecordStore(path) if path is not None else RecordStore.in_memory()

    def save(self, make: Callable[[], Record], entry: ModelEntry) -> None:
        """Queue a record to be stored. The files of a model are hashed in the background at its first record.

        Args:
            make: Creates the record; called on the thread of the store.
        """

        def hash_files(provenance: int) -> None:
            try:
                templates = chat_templates(entry)
                digest = hashlib.sha256("\0".join(templates).encode()).hexdigest() if templates else NO_HASH
                self.store.set_hashes(provenance, weights=self.weights_of(entry), template=digest)
            except Exception:
                log.warning("the files of %s could not be hashed for the records", entry.id, exc_info=True)

        def start_hashing(provenance: int) -> None:
            if entry.marks:
                # A daemon thread: hashing takes a second per gigabyte, which must not delay the exit of the process.
                threading.Thread(target=hash_files, args=(provenance,), name="lmx-lab-hashes", daemon=True).start()

        self.store.add(make, marks_digest(entry), start_hashing)

    def weights_of(self, entry: ModelEntry) -> str:
        """Return the SHA-256 of all files of a loaded model, as in its provenance. Blocks while they are read for the
        first time.
        """
        return known_content_digest(entry)

    def close(self) -> None:
        """Write all pending records. Idempotent."""
        self.store.close()
