# SPDX-License-Identifier: Apache-2.0
"""Killed anywhere, resumed, or spread over processes: the bytes stay the same."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from data.preparing import (
    folder_bytes,
    make_texts,
    prepare,
    read_rows,
    request_for,
    write_jsonl,
)
from transformers import PreTrainedTokenizerBase

from asymloop_foundry.data import shards, sources
from asymloop_foundry.data.encoding import Encoder
from asymloop_foundry.data.manifest import read_manifest
from asymloop_foundry.data.prepare import prepare_split
from asymloop_foundry.data.shards import OutputError

FORMATS = ('padded', 'packed')


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few documents make many blocks, and shards end in the middle of one."""
    monkeypatch.setattr(sources, 'BLOCK_BYTES', 2000)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    texts = make_texts(150)
    return [
        write_jsonl(tmp_path / 'a.jsonl', texts[:70]),
        write_jsonl(tmp_path / 'b.jsonl', ['', *texts[70:]]),
    ]


def in_child(run: Callable[[], object]) -> int:
    """Run in a forked process; returns what ``os.waitpid`` says of its end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def kill_at(number: int) -> None:
    """SIGKILL this process in front of its nth step that changes the disk for good."""
    steps = iter(range(number))

    def counted(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **kwargs)

    for module, name in ((os, 'fsync'), (os, 'replace'), (shutil, 'rmtree'), (Path, 'unlink')):
        step = getattr(module, name)
        if module is Path:
            setattr(module, name, lambda *args, _step=step, **kw: counted(_step, *args, **kw))
        else:
            setattr(module, name, partial(counted, step))


@pytest.mark.parametrize('row_format', FORMATS)
def test_killed_before_any_step_and_run_again_it_gives_the_same_bytes(
    row_format: str, paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = {'padded': 60, 'packed': 100}[row_format]
    make = partial(prepare, bpe, paths, row_format=row_format, rows_per_shard=rows)
    make(tmp_path / 'whole')
    whole = folder_bytes(tmp_path / 'whole')
    assert sum(name.endswith('.zstd') for name in whole) > 2
    killed = 0
    for number in range(0, 1000, {'padded': 1, 'packed': 3}[row_format]):
        out = tmp_path / f'killed-{number}'
        status = in_child(lambda: (kill_at(number), make(out)))  # noqa: B023
        if status == 0:
            break
        killed += 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        complete = (out / 'train').exists()
        assert complete == (out / 'train' / 'index.json').exists()
        make(out)
        assert folder_bytes(out / 'train') == folder_bytes(tmp_path / 'whole' / 'train'), number
    assert killed > 5
    assert folder_bytes(out) == whole


def test_killed_again_and_again_it_still_gives_the_same_bytes(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    make = partial(prepare, bpe, paths, row_format='packed', rows_per_shard=20)
    make(tmp_path / 'whole')
    attempts = 0
    # Nine steps are enough for one more shard each time.
    while in_child(lambda: (kill_at(9), make(tmp_path / 'out'))) != 0:
        attempts += 1
        assert attempts < 50
    assert attempts > 3
    assert folder_bytes(tmp_path / 'out') == folder_bytes(tmp_path / 'whole')


def test_sigkill_in_the_middle_of_work_leaves_no_process_and_loses_nothing(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Two processes beside the first, which is killed once its second shard is on the disk."""
    make = partial(prepare, bpe, paths, row_format='padded', rows_per_shard=16)
    make(tmp_path / 'whole')
    out = tmp_path / 'out'
    child = os.fork()
    if child == 0:
        slow = shards.UnfinishedSplit.add_shard

        def slowly(*args: Any) -> None:
            slow(*args)
            time.sleep(0.5)

        shards.UnfinishedSplit.add_shard = slowly
        try:
            make(out, workers=3)
        finally:
            os._exit(0)
    workers: set[int] = set()
    while not (out / 'train.incomplete' / 'shard.00001.mds.zstd').exists():
        workers |= descendants(child)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (out / 'train').exists()
    assert len(workers) >= 2
    deadline = time.monotonic() + 30
    while any(running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    make(out, workers=2)
    assert folder_bytes(out) == folder_bytes(tmp_path / 'whole')


def descendants(process: int) -> set[int]:
    try:
        children = Path(f'/proc/{process}/task/{process}/children').read_text()
    except FileNotFoundError:
        return set()
    return {int(child) for child in children.split()}


def running(process: int) -> bool:
    try:
        return Path(f'/proc/{process}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize('row_format', FORMATS)
def test_bytes_do_not_depend_on_the_number_of_workers(
    row_format: str, paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for workers in (1, 3):
        prepare(bpe, paths, tmp_path / str(workers), workers=workers, row_format=row_format)
    assert folder_bytes(tmp_path / '1') == folder_bytes(tmp_path / '3')


def test_a_torn_journal_line_or_a_lost_shard_is_made_again(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    make = partial(prepare, bpe, paths, row_format='packed')
    make(tmp_path / 'whole')
    for name, spoil in {
        'torn': lambda folder: os.truncate(
            folder / 'journal.jsonl', (folder / 'journal.jsonl').stat().st_size - 20
        ),
        'lost': lambda folder: (folder / 'shard.00001.mds.zstd').unlink(),
        'short': lambda folder: os.truncate(folder / 'shard.00001.mds.zstd', 10),
    }.items():
        out = tmp_path / name
        assert in_child(lambda: (kill_at(20), make(out))) != 0  # noqa: B023
        spoil(out / 'train.incomplete')
        make(out)
        assert folder_bytes(out) == folder_bytes(tmp_path / 'whole'), name


def test_a_finished_split_is_left_alone(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    first = prepare(bpe, paths, tmp_path / 'out')
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / 'out' / 'train').iterdir()}
    assert prepare(bpe, paths, tmp_path / 'out') == first
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / 'out' / 'train').iterdir()}


@pytest.mark.parametrize('state', ['finished', 'begun'])
@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'seq_len': 16}, r'seq_len: 32, not 16'),
        ({'row_format': 'packed'}, r'row_format: padded, not packed'),
        ({'limit_tokens': 50}, r'limit_tokens: None, not 50'),
        ({'on_error': 'skip'}, r'on_error: raise, not skip'),
        ({'paths': 1}, r'sources: 2 files, not 1'),
        ({'edit': True}, r'sources\[1\]: .*b.jsonl \(\d+ bytes, .*\), not .*b.jsonl'),
        ({'tokenizer': True}, r'tokenizer.pad_id: 0 \(test\), not 2 \(test\)'),
    ],
)
def test_a_different_request_is_refused_and_the_difference_named(
    state: str,
    change: dict[str, Any],
    message: str,
    paths: list[Path],
    bpe: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    out = tmp_path / 'out'
    begin = partial(prepare, bpe, paths, out)
    if state == 'finished':
        begin()
    else:
        assert in_child(lambda: (kill_at(12), begin())) != 0
    (out / '.train.lock').touch()
    before = folder_bytes(out)
    options = {
        key: value for key, value in change.items() if key not in ('paths', 'edit', 'tokenizer')
    }
    if 'edit' in change:
        paths[1].write_text(paths[1].read_text().replace('"text"', '"next"', 1))
    tokenizer = bpe
    if 'tokenizer' in change:
        tokenizer = type(bpe)(
            tokenizer_object=bpe.backend_tokenizer, eos_token='<eos>', pad_token='<spare>'
        )
    with pytest.raises(OutputError, match=message):
        prepare(tokenizer, paths[: change.get('paths', 2)], out, **options)
    (out / '.train.lock').touch()
    assert folder_bytes(out) == before


def test_sources_may_move_between_interruption_and_restart(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    out = tmp_path / 'out'
    assert in_child(lambda: (kill_at(12), prepare(bpe, paths, out))) != 0
    (tmp_path / 'moved').mkdir()
    moved = [path.rename(tmp_path / 'moved' / path.name) for path in paths]
    assert prepare(bpe, moved, out).counts.rows == 150


def test_a_folder_of_something_else_is_refused(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / 'out' / 'train').mkdir(parents=True)
    (tmp_path / 'out' / 'train' / 'index.json').write_text('{}')
    with pytest.raises(OutputError, match=r'train is not empty and has no manifest.json.*choose'):
        prepare(bpe, paths, tmp_path / 'out')


def test_two_processes_do_not_work_in_one_folder(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    from filelock import FileLock

    with (
        FileLock(tmp_path / '.train.lock'),
        pytest.raises(OutputError, match=r'another process is preparing .*train'),
    ):
        prepare(bpe, paths, tmp_path)


def test_a_full_disk_is_named_and_the_same_command_goes_on(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The limit on file sizes stands in for the disk: the write itself fails."""
    make = partial(prepare, bpe, paths, row_format='padded', rows_per_shard=40)
    make(tmp_path / 'whole')

    def fail() -> None:
        add_shard = shards.UnfinishedSplit.add_shard

        def then_fill_the_disk(*args: Any) -> None:
            add_shard(*args)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

        shards.UnfinishedSplit.add_shard = then_fill_the_disk
        with pytest.raises(OutputError, match=r'shard 1 cannot be written .*large.*after shard 0'):
            make(tmp_path / 'out')

    assert in_child(fail) == 0
    assert not (tmp_path / 'out' / 'train').exists()
    make(tmp_path / 'out')
    assert folder_bytes(tmp_path / 'out') == folder_bytes(tmp_path / 'whole')


@pytest.mark.parametrize('row_format', FORMATS)
def test_limits_stop_after_the_document_that_reaches_them(
    row_format: str, paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    seq_len = 512
    lengths = [len(bpe(text)['input_ids']) + 1 for text in make_texts(150)]
    make = partial(prepare, bpe, paths, row_format=row_format, seq_len=seq_len)
    counts = make(tmp_path / 'documents', limit_documents=75).counts
    assert counts.documents_read - counts.documents_empty == 75
    assert counts.tokens_produced == sum(lengths[:75])
    limit = sum(lengths[:50]) - 3
    for number, value in enumerate((limit, limit + 3)):
        counts = make(tmp_path / f'tokens-{number}', limit_tokens=value).counts
        assert counts.tokens_produced == sum(lengths[:50])
    both = make(tmp_path / 'both', limit_tokens=limit, limit_documents=10).counts
    assert both.tokens_produced == sum(lengths[:10])


def test_no_row_at_all_is_an_error(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / 'a.jsonl', ['', ' short'])
    with pytest.raises(OutputError, match=r'not a single row: 2 documents gave \d+ tokens.*32'):
        prepare(bpe, [source], tmp_path, row_format='packed')
    assert not (tmp_path / 'train').exists()


def test_the_manifest_says_nothing_of_time_place_or_workers(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prepare(bpe, paths, tmp_path / 'a')
    manifest = json.loads((tmp_path / 'a' / 'train' / 'manifest.json').read_text())
    assert sorted(manifest) == [
        'counts',
        'format_version',
        'index_sha256',
        'request',
        'shards',
        'skipped',
    ]
    assert [source['path'] for source in manifest['request']['sources']] == list(map(str, paths))
    read = read_manifest(tmp_path / 'a' / 'train')
    assert read is not None
    assert read.to_json() == (tmp_path / 'a' / 'train' / 'manifest.json').read_text()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder served under the S3 protocol: as much of it as an uploader and a reader use."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    root = tmp_path / 'bucket'
    root.mkdir()

    class S3(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b'', head: bool = False) -> None:
            self.send_response(status)
            self.send_header('Content-Length', str(len(body)))
            self.send_header('ETag', '"x"')
            self.end_headers()
            if not head:
                self.wfile.write(body)

        def file(self) -> Path:
            return root / self.path.split('?')[0].strip('/')

        def do_PUT(self) -> None:
            if self.headers.get('Transfer-Encoding') == 'chunked' or 'aws-chunked' in (
                self.headers.get('Content-Encoding') or ''
            ):
                body = b''
                while size := int(self.rfile.readline().split(b';')[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
            else:
                body = self.rfile.read(int(self.headers['Content-Length']))
            if self.file().parent.is_file():
                self.answer(403)
                return
            self.file().parent.mkdir(parents=True, exist_ok=True)
            self.file().write_bytes(body)
            self.answer(200)

        def do_GET(self, head: bool = False) -> None:
            if self.file().is_file():
                self.answer(200, self.file().read_bytes(), head)
            else:
                self.answer(200 if head and self.file().is_dir() else 404, head=head)

        def do_HEAD(self) -> None:
            self.do_GET(head=True)

    server = ThreadingHTTPServer(('127.0.0.1', 0), S3)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        'S3_ENDPOINT_URL': f'http://127.0.0.1:{server.server_port}',
        'AWS_ACCESS_KEY_ID': 'any',
        'AWS_SECRET_ACCESS_KEY': 'any',
        'AWS_DEFAULT_REGION': 'us-east-1',
    }.items():
        monkeypatch.setenv(name, value)
    (root / 'corpus').mkdir()
    yield root
    server.shutdown()
    server.server_close()


def test_an_object_store_gets_the_same_files_and_the_index_last(
    bucket: Path, paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prepare(bpe, paths, tmp_path / 'local')
    request, encoder = request_for(bpe, paths), Encoder.of(bpe)
    options = {'staging': str(tmp_path / 'staging'), 'progress': False}

    def make() -> object:
        return prepare_split(request, encoder, 's3://corpus', **options)

    assert in_child(lambda: (kill_at(18), make())) != 0
    uploaded = sorted(path.name for path in (bucket / 'corpus' / 'train').iterdir())
    assert uploaded
    assert 'index.json' not in uploaded
    manifest = make()
    assert folder_bytes(bucket / 'corpus') == folder_bytes(tmp_path / 'local')
    assert not list((tmp_path / 'staging').rglob('*.zstd'))

    shutil.rmtree(tmp_path / 'staging')
    assert make() == manifest
    with pytest.raises(OutputError, match=r's3://corpus/train was prepared with another request'):
        prepare_split(request_for(bpe, paths, seq_len=16), encoder, 's3://corpus', **options)
    (bucket / 'corpus/train/manifest.json').unlink()
    shutil.rmtree(tmp_path / 'staging')
    with pytest.raises(OutputError, match=r'has an index.json and no manifest.json'):
        make()


def test_a_shard_that_cannot_be_uploaded_stops_the_work_and_is_named(
    bucket: Path,
    paths: list[Path],
    bpe: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr('streaming.base.util.sleep', lambda _: None)
    request, encoder = request_for(bpe, paths), Encoder.of(bpe)
    (bucket / 'corpus' / 'train').write_text('in the way: nothing can be put below it')
    with pytest.raises(OutputError, match=r'the first shard cannot be written'):
        prepare_split(request, encoder, 's3://corpus', staging=str(tmp_path / 's'), progress=False)
    (bucket / 'corpus' / 'train').unlink()
    prepare_split(request, encoder, 's3://corpus', staging=str(tmp_path / 's'), progress=False)
    assert len(list((bucket / 'corpus' / 'train').glob('*.zstd'))) == 10


def test_rows_are_in_the_order_of_the_documents(
    paths: list[Path], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prepare(bpe, paths, tmp_path / 'out', workers=2, seq_len=32)
    starts = [bpe(f'{number} ')['input_ids'] for number in range(150)]
    rows = read_rows(tmp_path / 'out' / 'train')
    assert len(rows) == 150
    for row, start in zip(rows, starts, strict=True):
        assert row[: len(start) - 1] == start[:-1]
