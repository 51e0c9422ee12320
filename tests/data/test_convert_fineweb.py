# SPDX-License-Identifier: Apache-2.0
"""The command line: the paper's data by default, anyone's by naming it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from data.preparing import make_texts, read_rows, write_jsonl

from asymloop_foundry.data import command
from asymloop_foundry.data.manifest import read_manifest


def test_without_sources_it_plans_the_paper_s_data() -> None:
    args = command.parser().parse_args(['--out', 'x'])
    paths = command.plan(args)
    assert paths['train'][0].endswith('/fineweb-edu-dedup/train-00000-of-00234.parquet')
    assert paths['train'][-1].endswith('/train-00039-of-00234.parquet')
    assert len(paths['train']) == 40
    assert [path.rsplit('/', 1)[1] for path in paths['val']] == ['train-00233-of-00234.parquet']
    assert (args.tokenizer, args.seq_len, args.row_format) == ('t5-base', 1024, 'padded')
    assert args.val_limit_tokens == 10_000_000
    assert args.limit_tokens is None


def test_named_sources_are_taken_whole_and_alone() -> None:
    args = command.parser().parse_args(['--out', 'x', '--train', 'a.txt'])
    assert command.plan(args) == {'train': ['a.txt']}
    args = command.parser().parse_args(['--out', 'x', '--val', 'a.txt'])
    assert command.plan(args) == {'val': ['a.txt']}
    assert args.val_limit_tokens is None


@pytest.mark.parametrize(
    ('text', 'numbers'), [('0-2', [0, 1, 2]), ('5', [5]), ('0,3,7-9', [0, 3, 7, 8, 9])]
)
def test_shards_are_numbers_and_ranges(text: str, numbers: list[int]) -> None:
    assert command.numbers(text) == numbers


def test_real_text_is_prepared_verified_and_summed_up(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = data_dir / 'fineweb_edu'
    arguments = ['--out', str(tmp_path), '--train', str(texts / 'train_small.jsonl')]
    arguments += ['--val', str(texts / 'validation.jsonl'), '--val-limit-tokens', '10_000']
    arguments += [
        '--tokenizer',
        str(data_dir / 'tokenizers' / 't5-base'),
        '--limit-documents',
        '50',
    ]
    arguments += ['--seq-len', '256', '--workers', '1', '--verify']
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert 'train: 50 padded rows of 256 in 1 shards' in out
    assert 'documents: 50 read, 50 written' in out
    assert out.count('shards match their hashes') == 2
    manifest = read_manifest(tmp_path / 'val')
    assert manifest is not None
    counts = manifest.counts
    assert 10_000 <= counts.tokens_kept < 10_256
    first = json.loads((texts / 'validation.jsonl').read_text().splitlines()[0])['text']
    assert ' '.join(first.split())[:100] in out
    assert len(read_rows(tmp_path / 'val')) == counts.rows


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--train', 'a.jsonl', '--train-shards', '0'], 'error: --train and --train-shards'),
        (['--train', 'a.jsonl', '--val', 'a.jsonl'], 'is a source of both splits'),
        (['--train', 'b.jsonl'], "error: source 'b.jsonl'"),
        (['--train', 'a.jsonl', '--tokenizer', 'SMOLLM'], 'has no pad token. Give a reserved'),
        (['--train', 'a.jsonl', '--out', 's3://bucket/x'], 'give --staging FOLDER'),
    ],
)
def test_bad_requests_end_in_one_line_that_says_what_to_do(
    arguments: list[str],
    message: str,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / 'a.jsonl', make_texts(3))
    smollm = str(data_dir / 'tokenizers' / 'smollm-135m')
    arguments = [smollm if argument == 'SMOLLM' else argument for argument in arguments]
    t5 = ['--tokenizer', str(data_dir / 'tokenizers' / 't5-base')]
    assert command.main(['--out', 'out', '--workers', '1', *t5, *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_smollm_is_prepared_with_a_reserved_token_as_its_pad(
    data_dir: Path, tmp_path: Path
) -> None:
    arguments = ['--train', str(write_jsonl(tmp_path / 'a.jsonl', make_texts(3)))]
    arguments += ['--tokenizer', str(data_dir / 'tokenizers' / 'smollm-135m')]
    arguments += ['--pad-token', '<empty_output>', '--out', str(tmp_path), '--workers', '1']
    assert command.main(arguments) == 0
    manifest = read_manifest(tmp_path / 'train')
    assert manifest is not None
    record = manifest.request.tokenizer
    assert (record.pad_token, record.eos_id) == ('<empty_output>', 0)
    assert read_rows(tmp_path / 'train')[0][-1] == record.pad_id != record.eos_id


def test_the_script_is_the_command_and_light_for_workers_to_import() -> None:
    script = Path(__file__).parents[2] / 'data_prep' / 'convert_fineweb.py'
    shown = subprocess.run(
        [sys.executable, script, '--help'], capture_output=True, text=True, check=True
    )
    assert 'Interrupted, the same command goes on where it stopped.' in shown.stdout
    code = (
        f'import runpy, sys; runpy.run_path({str(script)!r}, run_name="__mp_main__")\n'
        'import asymloop_foundry.data.work\n'
        'print([m for m in ("pyarrow", "fsspec", "transformers", "torch") if m in sys.modules])'
    )
    found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == '[]'
