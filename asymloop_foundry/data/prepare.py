# SPDX-License-Identifier: Apache-2.0
"""Tokenize a split's documents in many processes and write them as MDS shards.

This process reads blocks of documents in order and writes rows in order; the others only tokenize,
and so does this one when it has nothing else to do. So the bytes do not depend on the number of
workers, nor on where an earlier attempt was stopped.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from asymloop_foundry.data.documents import Block, Unreadable
from asymloop_foundry.data.encoding import Encoder
from asymloop_foundry.data.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    Manifest,
    Request,
    read_manifest,
)
from asymloop_foundry.data.remote import fetch_text, is_remote
from asymloop_foundry.data.rows import pack_tokens, pad_documents
from asymloop_foundry.data.shards import OutputError, Resume, UnfinishedSplit, refuse_other_request
from asymloop_foundry.data.sources import read_blocks
from asymloop_foundry.data.work import Encoded, Job, Worker, run_worker, start_worker

# Half of MDSWriter's default: a restart repeats less, and the writing process, which holds the
# shard in several forms at once beside a gigabyte's three quarters of libraries, stays below 1 GiB.
SHARD_BYTES = 1 << 25
SKIPPED_LISTED = 100


def rows_per_shard(seq_len: int) -> int:
    """Rows that fill a shard of 32 MiB before compression.

    Args:
        seq_len: Tokens per row.

    Returns:
        Number of rows, at least one.
    """
    return max(1, SHARD_BYTES // (4 * seq_len))


@dataclasses.dataclass
class _Task:
    """A block on its way."""

    block: Block | Unreadable
    future: Future[Encoded] | None = None
    encoded: Encoded | None = None

    def done(self) -> bool:
        return self.future is None or self.future.done()

    def steal(self, worker: Worker) -> bool:
        """Encode the block here if no other process has begun to."""
        if self.future is None or not isinstance(self.block, Block) or not self.future.cancel():
            return False
        self.encoded = worker(self.block)
        self.future = None
        return True

    def result(self) -> tuple[Block, Encoded] | Unreadable:
        if isinstance(self.block, Unreadable):
            return self.block
        if self.encoded is not None:
            return self.block, self.encoded
        assert self.future is not None
        try:
            return self.block, self.future.result()
        except BrokenProcessPool as error:
            raise OutputError(
                f'a worker process died before it finished {self.block.where}, perhaps for want '
                'of memory. Give the same command again, with fewer --workers if it did: it goes '
                'on where it stopped.'
            ) from error


def _encode_blocks(
    blocks: Iterator[Block | Unreadable], job: Job, workers: int
) -> Generator[tuple[Block, Encoded] | Unreadable, None, None]:
    """Encode blocks, in order, with a bounded number of them under way."""
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
    own = Worker(job)
    if workers == 1:
        for block in blocks:
            yield (block, own(block)) if isinstance(block, Block) else block
        return
    context = multiprocessing.get_context('spawn')
    pool = ProcessPoolExecutor(workers - 1, context, initializer=start_worker, initargs=(job,))
    tasks: deque[_Task] = deque()
    more = True
    try:
        while tasks or more:
            while more and len(tasks) < 4 * workers:
                following = next(blocks, None)
                if following is None:
                    more = False
                elif isinstance(following, Block):
                    tasks.append(_Task(following, pool.submit(run_worker, following)))
                else:
                    tasks.append(_Task(following))
            # From the far end, where the others come last.
            if tasks and (tasks[0].done() or not any(task.steal(own) for task in reversed(tasks))):
                yield tasks.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _RowBuilder:
    """Turns encoded documents into shards of rows, and knows where each shard ends."""

    def __init__(self, request: Request, split: UnfinishedSplit) -> None:
        self.request = request
        self.split = split
        self.counts = copy.copy(split.resume.counts)
        self.skipped = list(split.resume.skipped)
        self.full = False
        self._offset = split.resume.offset
        self._carried_T = np.zeros(0, dtype=np.int32)
        self._held: list[np.ndarray] = []
        self._ends_in_eos = True
        # One shard is compressed and written while the next fills.
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def pass_over(self, unreadable: Unreadable) -> None:
        self.counts.groups_skipped += 1
        self._note(unreadable.reason)

    def add(self, block: Block, encoded: Encoded) -> None:
        before = Resume(block.position, 0, copy.copy(self.counts), tuple(self.skipped))
        taken = self._within_limits(encoded.kept)
        kept_C, full_C = encoded.kept[:taken], encoded.full[:taken]
        ids_T = encoded.ids[: int(kept_C.sum())]
        self._count(kept_C, full_C)
        self.counts.documents_skipped += encoded.skipped
        if encoded.reason:
            self._note(encoded.reason)
        if self.request.row_format == 'padded':
            rows_RN = pad_documents(
                ids_T, kept_C, self.request.seq_len, self.request.tokenizer.pad_id
            )
            rows_RN, first = rows_RN[self._offset :], self._offset
        else:
            first = self._offset - len(self._carried_T)
            if self._offset:
                self._ends_in_eos = ids_T[self._offset - 1] == self.request.tokenizer.eos_id
            rows_RN, self._carried_T = pack_tokens(
                self._carried_T, ids_T[self._offset :], self.request.seq_len
            )
        self._offset = 0
        if len(rows_RN):
            self._ends_in_eos = rows_RN[-1, -1] == self.request.tokenizer.eos_id
        self._add_rows(rows_RN, first, before)

    def _within_limits(self, kept_C: np.ndarray) -> int:
        """How many of a block's documents the limits leave; sets ``full`` at the last."""
        taken = len(kept_C)
        for limit, so_far, more_C in (
            (self.request.limit_tokens, self.counts.tokens_kept, kept_C),
            (self.request.limit_documents, self.counts.documents_written, kept_C > 0),
        ):
            if limit is not None:
                reached = np.flatnonzero(so_far + np.cumsum(more_C) >= limit)
                if len(reached):
                    self.full = True
                    taken = min(taken, int(reached[0]) + 1)
        return taken

    def _count(self, kept_C: np.ndarray, full_C: np.ndarray) -> None:
        counts = self.counts
        written = int(np.count_nonzero(kept_C))
        kept, full = int(kept_C.sum()), int(full_C.sum())
        counts.documents_read += len(kept_C)
        counts.documents_empty += len(kept_C) - written
        counts.documents_written += written
        counts.documents_truncated += int(np.count_nonzero(kept_C < full_C))
        counts.tokens_produced += full
        counts.tokens_kept += kept
        counts.tokens_dropped += full - kept
        counts.eos_kept += written

    def _add_rows(self, rows_RN: np.ndarray, first: int, before: Resume) -> None:
        """Hold rows until they fill a shard.

        ``first`` is where this block's first row begins, in rows or tokens of the block.
        """
        unit = 1 if self.request.row_format == 'padded' else self.request.seq_len
        used = 0
        while len(rows_RN) - used >= (room := self.request.rows_per_shard - self._rows_held()):
            self._held.append(rows_RN[used : used + room])
            used += room
            self._flush(dataclasses.replace(before, offset=first + used * unit))
        if used < len(rows_RN):
            self._held.append(rows_RN[used:])

    def _rows_held(self) -> int:
        return sum(map(len, self._held))

    def _flush(self, resume: Resume | None) -> None:
        held, self._held = self._held, []
        self.wait()
        self._written = self._writer.submit(self.split.add_shard, held, resume)

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def finish(self) -> None:
        request, counts = self.request, self.counts
        if self._held:
            self._flush(None)
        self.wait()
        counts.rows = self.split.rows
        if request.row_format == 'packed':
            tail = len(self._carried_T)
            ends = int(np.count_nonzero(self._carried_T == request.tokenizer.eos_id))
            counts.tokens_kept -= tail
            counts.tokens_dropped += tail
            counts.eos_kept -= ends
            counts.documents_written -= ends - (0 if self._ends_in_eos else min(1, ends))
        counts.tokens_padded = counts.rows * request.seq_len - counts.tokens_kept
        if not counts.rows:
            raise OutputError(
                f'not a single row: {counts.documents_read} documents gave '
                f'{counts.tokens_produced} tokens, and a {request.row_format} row takes '
                f'{"one document" if request.row_format == "padded" else request.seq_len}. Name '
                'more sources, or a shorter --seq-len.'
            )
        self.split.finish(counts, tuple(self.skipped))

    def close(self) -> None:
        self._writer.shutdown()

    def _note(self, reason: str) -> None:
        if len(self.skipped) < SKIPPED_LISTED:
            self.skipped.append(reason)


def prepare_split(
    request: Request,
    encoder: Encoder,
    out: str,
    workers: int = 1,
    staging: str | None = None,
    progress: bool = True,
) -> Manifest:
    """Make a split, continue it, or recognise that it is made.

    Args:
        request: What to make.
        encoder: The tokenizer of ``request.tokenizer``, ready to be sent to the workers.
        out: Folder in which the split's folder will lie, local or an object store's
            (``s3://``, ``gs://``, ``oci://``).
        workers: Processes that tokenize, this one included.
        staging: Local folder for unfinished work where ``out`` is an object store.
        progress: Whether to show a progress bar.

    Returns:
        The split's manifest.

    Raises:
        OutputError: The folder holds something else, another process is at work in it, or it
            cannot be written.
        SourceError: A document cannot be read and ``request.on_error`` is ``raise``.
    """
    if is_remote(out) and staging is None:
        raise ValueError(
            f'out={out!r} needs a local staging folder for unfinished work (--staging).'
        )
    base = Path(staging if is_remote(out) and staging else out)
    remote = f'{out.rstrip("/")}/{request.split}' if is_remote(out) else None
    final = base / request.split
    base.mkdir(parents=True, exist_ok=True)
    lock = FileLock(base / f'.{request.split}.lock', timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise OutputError(
            f'another process is preparing {final}: wait for it or choose another --out.'
        ) from error
    try:
        made = _finished(final, remote, request)
        if made is not None:
            return made
        return _prepare(request, encoder, final, remote, workers, progress)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _finished(final: Path, remote: str | None, request: Request) -> Manifest | None:
    """Recognise a finished split; refuse one that is something else."""
    if final.exists() and any(final.iterdir()):
        manifest = read_manifest(final)
        if manifest is None or not (final / INDEX_NAME).is_file():
            raise OutputError(
                f'{final} is not empty and has no {MANIFEST_NAME}, so it was not made by this '
                'program: choose another --out, or remove it.'
            )
        refuse_other_request(manifest.request, request, final)
        return manifest
    if remote is not None and fetch_text(f'{remote}/{INDEX_NAME}') is not None:
        text = fetch_text(f'{remote}/{MANIFEST_NAME}')
        if text is None:
            raise OutputError(
                f'{remote} has an {INDEX_NAME} and no {MANIFEST_NAME}, so it was not made by this '
                'program: choose another --out.'
            )
        manifest = Manifest.from_json(text)
        refuse_other_request(manifest.request, request, remote)
        return manifest
    return None


def _prepare(
    request: Request,
    encoder: Encoder,
    final: Path,
    remote: str | None,
    workers: int,
    progress: bool,
) -> Manifest:
    split = UnfinishedSplit(final.with_name(f'{final.name}.incomplete'), request, remote)
    if split.manifest is None:
        _fill(split, request, encoder, workers, progress)
    split.rename(final)
    assert split.manifest is not None
    return split.manifest


def _fill(
    split: UnfinishedSplit, request: Request, encoder: Encoder, workers: int, progress: bool
) -> None:
    skip = request.on_error == 'skip'
    job = Job(
        encoder=encoder,
        text_column=request.text_column,
        skip_unreadable=skip,
        eos_id=request.tokenizer.eos_id,
        pad_id=request.tokenizer.pad_id,
        row_format=request.row_format,
        seq_len=request.seq_len,
    )
    builder = _RowBuilder(request, split)
    blocks = read_blocks(request.sources, request.text_column, split.resume.position, skip)
    encoded_blocks = _encode_blocks(blocks, job, workers)
    bar = tqdm(
        desc=request.split,
        unit='tok',
        unit_scale=True,
        initial=builder.counts.tokens_kept,
        total=request.limit_tokens,
        disable=not progress,
    )
    try:
        for item in encoded_blocks:
            if isinstance(item, Unreadable):
                builder.pass_over(item)
                continue
            block, encoded = item
            builder.add(block, encoded)
            bar.update(builder.counts.tokens_kept - bar.n)
            bar.set_postfix_str(
                f'{builder.counts.documents_written} documents, file '
                f'{block.position.source + 1} of {len(request.sources)}',
                refresh=False,
            )
            if builder.full:
                break
        builder.finish()
    finally:
        bar.close()
        encoded_blocks.close()
        builder.close()
