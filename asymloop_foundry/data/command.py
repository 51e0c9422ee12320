# SPDX-License-Identifier: Apache-2.0
"""The command line of data preparation (``data_prep/convert_fineweb.py``)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from asymloop_foundry.data.checks import check_tokenizer
from asymloop_foundry.data.documents import SourceError
from asymloop_foundry.data.encoding import Encoder, describe, load_tokenizer
from asymloop_foundry.data.manifest import ROW_FORMATS, Manifest, Request, Source
from asymloop_foundry.data.prepare import prepare_split, rows_per_shard
from asymloop_foundry.data.remote import is_remote
from asymloop_foundry.data.shards import OutputError
from asymloop_foundry.data.sources import HUB_REVISION, find_sources, hub_shards
from asymloop_foundry.data.verify import verify_split

PAPER_TRAIN, PAPER_VAL, PAPER_VAL_TOKENS = '0-39', '233', 10_000_000


def numbers(text: str) -> list[int]:
    """Read ``0-39`` or ``0,3,7-9``.

    Args:
        text: Numbers and ranges, both ends included.

    Returns:
        The numbers in order.
    """
    found: list[int] = []
    for part in text.split(','):
        first, _, last = part.partition('-')
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f'{text!r}: give numbers and ranges, such as 0-39 or 0,3,7-9'
            ) from error
    if not found:
        raise argparse.ArgumentTypeError(f'{text!r} names no shard')
    return found


def positive(text: str) -> int:
    """Read a positive whole number, underscores allowed.

    Args:
        text: The number.

    Returns:
        Its value.
    """
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number') from error
    if value < 1:
        raise argparse.ArgumentTypeError(f'{text} is less than 1')
    return value


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """Describe the command line.

    Args:
        description: Text above the options.

    Returns:
        The parser.
    """
    parse = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parse.add_argument
    add('--out', required=True, help='folder for the splits, local or s3://, gs://, oci://')
    add('--train-shards', type=numbers, metavar='N-M', help='FineWeb-Edu-dedup shards to train on')
    add('--val-shards', type=numbers, metavar='N-M', help='FineWeb-Edu-dedup shards to validate on')
    add('--train', nargs='+', metavar='PATH', help='files, folders or patterns to train on instead')
    add(
        '--val', nargs='+', metavar='PATH', help='files, folders or patterns to validate on instead'
    )
    add('--revision', default=HUB_REVISION, help='commit of the hub data set (%(default)s)')
    add('--tokenizer', default='t5-base', help='hub name or folder (%(default)s)')
    add('--pad-token', help='token of the vocabulary to pad with, where the tokenizer has none')
    add('--seq-len', type=positive, default=1024, help='tokens per row (%(default)s)')
    add(
        '--row-format',
        choices=ROW_FORMATS,
        default='padded',
        help='one document a row, or documents joined by EOS and cut (%(default)s)',
    )
    add('--text-column', default='text', help='column or JSON key of the text (%(default)s)')
    add('--limit-tokens', type=positive, help='stop the training split at this many real tokens')
    add('--limit-documents', type=positive, help='stop the training split at this many documents')
    add(
        '--val-limit-tokens',
        type=positive,
        help='the same for validation (10M with --val-shards, none with --val)',
    )
    add('--val-limit-documents', type=positive, help='the same for validation')
    add(
        '--on-error',
        choices=('raise', 'skip'),
        default='raise',
        help='what to do with what cannot be read: fail, or count it and go on (%(default)s)',
    )
    add(
        '--workers',
        type=positive,
        default=os.cpu_count() or 1,
        help='processes that tokenize (%(default)s)',
    )
    add('--staging', help='local folder for unfinished work, needed where --out is remote')
    add('--verify', action='store_true', help='reread everything written and check it')
    add('--samples', type=int, default=2, help='rows to decode and print with --verify')
    return parse


def plan(args: argparse.Namespace) -> dict[str, list[str]]:
    """Decide which paths make which split.

    Args:
        args: The parsed command line.

    Returns:
        Paths by split name.

    Raises:
        ValueError: A split's source is given twice over.
    """
    if args.train and args.train_shards:
        raise ValueError('--train and --train-shards: give one of them.')
    if args.val and args.val_shards:
        raise ValueError('--val and --val-shards: give one of them.')
    if not (args.train or args.val or args.train_shards or args.val_shards):
        args.train_shards, args.val_shards = numbers(PAPER_TRAIN), numbers(PAPER_VAL)
    if args.val_shards and args.val_limit_tokens is None and args.val_limit_documents is None:
        args.val_limit_tokens = PAPER_VAL_TOKENS
    train = args.train or hub_shards(args.train_shards or [], args.revision)
    val = args.val or hub_shards(args.val_shards or [], args.revision)
    return {split: paths for split, paths in (('train', train), ('val', val)) if paths}


def check_disjoint(sources: dict[str, tuple[Source, ...]]) -> None:
    """Refuse to validate on a file that is trained on.

    Args:
        sources: Files by split name.

    Raises:
        ValueError: A file is in both splits.
    """
    trained = {source.identity for source in sources.get('train', ())}
    for source in sources.get('val', ()):
        if source.identity in trained:
            raise ValueError(
                f'{source.path} is a source of both splits: validation would measure memory. '
                'Give validation documents of its own.'
            )


def summary(manifest: Manifest, where: str) -> str:
    """Say what a split holds.

    Args:
        manifest: Its manifest.
        where: Its folder.

    Returns:
        A few lines.
    """
    counts, seq_len = manifest.counts, manifest.request.seq_len
    lines = [
        f'{where}: {counts.rows:,} {manifest.request.row_format} rows of {seq_len} in '
        f'{manifest.shards} shards',
        f'  documents: {counts.documents_read:,} read, {counts.documents_written:,} written, '
        f'{counts.documents_truncated:,} truncated, {counts.documents_empty:,} empty, '
        f'{counts.documents_skipped:,} unreadable',
        f'  tokens: {counts.tokens_kept:,} kept, {counts.tokens_padded:,} pads, '
        f'{counts.tokens_dropped:,} dropped',
    ]
    if counts.groups_skipped:
        lines.append(f'  {counts.groups_skipped:,} files or row groups could not be read')
    lines += [f'  skipped: {reason}' for reason in manifest.skipped[:5]]
    return '\n'.join(lines)


def run(args: argparse.Namespace) -> None:
    """Prepare all splits.

    Args:
        args: The parsed command line.
    """
    if is_remote(args.out) and not args.staging:
        raise ValueError(f'--out {args.out}: give --staging FOLDER for unfinished work.')
    paths = plan(args)
    tokenizer = load_tokenizer(args.tokenizer, args.pad_token)
    check_tokenizer(tokenizer, key='tokenizer')
    record, encoder = describe(tokenizer, args.tokenizer), Encoder.of(tokenizer)
    sources = {split: find_sources(names) for split, names in paths.items()}
    check_disjoint(sources)
    for split, files in sources.items():
        training = split == 'train'
        request = Request(
            split=split,
            tokenizer=record,
            row_format=args.row_format,
            seq_len=args.seq_len,
            text_column=args.text_column,
            sources=files,
            limit_tokens=args.limit_tokens if training else args.val_limit_tokens,
            limit_documents=args.limit_documents if training else args.val_limit_documents,
            on_error=args.on_error,
            rows_per_shard=rows_per_shard(args.seq_len),
        )
        manifest = prepare_split(request, encoder, args.out, args.workers, args.staging)
        where = f'{args.out.rstrip("/")}/{split}'
        print(summary(manifest, where), flush=True)
        if args.verify:
            for line in verify_split(where, tokenizer=tokenizer, samples=args.samples):
                print(f'  {line}', flush=True)


def main(argv: Sequence[str] | None = None, description: str | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; those of the process by default.
        description: Text above the options of ``--help``.

    Returns:
        Exit status.
    """
    args = parser(description).parse_args(argv)
    try:
        run(args)
    except (ValueError, SourceError, OutputError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    return 0
