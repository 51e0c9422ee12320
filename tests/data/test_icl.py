# SPDX-License-Identifier: Apache-2.0
import json
import re

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from asymloop_foundry.data.icl import ICL_TASKS, convert, read_rows, write_tasks

TASKS = {task.name: task for task in ICL_TASKS}
ROWS = {
    'openbook_qa': 500,
    'winogrande': 1267,
    'arc_challenge': 1172,
    'arc_easy': 2376,
    'hellaswag': 10042,
    'siqa': 1954,
    'piqa': 1838,
}


@pytest.fixture(scope='module')
def written(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp('icl')
    assert write_tasks(out, data_dir / 'hub_schema') == ROWS
    return {
        name: [json.loads(line) for line in (out / f'{name}.jsonl').open(encoding='utf-8')]
        for name in ROWS
    }


def source(data_dir, name):
    path = data_dir / 'hub_schema' / TASKS[name].folder / f'{TASKS[name].split}.parquet'
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize('name', ['arc_easy', 'arc_challenge', 'openbook_qa'])
def test_every_lettered_row_has_the_sources_choices_and_right_one(written, data_dir, name):
    for ours, row in zip(written[name], source(data_dir, name), strict=True):
        assert ours['choices'] == row['choices']['text']
        right = dict(zip(row['choices']['label'], row['choices']['text'], strict=True))
        assert ours['choices'][ours['gold']] == right[row['answerKey']]
        assert row.get('question', row.get('question_stem')) in ours['query']


def test_every_social_iqa_row_is_three_way(written, data_dir):
    for ours, row in zip(written['siqa'], source(data_dir, 'siqa'), strict=True):
        assert ours['choices'] == [row['answerA'], row['answerB'], row['answerC']]
        assert ours['gold'] == {'1': 0, '2': 1, '3': 2}[row['label']]
        assert ours['query'] == f'Q: {row["context"]} {row["question"]}'


def test_every_piqa_row_is_the_sources(written, data_dir):
    for ours, row in zip(written['piqa'], source(data_dir, 'piqa'), strict=True):
        assert ours['choices'] == [row['sol1'], row['sol2']]
        assert ours['gold'] == row['label']
        assert ours['query'].endswith(row['goal'])


def test_every_winogrande_row_reads_as_its_sentence(written, data_dir):
    for ours, row in zip(written['winogrande'], source(data_dir, 'winogrande'), strict=True):
        for option, context in zip(
            (row['option1'], row['option2']), ours['context_options'], strict=True
        ):
            filled = row['sentence'].replace('_', option)
            assert context.endswith(option)
            assert f'{context} {ours["continuation"]}'.replace(' ', '') == filled.replace(' ', '')
        assert str(ours['gold'] + 1) == row['answer']


def test_every_hellaswag_row_is_the_sources_without_its_marks(written, data_dir):
    for ours, row in zip(written['hellaswag'], source(data_dir, 'hellaswag'), strict=True):
        assert ours['gold'] == int(row['label'])
        assert len(ours['choices']) == 4
        whole = [row['activity_label'] + ': ' + row['ctx_a'] + row['ctx_b'], *row['endings']]
        for text, raw in zip([ours['query'], *ours['choices']], whole, strict=True):
            # [title] ends a sentence; every other mark goes, up to the nearest closing bracket.
            bare = re.sub(r'\[[^\]]*\]', '', raw.replace(' [title]', '. '))
            assert ''.join(text.lower().split()) == ''.join(bare.lower().split())
            assert not re.search(r'\[\w+\]', text)


@pytest.mark.parametrize('name', ['arc_easy', 'arc_challenge'])
def test_foundrys_copies_have_other_golds(written, data_dir, name):
    """Why these files exist: the same questions, and golds that differ."""
    theirs = [json.loads(line) for line in (data_dir / 'icl' / f'{name}.jsonl').open()]
    wrong = sum(
        ours['choices'] == other['choices'] and ours['gold'] != other['gold']
        for ours, other in zip(written[name], theirs, strict=True)
    )
    assert wrong == {'arc_easy': 71, 'arc_challenge': 19}[name]


def test_lm_eval_reads_the_same_prompts_choices_and_golds(written, data_dir, tmp_path):
    from asymloop_foundry.evaluation.tasks import TASKS as HARNESS_TASKS
    from asymloop_foundry.evaluation.tasks import find_sources, task_manager

    delimiters = {'arc_easy': '\nAnswer:', 'hellaswag': '', 'openbookqa': '', 'social_iqa': '\nA:'}
    names = {'openbookqa': 'openbook_qa', 'social_iqa': 'siqa'}
    sources = find_sources(data_dir / 'hub_schema', HARNESS_TASKS)
    manager = task_manager(delimiters, tmp_path, sources)
    for name, task in manager.load(list(delimiters))['tasks'].items():
        for i in range(0, 500, 50):
            ours, doc = written[names.get(name, name)][i], task.eval_docs[i]
            assert task.doc_to_text(doc) == ours['query'] + delimiters[name]
            assert task.doc_to_choice(doc) == ours['choices']
            assert int(task.doc_to_target(doc)) == ours['gold']


@pytest.mark.parametrize(
    ('change', 'message'),
    [({'answerKey': 'E'}, 'row 0 is not as the hub has it'), ({'answerKey': ''}, 'row 0')],
)
def test_a_row_without_a_right_choice_is_named(data_dir, change, message):
    task = TASKS['arc_easy']
    row = next(iter(read_rows(task, data_dir / 'hub_schema')))
    with pytest.raises(ValueError, match=message):
        list(convert(task, [{**row, **change}]))


def test_a_missing_split_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='ARC-Easy'):
        list(read_rows(TASKS['arc_easy'], tmp_path))


def test_t5_loses_nothing_that_separates_choices(written, t5_tokenizer_dir):
    """Two choices of a question never become the same pieces, or their scores could not differ."""
    tokenizer = AutoTokenizer.from_pretrained(t5_tokenizer_dir)
    for name in ('arc_challenge', 'openbook_qa'):
        for row in written[name][:300]:
            pieces = [tuple(tokenizer(choice)['input_ids']) for choice in row['choices']]
            assert len(set(pieces)) == len(set(row['choices']))
