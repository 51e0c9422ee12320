# SPDX-License-Identifier: Apache-2.0
"""From documents to rows of a fixed length.

Shapes: T tokens of a block's documents end to end, C documents, R rows, N positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def end_documents(
    documents_T: Sequence[np.ndarray], eos_id: int, pad_id: int, row_format: str, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give every document its EOS; truncate where a row holds one document.

    A truncated document ends in EOS too, as the paper's reference pipeline leaves it
    (``tokenizer(text, truncation=True)`` with T5): the row's last position is the EOS and
    ``seq_len - 1`` tokens of the document stand before it. A document without a token stays
    without one.

    Some vocabularies hold their special tokens as ordinary entries, too, so that ``</s>`` spelled
    out in a web page becomes the EOS (T5's does). EOS and pad ids inside a document are left out.

    Args:
        documents_T: Ids of each document, int32, without special tokens.
        eos_id: Id of the EOS.
        pad_id: Id of the pad.
        row_format: ``padded`` or ``packed``.
        seq_len: Positions of a row.

    Returns:
        Kept ids of all documents end to end (T,) int32; how many of them are each document's
        (C,) int64; how many it would have had untruncated (C,) int64.
    """
    eos = np.array([eos_id], dtype=np.int32)
    parts: list[np.ndarray] = []
    kept_C = np.zeros(len(documents_T), dtype=np.int64)
    full_C = np.zeros(len(documents_T), dtype=np.int64)
    for number, ids_T in enumerate(documents_T):
        special_T = (ids_T == eos_id) | (ids_T == pad_id)
        if special_T.any():
            ids_T = ids_T[~special_T]
        if not len(ids_T):
            continue
        full_C[number] = len(ids_T) + 1
        if row_format == 'padded':
            ids_T = ids_T[: seq_len - 1]
        kept_C[number] = len(ids_T) + 1
        parts += [ids_T, eos]
    ids_T = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    return ids_T, kept_C, full_C


def pad_documents(ids_T: np.ndarray, kept_C: np.ndarray, seq_len: int, pad_id: int) -> np.ndarray:
    """Put each document into a row of its own, padded on the right.

    Args:
        ids_T: Documents end to end.
        kept_C: Tokens of each, at most ``seq_len``; documents of no tokens get no row.
        seq_len: Positions of a row.
        pad_id: What fills the rest.

    Returns:
        Rows (R, N) int32.
    """
    lengths_R = kept_C[kept_C > 0]
    rows_RN = np.full((len(lengths_R), seq_len), pad_id, dtype=np.int32)
    rows_RN[np.arange(seq_len) < lengths_R[:, None]] = ids_T
    return rows_RN


def pack_tokens(
    carried_T: np.ndarray, ids_T: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut a stream of tokens at the row length.

    Args:
        carried_T: What was left over before.
        ids_T: What follows.
        seq_len: Positions of a row.

    Returns:
        Rows (R, N) int32, and what is left over, fewer than N tokens.
    """
    stream_T = np.concatenate([carried_T, ids_T])
    full = len(stream_T) // seq_len * seq_len
    return stream_T[:full].reshape(-1, seq_len), stream_T[full:]
