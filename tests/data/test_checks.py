# SPDX-License-Identifier: Apache-2.0
"""Training refuses data it would misread, and says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.preparing import make_texts, prepare, write_jsonl
from streaming import MDSWriter
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from asymloop_foundry.data.checks import check_loaders, check_tokenizer, check_training_data

KEY = 'train_loader.dataset'


@pytest.fixture(scope='module')
def padded(bpe: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp('padded')
    prepare(bpe, [write_jsonl(out / 'a.jsonl', make_texts(40))], out)
    return out


def check(dataset: dict[str, Any], tokenizer: PreTrainedTokenizerBase, seq_len: int = 32) -> None:
    check_training_data(dataset, tokenizer, seq_len, KEY)


def changed(tokenizer: PreTrainedTokenizerBase, **tokens: Any) -> PreTrainedTokenizerBase:
    given = {'eos_token': '<eos>', 'pad_token': '<pad>', **tokens}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **given)


def write_tokens(folder: Path, dtype: str | None, rows: list[np.ndarray], **options: Any) -> None:
    """MDS as other tools write it: plain bytes, or arrays of some type."""
    column = 'bytes' if dtype is None else f'ndarray:{dtype}'
    with MDSWriter(columns={'tokens': column}, out=str(folder), **options) as writer:
        for row in rows:
            writer.write({'tokens': row.tobytes() if dtype is None else row.astype(dtype)})


def test_data_made_for_the_run_passes(padded: Path, bpe: PreTrainedTokenizerBase) -> None:
    check({'local': str(padded), 'split': 'train'}, bpe)
    check({'local': str(padded / 'train')}, bpe)
    check({'streams': {'a': {'local': str(padded), 'split': 'train'}}}, bpe)
    check({'split': 'train', 'streams': {'a': {'local': str(padded)}}}, bpe)


def test_a_missing_folder_or_index_is_named(padded: Path, bpe: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=rf'{KEY}\.local=.*val is missing.*convert_fineweb'):
        check({'local': str(padded), 'split': 'val'}, bpe)
    with pytest.raises(ValueError, match=r'index.json is missing, and there is no remote'):
        check({'local': str(padded)}, bpe)
    with pytest.raises(ValueError, match=rf'{KEY}\.streams\.web\.local=.*is missing'):
        check({'streams': {'web': {'local': str(padded / 'no'), 'split': 'train'}}}, bpe)


def test_half_prepared_data_is_called_so(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    (tmp_path / 'train.incomplete').mkdir()
    with pytest.raises(ValueError, match=r'train is half prepared.*continues what was begun'):
        check({'local': str(tmp_path), 'split': 'train'}, bpe)


def test_data_still_to_be_fetched_is_judged_by_the_remote_manifest(
    padded: Path, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    dataset = {'local': str(tmp_path / 'cache'), 'remote': str(padded), 'split': 'train'}
    check(dataset, bpe)
    with pytest.raises(ValueError, match=r'rows in .* hold 32 tokens; max_seq_len=64'):
        check(dataset, bpe, seq_len=64)


def test_another_sequence_length_is_refused(padded: Path, bpe: PreTrainedTokenizerBase) -> None:
    for other in (16, 64):
        with pytest.raises(ValueError, match=rf'hold 32 tokens; max_seq_len={other}\. Set max_seq'):
            check({'local': str(padded), 'split': 'train'}, bpe, seq_len=other)


def test_another_vocabulary_is_refused(padded: Path, t5: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r'vocabulary of 400 entries; tokenizer.name=.*has 32100'):
        check({'local': str(padded), 'split': 'train'}, t5)


def test_another_tokenizer_with_as_many_entries_is_refused(
    padded: Path, bpe: PreTrainedTokenizerBase
) -> None:
    spec = json.loads(bpe.backend_tokenizer.to_str())
    spec['model']['merges'] = spec['model']['merges'][::-1]
    backend = type(bpe.backend_tokenizer).from_str(json.dumps(spec))
    other = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token='<eos>', pad_token='<pad>')
    assert other.get_vocab() == bpe.get_vocab()
    with pytest.raises(ValueError, match=r'is another tokenizer \(fingerprint [0-9a-f]{12}\)'):
        check({'local': str(padded), 'split': 'train'}, other)


def test_another_eos_or_pad_is_refused(padded: Path, bpe: PreTrainedTokenizerBase) -> None:
    dataset = {'local': str(padded), 'split': 'train'}
    with pytest.raises(ValueError, match=r"end in '<eos>' \(id 1\).*kwargs.eos_token to '<eos>'"):
        check(dataset, changed(bpe, eos_token='<spare>'))
    with pytest.raises(ValueError, match=r"padded with '<pad>' \(id 0\).*pads would be learned"):
        check(dataset, changed(bpe, pad_token='<spare>'))


ROWS = [np.arange(10, 42), np.arange(100, 132)]


@pytest.mark.parametrize('written', ['int64', 'int32', 'uint16', 'uint32'])
@pytest.mark.parametrize('read', ['int64', 'int32', 'uint16'])
def test_bytes_must_be_read_as_the_type_they_were_written_with(
    written: str, read: str, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write_tokens(tmp_path, None, [row.astype(written) for row in ROWS], compression='zstd')
    dataset = {'local': str(tmp_path), 'token_encoding_type': read}
    if np.dtype(written).itemsize == np.dtype(read).itemsize:
        check(dataset, bpe)
        return
    with pytest.raises(ValueError, match=rf"{KEY}\.token_encoding_type='{read}'.*another integer"):
        check(dataset, bpe)


@pytest.mark.parametrize('compression', [None, 'gz', 'zstd:3'])
def test_bytes_without_a_declared_type_are_refused(
    compression: str | None, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write_tokens(tmp_path, None, [row.astype('int64') for row in ROWS], compression=compression)
    with pytest.raises(ValueError, match=r'token_encoding_type=None.*plain bytes.*int64 would be'):
        check({'local': str(tmp_path)}, bpe)
    check({'local': str(tmp_path), 'token_encoding_type': 'int64'}, bpe)


def test_arrays_carry_their_type(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for dtype in ('uint16', 'int32', 'int64'):
        write_tokens(tmp_path / dtype, dtype, ROWS)
        check({'local': str(tmp_path / dtype)}, bpe)
    with pytest.raises(ValueError, match=r"type='int64'.*stored as uint16 arrays"):
        check({'local': str(tmp_path / 'uint16'), 'token_encoding_type': 'int64'}, bpe)


def test_ids_beyond_the_vocabulary_are_refused(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write_tokens(tmp_path, 'int32', [row + 390 for row in ROWS])
    with pytest.raises(ValueError, match=r'ids from 400 to 431, with a vocabulary of 400'):
        check({'local': str(tmp_path)}, bpe)


def test_a_folder_of_other_columns_or_without_its_shards_is_refused(
    bpe: PreTrainedTokenizerBase, padded: Path, tmp_path: Path
) -> None:
    with MDSWriter(columns={'image': 'bytes'}, out=str(tmp_path / 'image')) as writer:
        writer.write({'image': b'x'})
    with pytest.raises(ValueError, match=r"columns \['image'\], and training needs tokens"):
        check({'local': str(tmp_path / 'image')}, bpe)
    (tmp_path / 'bare').mkdir()
    (tmp_path / 'bare' / 'index.json').write_bytes((padded / 'train/index.json').read_bytes())
    with pytest.raises(ValueError, match=r'not its first shard shard.00000.mds'):
        check({'local': str(tmp_path / 'bare')}, bpe)
    check({'local': str(tmp_path / 'bare'), 'remote': 's3://bucket/folder'}, bpe)
    (tmp_path / 'bare' / 'index.json').write_text('{"shards": [')
    with pytest.raises(ValueError, match=r'is not the index of an MDS data set'):
        check({'local': str(tmp_path / 'bare')}, bpe)


def test_text_to_be_tokenized_in_training_passes(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with MDSWriter(columns={'text': 'str'}, out=str(tmp_path)) as writer:
        writer.write({'text': 'hello'})
    check({'local': str(tmp_path)}, bpe)


@pytest.mark.parametrize('remote', [None, 'the same'])
def test_cache_limit_may_not_delete_the_only_copy(
    remote: str | None, padded: Path, bpe: PreTrainedTokenizerBase
) -> None:
    dataset = {'local': str(padded), 'split': 'train', 'cache_limit': '1gb'}
    dataset['remote'] = str(padded) if remote else None
    with pytest.raises(ValueError, match=rf"{KEY}\.cache_limit='1gb'.*only copy.*Remove cache_lim"):
        check(dataset, bpe)
    check({**dataset, 'remote': 's3://bucket/folder'}, bpe)


def test_training_and_validation_may_not_share_a_folder(tmp_path: Path) -> None:
    def loader(local: str, split: str | None = None) -> dict[str, Any]:
        return {'dataset': {'local': local, 'split': split}}

    train = loader('data', 'train')
    check_loaders(train, None)
    check_loaders(train, loader('data', 'val'))
    check_loaders(train, [loader('data', 'val'), loader('other', 'train')])
    for same in (loader('data', 'train'), loader('./data/train'), loader('data/x/..', 'train')):
        with pytest.raises(ValueError, match=r'eval_loader\.dataset\.local=.*train_loader\.data'):
            check_loaders(train, same)
    with pytest.raises(ValueError, match=r'eval_loader\[1\]\.dataset\.local.*own local or split'):
        check_loaders(train, [loader('data', 'val'), loader('data', 'train')])
    streams = {'a': {'local': 'data', 'split': 'x'}, 'b': {'local': 'data', 'split': 'x'}}
    with pytest.raises(ValueError, match=r'streams\.b\.local.*streams\.a'):
        check_loaders({'dataset': {'streams': streams}}, None)


def test_a_tokenizer_needs_an_eos_and_a_pad_of_its_own(
    bpe: PreTrainedTokenizerBase, smollm: PreTrainedTokenizerBase
) -> None:
    check_tokenizer(bpe)
    with pytest.raises(ValueError, match=r'tokenizer=.*no EOS token.*tokenizer.kwargs.eos_token'):
        check_tokenizer(changed(bpe, eos_token=None))
    with pytest.raises(ValueError, match=r'no pad token.*tokenizer.kwargs.pad_token'):
        check_tokenizer(changed(bpe, pad_token=None))
    with pytest.raises(ValueError, match=r"pads with its EOS token '<eos>' \(id 1\).*no document"):
        check_tokenizer(changed(bpe, pad_token='<eos>'))
    smollm.pad_token = None
    with pytest.raises(ValueError, match=r"no pad token.*--pad-token.*'<empty_output>'"):
        check_tokenizer(smollm)


def test_the_checks_are_light() -> None:
    code = (
        'import sys, asymloop_foundry.data.checks\n'
        'print([m for m in ("composer", "llmfoundry", "torch", "streaming") if m in sys.modules])'
    )
    found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == '[]'
