# SPDX-License-Identifier: Apache-2.0
"""Small documents, and a short way to prepare them and read them back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from asymloop_foundry.data.encoding import Encoder, describe
from asymloop_foundry.data.manifest import Manifest, Request
from asymloop_foundry.data.prepare import prepare_split
from asymloop_foundry.data.sources import find_sources

WORDS = (Path(__file__).read_text() * 2).split()


def make_texts(count: int) -> list[str]:
    """Documents of different lengths, no two alike."""
    return [
        f'{number} ' + ' '.join(WORDS[number % 97 : number % 97 + 3 + number * 7 % 60])
        for number in range(count)
    ]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    return path


def request_for(
    tokenizer: PreTrainedTokenizerBase,
    paths: list[str | Path],
    split: str = 'train',
    row_format: str = 'padded',
    seq_len: int = 32,
    text_column: str = 'text',
    limit_tokens: int | None = None,
    limit_documents: int | None = None,
    on_error: str = 'raise',
    rows_per_shard: int = 16,
) -> Request:
    return Request(
        split=split,
        tokenizer=describe(tokenizer, 'test'),
        row_format=row_format,
        seq_len=seq_len,
        text_column=text_column,
        sources=find_sources([str(path) for path in paths]),
        limit_tokens=limit_tokens,
        limit_documents=limit_documents,
        on_error=on_error,
        rows_per_shard=rows_per_shard,
    )


def prepare(
    tokenizer: PreTrainedTokenizerBase,
    paths: list[str | Path],
    out: Path,
    workers: int = 1,
    **options: object,
) -> Manifest:
    request = request_for(tokenizer, paths, **options)  # type: ignore[arg-type]
    return prepare_split(request, Encoder.of(tokenizer), str(out), workers, progress=False)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob('*'))
        if path.is_file()
    }


def read_rows(folder: Path) -> list[list[int]]:
    """All rows in order, by streaming's own reader."""
    from streaming.base.compression import decompress
    from streaming.base.format import reader_from_json

    rows: list[list[int]] = []
    for shard in json.loads((folder / 'index.json').read_text())['shards']:
        packed = (folder / shard['zip_data']['basename']).read_bytes()
        with tempfile.TemporaryDirectory() as copy:
            Path(copy, shard['raw_data']['basename']).write_bytes(
                decompress(shard['compression'], packed)
            )
            reader = reader_from_json(copy, '', shard)
            rows += [reader[number]['tokens'].tolist() for number in range(shard['samples'])]
    return rows
