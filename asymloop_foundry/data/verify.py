# SPDX-License-Identifier: Apache-2.0
"""Reread a prepared split and hold it against its manifest."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from asymloop_foundry.data.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    Manifest,
    Request,
    sha256_of,
)
from asymloop_foundry.data.remote import fetch_file, fetch_text, is_remote
from asymloop_foundry.data.shards import OutputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def verify_split(
    where: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    samples: int = 0,
    progress: bool = True,
) -> Iterator[str]:
    """Check every shard's hashes, every row's form, and the totals.

    Args:
        where: The split's folder, local or in an object store (its shards are then fetched one
            at a time).
        tokenizer: The tokenizer to decode samples with.
        samples: How many rows to decode, evenly spread over the split.
        progress: Whether to show a progress bar.

    Yields:
        Lines for people: the samples, then what was found right.

    Raises:
        OutputError: A shard is missing or damaged, a row is malformed, or a total differs; the
            message names the file or the count.
    """
    manifest, index = _read_head(where)
    request = manifest.request
    totals = dict.fromkeys(('rows', 'tokens_kept', 'tokens_padded', 'eos_kept'), 0)
    wanted = set(np.linspace(0, max(0, manifest.counts.rows - 1), samples, dtype=int).tolist())
    bar = tqdm(index['shards'], desc='verify', unit='shard', disable=not progress)
    for shard in bar:
        name = shard['zip_data']['basename']
        rows_RN = _read_rows(where, shard, request)
        _check_rows(rows_RN, request, f'{where}/{name}')
        for number in range(len(rows_RN)):
            if tokenizer is not None and totals['rows'] + number in wanted:
                row_N = rows_RN[number]
                text = tokenizer.decode(row_N[: _real_tokens(row_N[None], request)[0]])
                yield f'row {totals["rows"] + number}: {text[:200]!r} ... {text[-60:]!r}'
        real = int(_real_tokens(rows_RN, request).sum())
        totals['rows'] += len(rows_RN)
        totals['tokens_kept'] += real
        totals['tokens_padded'] += rows_RN.size - real
        totals['eos_kept'] += int(np.count_nonzero(rows_RN == request.tokenizer.eos_id))
    counts = manifest.counts
    for name, found in totals.items():
        if found != getattr(counts, name):
            raise OutputError(
                f'{where}: {found} {name} in the shards, {getattr(counts, name)} in '
                f'{MANIFEST_NAME}. Prepare the split again.'
            )
    if counts.tokens_produced != counts.tokens_kept + counts.tokens_dropped:
        raise OutputError(
            f'{where}/{MANIFEST_NAME}: {counts.tokens_produced} tokens produced are not '
            f'{counts.tokens_kept} kept and {counts.tokens_dropped} dropped.'
        )
    yield (
        f'verified: {manifest.shards} shards match their hashes; {counts.rows:,} rows, '
        f'{counts.tokens_kept:,} tokens, {counts.eos_kept:,} EOS as the manifest says'
    )


def _read_head(where: str) -> tuple[Manifest, dict[str, Any]]:
    texts = []
    for name in (MANIFEST_NAME, INDEX_NAME):
        if is_remote(where):
            text = fetch_text(f'{where}/{name}')
        else:
            path = Path(where) / name
            text = path.read_text(encoding='utf-8') if path.is_file() else None
        if text is None:
            raise OutputError(f'{where} has no {name}: it is not a finished split of this program.')
        texts.append(text)
    manifest = Manifest.from_json(texts[0])
    if sha256_of(texts[1]) != manifest.index_sha256:
        raise OutputError(
            f'{where}/{INDEX_NAME} is not the one that {MANIFEST_NAME} was made with.'
        )
    return manifest, json.loads(texts[1])


def _read_rows(where: str, shard: dict[str, Any], request: Request) -> np.ndarray:
    """Read, check and unpack one shard into rows (R, N)."""
    from streaming.base.compression import decompress
    from streaming.base.format.mds.encodings import mds_decode
    from streaming.base.hashing import get_hash

    packed = shard['zip_data']
    name = f'{where}/{packed["basename"]}'
    data = _read_file(where, packed['basename'])
    for step, (info, content) in enumerate(((packed, data), (shard['raw_data'], b''))):
        if step:
            content = data = decompress(shard['compression'], data)
        hashes = {algorithm: get_hash(algorithm, content) for algorithm in info['hashes']}
        if len(content) != info['bytes'] or hashes != info['hashes']:
            raise OutputError(
                f'{name} is damaged ({len(content)} bytes, {info["bytes"]} expected, or another '
                'hash). Remove the split and prepare it again.'
            )
    count = int(np.frombuffer(data, np.uint32, 1)[0])
    offsets = np.frombuffer(data, np.uint32, count + 1, offset=4).tolist()
    (encoding,) = shard['column_encodings']
    rows = [
        mds_decode(encoding, data[begin + 4 : end]) for begin, end in itertools.pairwise(offsets)
    ]
    if count != shard['samples'] or any(row.shape != (request.seq_len,) for row in rows):
        raise OutputError(f'{name}: not {shard["samples"]} rows of {request.seq_len} tokens.')
    return np.stack(rows)


def _read_file(where: str, name: str) -> bytes:
    if not is_remote(where):
        path = Path(where) / name
        if not path.is_file():
            raise OutputError(f'{path} is missing. Remove the split and prepare it again.')
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        local = os.path.join(folder, name)
        try:
            fetch_file(f'{where}/{name}', local)
        except Exception as error:
            raise OutputError(f'{where}/{name} cannot be fetched: {error}') from error
        return Path(local).read_bytes()


def _real_tokens(rows_RN: np.ndarray, request: Request) -> np.ndarray:
    """Tokens of each row before its padding (R,)."""
    if request.row_format == 'packed':
        return np.full(len(rows_RN), request.seq_len)
    return request.seq_len - (rows_RN[:, ::-1] != request.tokenizer.pad_id).argmax(axis=1)


def _check_rows(rows_RN: np.ndarray, request: Request, name: str) -> None:
    tokenizer = request.tokenizer
    if rows_RN.min() < 0 or rows_RN.max() >= tokenizer.vocab_size:
        raise OutputError(
            f'{name}: ids from {rows_RN.min()} to {rows_RN.max()}, with a vocabulary of '
            f'{tokenizer.vocab_size}.'
        )
    if request.row_format == 'padded':
        ends_R = _real_tokens(rows_RN, request) - 1
        is_eos_RN = rows_RN == tokenizer.eos_id
        last_R = is_eos_RN[np.arange(len(rows_RN)), ends_R]
        wrong = np.flatnonzero((is_eos_RN.sum(axis=1) != 1) | ~last_R)
        if len(wrong):
            raise OutputError(f'{name}: row {wrong[0]} does not hold one document ending in EOS.')
