# SPDX-License-Identifier: Apache-2.0
"""What a tokenizing process does, and what it needs for it.

Kept apart from reading and writing so that a worker starts in a fraction of a second and holds
little more than its tokenizer.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from multiprocessing.connection import wait

import numpy as np

from asymloop_foundry.data.documents import Block, decode_block
from asymloop_foundry.data.encoding import DocumentEncoder, Encoder
from asymloop_foundry.data.rows import end_documents


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker needs to know."""

    encoder: Encoder
    text_column: str
    skip_unreadable: bool
    eos_id: int
    pad_id: int
    row_format: str
    seq_len: int


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A block's documents, as :func:`asymloop_foundry.data.rows.end_documents` gives them."""

    ids: np.ndarray
    kept: np.ndarray
    full: np.ndarray
    skipped: int
    reason: str | None


class Worker:
    """Turns blocks into ids.

    Args:
        job: What to do.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.encode: DocumentEncoder = job.encoder.build()

    def __call__(self, block: Block) -> Encoded:
        """Decode and encode a block.

        Args:
            block: The block.

        Returns:
            Its documents' ids.
        """
        job = self.job
        documents = decode_block(block, job.text_column, job.skip_unreadable)
        ids_T, kept_C, full_C = end_documents(
            self.encode(documents.texts), job.eos_id, job.pad_id, job.row_format, job.seq_len
        )
        return Encoded(ids_T, kept_C, full_C, documents.skipped, documents.reason)


_worker: Worker | None = None


def start_worker(job: Job) -> None:
    """Make this process a worker.

    Args:
        job: What to do.
    """
    global _worker
    # The library's own threads would compete with the other workers.
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = Worker(job)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_worker(block: Block) -> Encoded:
    """Encode a block in a worker process.

    Args:
        block: The block.

    Returns:
        Its documents' ids.
    """
    assert _worker is not None
    return _worker(block)
