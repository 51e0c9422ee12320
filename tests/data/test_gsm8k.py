# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from llmfoundry.data.finetuning import build_finetuning_dataloader
from transformers import AutoTokenizer

from asymloop_foundry.data.checks import check_finetuning_data
from asymloop_foundry.data.gsm8k import (
    Conversion,
    Gsm8kEncoder,
    read_questions,
    solution_text,
    split_rows,
)

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    'question': 'Ann has 48 pens and sells {half} of them.\nHow many are left?',
    'answer': 'She sold 48/2 = <<48/2=24>>24.\nThat is 48 \u00d7 1/2 < 48.\n#### 24',
}


@pytest.fixture(scope='module')
def script():
    spec = importlib.util.spec_from_file_location(
        'convert_gsm8k', ROOT / 'data_prep' / 'convert_gsm8k.py'
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def t5(t5_tokenizer_dir):
    return AutoTokenizer.from_pretrained(t5_tokenizer_dir)


@pytest.fixture(scope='module')
def questions(data_dir):
    return read_questions(data_dir / 'gsm8k' / 'train.jsonl')


@pytest.fixture(scope='module')
def shards(script, questions, t5_tokenizer_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp('gsm8k')
    reports = script.convert(questions, out, str(t5_tokenizer_dir), 1024)
    return out, reports


def test_annotations_go_and_nothing_else_does():
    assert solution_text('4 = <<2*2=4>>4 and <b>\n#### 4\n') == '4 = 4 and <b>\n#### 4'


def test_t5_reads_all_of_a_row_that_its_vocabulary_lacks_characters_for(t5):
    encoder = Gsm8kEncoder(t5)
    prompt, response = encoder.prompt_ids(ROW['question']), encoder.response_ids(ROW['answer'])
    assert t5.unk_token_id not in prompt + response
    assert t5.decode(prompt) == (
        'Question: Ann has 48 pens and sells (half) of them. How many are left? Answer:'
    )
    assert t5.decode(response) == (
        'She sold 48/2 = 24. That is 48 * 1/2 is less than 48. #### 24</s>'
    )


def test_the_prompt_is_not_closed_and_the_response_is_closed_once(t5):
    encoder = Gsm8kEncoder(t5)
    prompt, response = encoder.prompt_ids(ROW['question']), encoder.response_ids(ROW['answer'])
    assert t5.eos_token_id not in prompt
    assert response.count(t5.eos_token_id) == 1
    assert response[-1] == t5.eos_token_id


@pytest.mark.parametrize('tokenizer', ['t5-base', 'smollm-135m'])
def test_prompt_and_response_meet_as_in_one_text(data_dir, questions, tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(data_dir / 'tokenizers' / tokenizer)
    encoder = Gsm8kEncoder(tokenizer)
    for row in questions[:200]:
        if encoder.respells(row['question'] + row['answer']):
            continue
        text = f'Question: {row["question"].strip()}\nAnswer: {solution_text(row["answer"])}'
        whole = tokenizer(text, add_special_tokens=False)['input_ids']
        parts = encoder.prompt_ids(row['question']) + encoder.response_ids(row['answer'])
        assert parts == [*whole, tokenizer.eos_token_id]


def test_rows_that_cannot_be_learned_are_left_out_and_counted(t5):
    encoder, report = Gsm8kEncoder(t5), Conversion()
    rows = [ROW, {**ROW, 'question': 'pen ' * 1100}, {**ROW, 'answer': 'Ω ≈ 3\n#### 3'}]
    written = list(encoder.rows(rows, 1024, report))
    assert len(written) == 1
    assert (report.rows, report.written, report.too_long, report.unknown) == (3, 1, 1, 1)
    assert report.dropped_rows == [1, 2]
    assert report.respelled == 1


def test_the_held_out_rows_are_the_committed_ones(script, questions):
    indices = json.loads(script.DEV_INDICES.read_text())
    assert indices == sorted(np.random.RandomState(6198).permutation(7473)[-500:].tolist())
    train, dev = split_rows(questions, indices)
    assert (len(train), len(dev)) == (6973, 500)
    assert dev[0] == questions[indices[0]]
    assert not {r['question'] for r in train} & {r['question'] for r in dev}


def test_another_file_than_the_one_of_the_indices_is_refused(questions):
    with pytest.raises(ValueError, match='has 10 rows'):
        split_rows(questions[:10], [1])


@pytest.mark.parametrize(('text', 'message'), [
    ('{"question": "a"}', 'gsm8k.jsonl:1 has no texts'),
    ('not json', 'gsm8k.jsonl:1 is no JSON'),
])  # fmt: skip
def test_a_file_that_is_no_gsm8k_is_refused(tmp_path, text, message):
    path = tmp_path / 'gsm8k.jsonl'
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_questions(path)
    with pytest.raises(FileNotFoundError, match='give a folder'):
        read_questions(tmp_path / 'absent.jsonl')


def test_every_row_of_gsm8k_is_kept_with_t5(shards):
    _, reports = shards
    assert (reports['train'].written, reports['dev'].written) == (6973, 500)
    assert reports['train'].longest == 456
    assert not any(r.too_long or r.unknown for r in reports.values())


def test_finished_shards_are_left_alone_and_others_are_refused(
    script, shards, questions, t5_tokenizer_dir
):
    out, _ = shards
    before = (out / 'train' / 'index.json').stat().st_mtime_ns
    assert script.convert(questions, out, str(t5_tokenizer_dir), 1024) == {}
    assert (out / 'train' / 'index.json').stat().st_mtime_ns == before
    with pytest.raises(ValueError, match='holds another conversion'):
        script.convert(questions, out, str(t5_tokenizer_dir), 512)


def test_foundrys_loader_takes_solution_and_eos_into_the_loss_and_nothing_of_the_question(
    shards, questions, script, t5
):
    out, _ = shards
    dataset = {
        'remote': str(out),
        'local': str(out),
        'split': 'dev',
        'shuffle': False,
        'max_seq_len': 1024,
        'decoder_only_format': True,
        'target_prompts': 'none',
        'target_responses': 'last',
    }
    loader = build_finetuning_dataloader(
        t5,
        4,
        dataset,
        num_workers=0,
        prefetch_factor=None,
        persistent_workers=False,
        pin_memory=False,
    ).dataloader
    batch = next(iter(loader))
    held_out = json.loads(script.DEV_INDICES.read_text())
    for i in range(4):
        row = questions[held_out[i]]
        solution = t5(' ' + re.sub('<<.*?>>', '', row['answer']))['input_ids']
        labels = batch['labels'][i]
        scored = labels != -100
        assert labels[scored].tolist() == solution
        start = int(torch.nonzero(scored)[0])
        question = t5(f'Question: {row["question"]} Answer:', add_special_tokens=False)['input_ids']
        assert batch['input_ids'][i, :start].tolist() == question
        assert torch.equal(batch['input_ids'][i][scored], labels[scored])


def sft_dataset(out):
    return {'remote': str(out), 'local': str(out), 'split': 'train', 'max_seq_len': 1024}


def test_a_run_with_the_datas_own_tokenizer_is_accepted(shards, t5):
    check_finetuning_data(sft_dataset(shards[0]), t5, 1024, 'train_loader.dataset')


def test_a_run_with_another_tokenizer_than_the_datas_is_refused(shards, bpe):
    with pytest.raises(ValueError, match=r'train_loader\.dataset.*another tokenizer.*--tokenizer'):
        check_finetuning_data(sft_dataset(shards[0]), bpe, 1024, 'train_loader.dataset')


def test_a_run_of_shorter_rows_than_the_datas_is_refused(shards, t5):
    with pytest.raises(ValueError, match=r'1024 tokens.*max_seq_len=512.*--max-seq-len 512'):
        check_finetuning_data(sft_dataset(shards[0]), t5, 512, 'train_loader.dataset')


@pytest.mark.parametrize(
    'manifest', ['{', '[]', '{"request": {}}', '{"request": {"tokenizer_fingerprint": "a"}}']
)
def test_a_manifest_that_cannot_be_read_is_named(shards, t5, tmp_path, manifest):
    shutil.copytree(shards[0] / 'train', tmp_path / 'train')
    (tmp_path / 'manifest.json').write_text(manifest)
    with pytest.raises(ValueError, match=r'manifest\.json is not a manifest.*convert_gsm8k'):
        check_finetuning_data(sft_dataset(tmp_path), t5, 1024, 'train_loader.dataset')


def test_shards_of_other_columns_are_refused(shards, t5, tmp_path):
    shutil.copytree(shards[0] / 'train', tmp_path / 'train')
    index = tmp_path / 'train' / 'index.json'
    index.write_text(index.read_text().replace('"labels"', '"answers"'))
    with pytest.raises(
        ValueError, match=r"columns \['answers', 'input_ids'\].*input_ids and labels"
    ):
        check_finetuning_data(sft_dataset(tmp_path), t5, 1024, 'train_loader.dataset')
