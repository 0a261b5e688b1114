"""Record a request of a server, and hash the files of its model in the background."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable

from lmx_lab.instrument.store import RecordStore
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.recording import NO_HASH, Record
from lmx_lab.weights.fingerprint import known_content_digest, marks_digest
from lmx_lab.weights.tokenizer_files import chat_templates

log = logging.getLogger(__name__)


def save_record(store: RecordStore, make: Callable[[], Record], entry: ModelEntry) -> None:
    """Queue a record to be stored. The files of a model are hashed in the background at its first record.

    Args:
        make: Creates the record; called on the thread of the store.
    """

    def hash_files(provenance: int) -> None:
        try:
            templates = chat_templates(entry)
            digest = hashlib.sha256("\0".join(templates).encode()).hexdigest() if templates else NO_HASH
            store.set_hashes(provenance, weights=known_content_digest(entry), template=digest)
        except Exception:
            log.warning("the files of %s could not be hashed for the records", entry.id, exc_info=True)

    def start_hashing(provenance: int) -> None:
        if entry.marks:
            # A daemon thread: hashing takes a second per gigabyte, which must not delay the exit of the process.
            threading.Thread(target=hash_files, args=(provenance,), name="lmx-lab-hashes", daemon=True).start()

    store.add(make, marks_digest(entry), start_hashing)
