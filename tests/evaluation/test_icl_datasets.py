# SPDX-License-Identifier: Apache-2.0
import json
import re

import pytest
from transformers import AutoTokenizer

from asymloop_foundry.data.icl import ICL_TASKS, write_tasks
from asymloop_foundry.evaluation.icl_datasets import MultipleChoice, Schema

TASKS = {task.name: task for task in ICL_TASKS}


@pytest.fixture(scope='module')
def folder(data_dir, tmp_path_factory):
    """The first rows of each task, and those of ARC that have not four choices."""
    out = tmp_path_factory.mktemp('icl')
    names = ('arc_challenge', 'piqa', 'winogrande', 'openbook_qa')
    write_tasks(out, data_dir / 'hub_schema', [TASKS[name] for name in names])
    for name in names:
        path = out / f'{name}.jsonl'
        lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
        odd = [line for line in lines if len(json.loads(line).get('choices', [1] * 4)) != 4]
        kept = odd[:3] + lines[:5] if name == 'arc_challenge' else lines[:8]
        path.write_text(''.join(kept), encoding='utf-8')
    return out


@pytest.fixture(scope='module', params=['t5-base', 'smollm-135m'])
def tokenizer(request, data_dir):
    loaded = AutoTokenizer.from_pretrained(data_dir / 'tokenizers' / request.param)
    if loaded.pad_token is None:
        loaded.pad_token = loaded.eos_token
    return loaded


def build(kind, folder, tokenizer, tmp_path, name, shots=0, delimiter=' '):
    return kind(
        dataset_uri=str(folder / f'{name}.jsonl'),
        tokenizer=tokenizer,
        max_seq_len=1024,
        pad_tok_id=tokenizer.pad_token_id,
        num_fewshot=shots,
        destination_path=str(tmp_path / f'{name}-{shots}.jsonl'),
        continuation_delimiter=delimiter,
        example_delimiter='\n\n',
    )


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f'{name}.jsonl').open(encoding='utf-8')]


def folded(text):
    return re.sub(r'\s+', ' ', text).strip()


@pytest.mark.parametrize('shots', [0, 2])
@pytest.mark.parametrize('name', ['arc_challenge', 'piqa', 'openbook_qa'])
def test_each_scored_span_decodes_to_the_choices_text(folder, tokenizer, tmp_path, name, shots):
    dataset = build(MultipleChoice, folder, tokenizer, tmp_path, name, shots, '\nAnswer: ')
    for i, row in enumerate(rows_of(folder, name)):
        batch = dataset.collate_fn([dataset[i]])
        assert len(batch['input_ids']) == len(row['choices'])
        for ids, span, choice in zip(
            batch['input_ids'], batch['continuation_indices'], row['choices'], strict=True
        ):
            assert folded(tokenizer.decode(ids[span])) == folded(choice)
            context = ids[: span[0]].tolist()
            assert tokenizer.eos_token_id not in context
            assert folded(tokenizer.decode(context)).endswith('Answer:')


@pytest.mark.parametrize('shots', [0, 2])
def test_a_schemas_contexts_differ_and_its_ending_is_scored(folder, tokenizer, tmp_path, shots):
    dataset = build(Schema, folder, tokenizer, tmp_path, 'winogrande', shots)
    for i, row in enumerate(rows_of(folder, 'winogrande')):
        batch = dataset.collate_fn([dataset[i]])
        for ids, span, option in zip(
            batch['input_ids'], batch['continuation_indices'], row['context_options'], strict=True
        ):
            assert folded(tokenizer.decode(ids[span])) == folded(row['continuation'])
            context = ids[: span[0]].tolist()
            assert tokenizer.eos_token_id not in context
            assert folded(tokenizer.decode(context)).endswith(folded(option))


def test_a_batch_is_as_long_as_its_longest_row(folder, tokenizer, tmp_path):
    dataset = build(MultipleChoice, folder, tokenizer, tmp_path, 'piqa')
    batch = dataset.collate_fn([dataset[i] for i in range(4)])
    longest = max(int(span[-1]) + 1 for span in batch['continuation_indices'])
    assert batch['input_ids'].shape == batch['labels'].shape == (8, longest)
    assert batch['attention_mask'].shape == (8, longest)


def test_questions_with_other_numbers_of_choices_are_split_whole(folder, tokenizer, tmp_path):
    dataset = build(MultipleChoice, folder, tokenizer, tmp_path, 'arc_challenge')
    rows = rows_of(folder, 'arc_challenge')
    n_choices = [len(row['choices']) for row in rows]
    assert len(set(n_choices)) > 1
    batch = dataset.collate_fn([dataset[i] for i in range(len(rows))])
    assert dataset.get_num_samples_in_batch(batch) == len(rows)
    parts = dataset.split_batch(batch, 3)
    assert [dataset.get_num_samples_in_batch(part) for part in parts] == [3, 3, 2]
    seen = 0
    for part in parts:
        for (start, end), gold in zip(part['choice_groupings'], part['gold_indices'], strict=True):
            assert end - start == n_choices[seen]
            assert gold == rows[seen]['gold']
            seen += 1
        assert len(part['input_ids']) == len(part['continuation_indices']) == end
    assert sum(len(part['labels']) for part in parts) == sum(n_choices)
