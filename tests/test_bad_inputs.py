# SPDX-License-Identifier: Apache-2.0
"""Invalid data and checkpoints, one table each: every one ends in one error that says what and where."""

import gzip
import json
import pickle
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from asymloop_foundry.data.checks import check_training_data
from asymloop_foundry.data.command import main as prepare
from asymloop_foundry.evaluation.gsm8k import read_test
from asymloop_foundry.evaluation.loading import load
from asymloop_foundry.experiments.results import collect
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM


def parquet(path, column='text', texts=('one text', 'another') * 500):
    pq.write_table(pa.table({column: list(texts)}), path)


def truncated(path, content):
    path.write_bytes(content[: len(content) * 2 // 3])


def truncated_parquet(path):
    parquet(path)
    truncated(path, path.read_bytes())


def spoiled_parquet(path):
    """A file whose end is right and whose pages are not."""
    parquet(path)
    content = bytearray(path.read_bytes())
    content[4:120] = bytes(116)
    path.write_bytes(content)


LINES = b''.join(json.dumps({'text': f'text {i}'}).encode() + b'\n' for i in range(3000))
SOURCES = {
    'a.parquet cut off': ('a.parquet', truncated_parquet, 'a.parquet'),
    'a.parquet with spoiled pages': ('a.parquet', spoiled_parquet, 'a.parquet'),
    'a.parquet that is text': ('a.parquet', lambda p: p.write_text('text'), 'a.parquet'),
    'a.parquet of another column': (
        'a.parquet',
        lambda p: parquet(p, 'body'),
        'text_?-?column|text',
    ),
    'a.parquet without rows': ('a.parquet', lambda p: parquet(p, texts=()), r'a\.parquet'),
    'an empty jsonl': ('a.jsonl', lambda p: p.write_text(''), 'no |0 '),
    'a line that is no JSON': (
        'a.jsonl',
        lambda p: p.write_text('{"text": "a"}\n{"te'),
        r'a\.jsonl',
    ),
    'a line that is a list': ('a.jsonl', lambda p: p.write_text('["text"]\n'), r'a\.jsonl'),
    'a line without the key': ('a.jsonl', lambda p: p.write_text('{"body": "a"}\n'), 'text'),
    'a text that is a number': ('a.jsonl', lambda p: p.write_text('{"text": 3}\n'), r'a\.jsonl'),
    'jsonl that is not UTF-8': (
        'a.jsonl',
        lambda p: p.write_bytes(b'{"text": "caf\xe9"}\n'),
        r'a\.jsonl.*[Uu][Tt][Ff]-?8|utf-8',
    ),
    'txt that is not UTF-8': ('a.txt', lambda p: p.write_bytes(b'caf\xe9\n'), r'a\.txt'),
    'gzip cut off': ('a.jsonl.gz', lambda p: truncated(p, gzip.compress(LINES)), r'a\.jsonl\.gz'),
    'gzip that is text': ('a.jsonl.gz', lambda p: p.write_bytes(LINES), r'a\.jsonl\.gz'),
    'zstd that is text': ('a.jsonl.zst', lambda p: p.write_bytes(LINES), r'a\.jsonl\.zst'),
    'a file of another kind': ('a.csv', lambda p: p.write_text('text\na\n'), r'a\.csv'),
    'a file that is not there': ('a.jsonl', lambda p: None, r'a\.jsonl'),
}


@pytest.mark.parametrize('kind', SOURCES)
def test_a_source_that_cannot_be_read_ends_in_one_line(text_run, tmp_path, capsys, kind):
    name, make, message = SOURCES[kind]
    make(tmp_path / name)
    arguments = ['--train', str(tmp_path / name), '--tokenizer', str(text_run / 'tokenizer')]
    arguments += ['--out', str(tmp_path / 'out'), '--seq-len', '32', '--workers', '1']
    assert exit_status(prepare, arguments) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, error), error
    assert 'Traceback' not in error
    assert not (tmp_path / 'out' / 'train').exists()


def exit_status(command, arguments):
    try:
        return command(arguments) or 0
    except SystemExit as ended:
        return ended.code


def index_of(folder, change):
    path = folder / 'index.json'
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def manifest_of(folder, **changes):
    path = folder / 'manifest.json'
    manifest = json.loads(path.read_text())
    for key, value in changes.items():
        place = manifest
        *parents, last = key.split('__')
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text(json.dumps(manifest))


def first_shard(folder):
    return min(folder.glob('shard.00000.mds*'))


PREPARED = {
    'index cut off': (
        lambda f: truncated(f / 'index.json', (f / 'index.json').read_bytes()),
        'index',
    ),
    'index without shards': (lambda f: index_of(f, lambda i: i.update(shards=[])), 'at least one'),
    'index that is a list': (lambda f: (f / 'index.json').write_text('[]'), 'not the index'),
    'index without columns': (
        lambda f: index_of(f, lambda i: i['shards'][0].pop('column_names')),
        'not the index',
    ),
    'index without tokens': (
        lambda f: index_of(f, lambda i: i['shards'][0].update(column_names=['ids'])),
        r"columns \['ids'\]",
    ),
    'no index': (lambda f: (f / 'index.json').unlink(), 'index.json is missing'),
    'no folder': (shutil.rmtree, 'missing'),
    'manifest cut off': (
        lambda f: truncated(f / 'manifest.json', (f / 'manifest.json').read_bytes()),
        'manifest.json.*Prepare the data again',
    ),
    'manifest of another version': (lambda f: manifest_of(f, format_version=9), 'format_version 9'),
    'manifest without counts': (lambda f: manifest_of(f, counts={'rows': 1, 'x': 2}), 'manifest'),
    'manifest of another tokenizer': (
        lambda f: manifest_of(f, request__tokenizer__fingerprint='0' * 64),
        'another tokenizer',
    ),
    'manifest of another vocabulary': (
        lambda f: manifest_of(f, request__tokenizer__vocab_size=32100),
        '32100',
    ),
    'manifest of another EOS': (
        lambda f: manifest_of(f, request__tokenizer__eos_id=7),
        'eos_token',
    ),
    'manifest of another length': (lambda f: manifest_of(f, request__seq_len=64), '64'),
    'first shard missing': (lambda f: first_shard(f).unlink(), 'first shard'),
    'first shard empty': (lambda f: first_shard(f).write_bytes(b''), 'shard'),
    'first shard cut off': (
        lambda f: first_shard(f).write_bytes(first_shard(f).read_bytes()[:9]),
        'shard',
    ),
    'first shard of another kind': (lambda f: first_shard(f).write_bytes(b'text' * 99), 'shard'),
}


@pytest.mark.parametrize('kind', PREPARED)
def test_prepared_data_that_is_spoiled_is_refused_before_training(text_run, tmp_path, kind):
    spoil, message = PREPARED[kind]
    shutil.copytree(text_run / 'data', tmp_path / 'data')
    tokenizer = AutoTokenizer.from_pretrained(text_run / 'tokenizer')
    dataset = {'local': str(tmp_path / 'data'), 'split': 'train'}
    check_training_data(dataset, tokenizer, 32, 'train_loader.dataset')
    spoil(tmp_path / 'data' / 'train')
    with pytest.raises(ValueError, match=message) as caught:
        check_training_data(dataset, tokenizer, 32, 'train_loader.dataset')
    assert str(tmp_path) in str(caught.value)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def half_a_checkpoint(path):
    torch.save({'state': {'model': {'w': torch.zeros(10_000)}}}, path)
    truncated(path, path.read_bytes())


def exported(path):
    config = AsymLoopConfig(
        vocab_size=64, d_model=8, n_heads=2, d_ff=8, n_encoder_layers=1, n_decoder_layers=1
    )
    AsymLoopForCausalLM(config).save_pretrained(path)
    return path


def export_with_half_its_weights(path):
    weights = exported(path) / 'model.safetensors'
    truncated(weights, weights.read_bytes())


def export_without_weights(path):
    (exported(path) / 'model.safetensors').unlink()


def export_with_half_a_config(path):
    config = exported(path) / 'config.json'
    truncated(config, config.read_bytes())


def export_of_bad_values(path):
    config = exported(path) / 'config.json'
    config.write_text(config.read_text().replace('"n_heads": 2', '"n_heads": 3'))


def sharded_without_index(path):
    path.mkdir()
    (path / '__0_0.distcp').write_bytes(b'weights')


def sharded_with_half_an_index(path):
    import torch.distributed.checkpoint as dcp

    dcp.save({'state': {'model': {'w': torch.ones(9)}}}, checkpoint_id=path, no_dist=True)
    truncated(path / '.metadata', (path / '.metadata').read_bytes())


def sharded_without_a_part(path):
    import torch.distributed.checkpoint as dcp

    dcp.save({'state': {'model': {'w': torch.ones(9)}}}, checkpoint_id=path, no_dist=True)
    (path / '__0_0.distcp').unlink()


MODELS = {
    'empty file': lambda p: p.write_bytes(b''),
    'text': lambda p: p.write_text('<html>404</html>'),
    'checkpoint cut off': half_a_checkpoint,
    'weights alone': lambda p: torch.save({'w': torch.zeros(3)}, p),
    'a tensor': lambda p: torch.save(torch.zeros(3), p),
    'a checkpoint of another model': lambda p: torch.save({'state': {'model': {}}}, p),
    'a pickle that runs code': lambda p: torch.save({'state': Malicious(p.parent / 'ran')}, p),
    'a plain pickle that runs code': lambda p: p.write_bytes(
        pickle.dumps(Malicious(p.parent / 'ran'))
    ),
    'nothing': lambda p: None,
    'an empty folder': lambda p: p.mkdir(),
    'sharded without its index': sharded_without_index,
    'sharded with half an index': sharded_with_half_an_index,
    'sharded without a part': sharded_without_a_part,
    'an export with half its weights': export_with_half_its_weights,
    'an export without weights': export_without_weights,
    'an export with half a config': export_with_half_a_config,
    'an export of contradicting values': export_of_bad_values,
}


@pytest.mark.parametrize('kind', MODELS)
def test_a_model_that_cannot_be_loaded_is_named_and_runs_no_code(text_run, tmp_path, kind):
    path = tmp_path / 'model'
    MODELS[kind](path)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(path, text_run / 'tokenizer')
    assert str(path) in str(caught.value)
    assert not (tmp_path / 'ran').exists()


QUESTIONS = {
    'too few': '{"question": "a", "answer": "#### 1"}\n' * 3,
    'no JSON': '{"question": "a", "answer": "#### 1"}\n' * 1318 + '{"question',
    'without answers': '{"question": "a"}\n' * 1319,
    'lists': '["a", "b"]\n' * 1319,
    'empty': '',
}


@pytest.mark.parametrize('kind', QUESTIONS)
def test_questions_of_another_form_are_refused(tmp_path, kind):
    (tmp_path / 'test.jsonl').write_text(QUESTIONS[kind])
    with pytest.raises(ValueError, match=r'test\.jsonl:\d+|has \d+ questions'):
        read_test(tmp_path)


RESULTS = {
    'cut off': '{"finished": tr',
    'a list': '[]',
    'of something else': '{"loss": 3}',
    'empty': '',
}


@pytest.mark.parametrize('kind', RESULTS)
def test_results_of_another_form_are_refused(tmp_path, kind):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'results.json').write_text(RESULTS[kind])
    with pytest.raises(ValueError, match=r'results\.json'):
        collect([tmp_path])
