# SPDX-License-Identifier: Apache-2.0
"""A split under construction: finished shards, and a journal that says where to go on.

Everything is written into ``<split>.incomplete`` and becomes ``<split>`` by one rename when the
index and the manifest are there. A shard is entered into the journal after it is on the disk (and
in the object store), with the place in the sources where the next row begins; a process killed at
any moment loses at most the shard it was filling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asymloop_foundry.data.documents import Position
from asymloop_foundry.data.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    Counts,
    Manifest,
    Request,
    dumps,
    read_manifest,
    request_from_dict,
    sha256_of,
    write_whole,
)
from asymloop_foundry.data.remote import open_uploader

COLUMNS = {'tokens': 'ndarray:int32'}
COMPRESSION = 'zstd'
HASHES = ['sha1', 'xxh64']

_REQUEST = 'request.json'
_JOURNAL = 'journal.jsonl'
_WRITING = 'writing'


class OutputError(RuntimeError):
    """The output cannot be written, or is not what was asked for."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """Where the next row begins.

    Attributes:
        position: The block of documents it begins in.
        offset: Rows (``padded``) or tokens (``packed``) of that block that are written already.
        counts: What had been counted before that block.
        skipped: What had been passed over before that block.
    """

    position: Position = Position(0, 0, 0)  # noqa: RUF009
    offset: int = 0
    counts: Counts = dataclasses.field(default_factory=Counts)
    skipped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For the journal."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Resume:
        """From the journal."""
        return cls(
            position=Position(*data['position']),
            offset=data['offset'],
            counts=Counts(**data['counts']),
            skipped=tuple(data['skipped']),
        )


class UnfinishedSplit:
    """The folder of a split that is being made.

    Args:
        folder: ``<split>.incomplete``, made if it is not there.
        request: What is being made.
        remote: Object store folder that the files go to, or None to keep them here.

    Raises:
        OutputError: The folder was begun for another request.
    """

    def __init__(self, folder: Path, request: Request, remote: str | None = None) -> None:
        self.folder = folder
        self.request = request
        self.uploader = None
        self.entries: list[dict[str, Any]] = []
        self.resume = Resume()
        # With an index all that is left to do is to give the folder its name.
        self.manifest: Manifest | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX_NAME).is_file():
            self.manifest = read_manifest(folder)
        self._check_request()
        self._read_journal(uploaded=remote is not None)
        if remote is not None:
            self.uploader = open_uploader(str(folder), remote)

    def _check_request(self) -> None:
        path = self.folder / _REQUEST
        if self.manifest is not None:
            refuse_other_request(self.manifest.request, self.request, self.folder)
        elif path.is_file():
            begun = request_from_dict(json.loads(path.read_text(encoding='utf-8')))
            refuse_other_request(begun, self.request, self.folder)
        else:
            strangers = [name for name in os.listdir(self.folder) if not name.endswith('.tmp')]
            if strangers:
                raise OutputError(
                    f'{self.folder} holds {strangers[0]!r} and was not begun by this program: '
                    'choose another --out, or remove it.'
                )
            write_whole(path, dumps(dataclasses.asdict(self.request)))

    def _read_journal(self, uploaded: bool) -> None:
        """Take up every shard that was finished; rewrite the journal without a torn end."""
        path = self.folder / _JOURNAL
        lines = path.read_text(encoding='utf-8').split('\n') if path.is_file() else []
        good = []
        for line in lines[:-1]:
            record = json.loads(line)
            packed = record['shard']['zip_data']
            shard = self.folder / packed['basename']
            if not uploaded and not (shard.is_file() and shard.stat().st_size == packed['bytes']):
                break
            self.entries.append(record['shard'])
            self.resume = Resume.from_dict(record['next'])
            good.append(line + '\n')
        if lines and ''.join(good) != '\n'.join(lines):
            write_whole(path, ''.join(good))

    @property
    def rows(self) -> int:
        """Rows in finished shards."""
        return sum(entry['samples'] for entry in self.entries)

    def add_shard(self, parts: Sequence[np.ndarray], resume: Resume | None) -> None:
        """Write one shard through MDSWriter and enter it into the journal.

        Args:
            parts: Its rows, in arrays (R, N) int32.
            resume: Where the row after the last begins; None for a shard that the sources' end
                left short, which a restart makes again.

        Raises:
            OutputError: It cannot be written.
        """
        number = len(self.entries)
        try:
            entry = self._write_shard(parts, number)
            if self.uploader is not None:
                self.uploader.upload_file(entry['zip_data']['basename'])
            if resume is not None:
                with open(self.folder / _JOURNAL, 'a', encoding='utf-8') as journal:
                    journal.write(json.dumps({'shard': entry, 'next': resume.to_dict()}) + '\n')
                    journal.flush()
                    os.fsync(journal.fileno())
        except Exception as error:
            raise OutputError(
                f'shard {number} cannot be written to {self.folder}: {error}. Free the space or '
                f'restore the connection and give the same command again: it goes on after shard '
                f'{number - 1}.'
                if number
                else f'the first shard cannot be written to {self.folder}: {error}.'
            ) from error
        self.entries.append(entry)

    def _write_shard(self, parts: Sequence[np.ndarray], number: int) -> dict[str, Any]:
        from streaming import MDSWriter

        writing = self.folder / _WRITING
        shutil.rmtree(writing, ignore_errors=True)
        # One writer per shard, so that every shard stands by itself and its bytes depend on its
        # rows alone.
        writer = MDSWriter(
            columns=COLUMNS,
            out=str(writing),
            compression=COMPRESSION,
            hashes=HASHES,
            size_limit=None,
        )
        for row_N in itertools.chain.from_iterable(parts):
            writer.write({'tokens': row_N})
        writer.finish()
        (entry,) = json.loads((writing / INDEX_NAME).read_text(encoding='utf-8'))['shards']
        written = writing / entry['zip_data']['basename']
        for data in (entry['raw_data'], entry['zip_data']):
            data['basename'] = data['basename'].replace('shard.00000.', f'shard.{number:05}.')
        with open(written, 'rb') as file:
            os.fsync(file.fileno())
        os.replace(written, self.folder / entry['zip_data']['basename'])
        shutil.rmtree(writing)
        return entry

    def finish(self, counts: Counts, skipped: tuple[str, ...]) -> None:
        """Write the manifest and then the index.

        Args:
            counts: What became of documents and tokens.
            skipped: What was passed over.

        Raises:
            OutputError: They cannot be written.
        """
        index = json.dumps({'version': 2, 'shards': self.entries}, sort_keys=True)
        self.manifest = Manifest(
            request=self.request,
            counts=counts,
            shards=len(self.entries),
            index_sha256=sha256_of(index),
            skipped=skipped,
        )
        with self._completing():
            write_whole(self.folder / MANIFEST_NAME, self.manifest.to_json())
            write_whole(self.folder / INDEX_NAME, index)

    def rename(self, final: Path) -> None:
        """Give a finished folder its name, everywhere.

        Args:
            final: The split's folder.

        Raises:
            OutputError: It cannot be uploaded or renamed.
        """
        with self._completing():
            if self.uploader is not None:
                # The index last: whoever streams takes a folder with an index for complete. The
                # uploader removes what it has uploaded, and these two stay here.
                for name in (MANIFEST_NAME, INDEX_NAME):
                    text = (self.folder / name).read_text(encoding='utf-8')
                    self.uploader.upload_file(name)
                    write_whole(self.folder / name, text)
            shutil.rmtree(self.folder / _WRITING, ignore_errors=True)
            for name in (_JOURNAL, _REQUEST):
                (self.folder / name).unlink(missing_ok=True)
            os.replace(self.folder, final)

    @contextlib.contextmanager
    def _completing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OutputError(
                f'{self.folder} cannot be completed: {error}. Give the same command again.'
            ) from error


def refuse_other_request(made: Request, asked: Request, folder: Path | str) -> None:
    """Refuse to add to, or take for finished, what was made for another request.

    Args:
        made: What the folder holds.
        asked: What is wanted now.
        folder: The folder.

    Raises:
        OutputError: They differ; every difference is named.
    """
    differences = made.differences(asked)
    if differences:
        raise OutputError(
            f'{folder} was prepared with another request:\n  '
            + '\n  '.join(differences)
            + '\nGive the same request to continue it, choose another --out, or remove the folder.'
        )
