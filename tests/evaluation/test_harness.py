# SPDX-License-Identifier: Apache-2.0
import json
import random
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from asymloop_foundry.evaluation.harness import (
    accuracies,
    accuracy_table,
    evaluate,
    paper_row,
    result_path,
    write,
)
from asymloop_foundry.evaluation.scorer import ContinuationScorer
from asymloop_foundry.evaluation.tasks import TASKS, find_sources, task_manager
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig

ROOT = Path(__file__).resolve().parents[2]
CHOICES = {'openbookqa': 4, 'arc_easy': 4, 'piqa': 2, 'social_iqa': 3}


@pytest.fixture(scope='module')
def scorer(t5_model, t5_tokenizer):
    return ContinuationScorer(t5_model, t5_tokenizer, 8)


@pytest.fixture(scope='module')
def hub(data_dir):
    return data_dir / 'hub_schema'


@pytest.fixture(scope='module')
def zero_shot(scorer, hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp('samples')
    return evaluate(scorer, ('winogrande', 'social_iqa'), 0, hub, 6, folder), folder


def log_likelihood(model, tokenizer, context, continuation):
    """Sum of log p(token | tokens before) over the continuation's pieces."""
    ids = tokenizer(context + continuation, add_special_tokens=False)['input_ids']
    n = len(tokenizer(context, add_special_tokens=False)['input_ids'])
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    return sum(float(log_p[i - 1, ids[i]]) for i in range(n, len(ids)))


def test_every_row_is_what_plain_torch_gives(zero_shot, t5_model, t5_tokenizer, hub):
    results, folder = zero_shot
    rows = datasets.Dataset.from_parquet(str(hub / 'social_i_qa/validation.parquet'))
    kept = [json.loads(x) for x in (folder / 'samples-social_iqa-0shot.jsonl').open()]
    right = 0
    for row, sample in zip(rows.select(range(6)), kept, strict=True):
        prompt = f'Q: {row["context"]} {row["question"]}\nA:'
        choices = [row['answerA'], row['answerB'], row['answerC']]
        expected = [
            log_likelihood(t5_model, t5_tokenizer, prompt, f' {choice}') for choice in choices
        ]
        found = [float(response[0]) for response in sample['filtered_resps']]
        assert found == pytest.approx(expected, abs=1e-4)
        right += int(np.argmax(expected)) == int(row['label']) - 1
    assert accuracies(results)['social_iqa'] == pytest.approx(right / 6)


def test_winogrande_scores_the_same_ending_after_each_option(
    zero_shot, t5_model, t5_tokenizer, hub
):
    _, folder = zero_shot
    rows = datasets.Dataset.from_parquet(str(hub / 'winogrande/winogrande_xl/validation.parquet'))
    kept = [json.loads(x) for x in (folder / 'samples-winogrande-0shot.jsonl').open()]
    for row, sample in zip(rows.select(range(6)), kept, strict=True):
        before, after = row['sentence'].split('_')
        expected = [
            log_likelihood(t5_model, t5_tokenizer, before + row[key], f' {after.strip()}')
            for key in ('option1', 'option2')
        ]
        found = [float(response[0]) for response in sample['filtered_resps']]
        assert found == pytest.approx(expected, abs=1e-4)


def test_all_seven_tasks_have_the_papers_number_of_rows(hub, tmp_path):
    sources = find_sources(hub, TASKS)
    for name, task in TASKS.items():
        n_rows = sum(
            datasets.Dataset.from_parquet(path).num_rows for path in sources[name].files[task.split]
        )
        assert n_rows == task.rows


@pytest.mark.parametrize('name', TASKS)
def test_five_shot_prompts_never_hold_the_scored_row(hub, tmp_path, name):
    source = find_sources(hub, [name])[name]
    task = task_manager([name], tmp_path, {name: source}).load([name])['tasks'][name]
    task.set_fewshot_seed(1234)
    split = TASKS[name].split
    assert task.config.test_split == split
    for i in range(40):
        doc = task.eval_docs[i]
        shown = task.sampler.sample(5, eval_doc=doc if source.excludes_scored_row else None)
        assert len(shown) == 5
        assert doc not in shown
    # What decides whether lm-eval passes the scored row to its sampler.
    assert (task.fewshot_cfg.split == split) is source.excludes_scored_row
    assert ('excluded' in source.describe()) is source.excludes_scored_row


def test_local_training_rows_give_the_hubs_own_definition(hub, tmp_path):
    folder = tmp_path / 'data' / 'openbookqa' / 'main'
    folder.mkdir(parents=True)
    for split in ('train', 'test'):
        source = hub / 'openbookqa/main' / ('test' if split == 'test' else 'validation')
        (folder / f'{split}-00000-of-00001.parquet').symlink_to(f'{source}.parquet')
    sources = find_sources(tmp_path / 'data', ['openbookqa'])
    assert sources['openbookqa'].describe() == 'train split'
    definitions = tmp_path / 'definitions'
    definitions.mkdir()
    manager = task_manager(['openbookqa'], definitions, sources)
    task = manager.load(['openbookqa'])['tasks']['openbookqa']
    assert task.config.training_split == 'train'
    assert task.fewshot_cfg.split is None


def test_a_missing_split_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'piqa/plain_text/validation\*\.parquet'):
        find_sources(tmp_path, ['piqa'])


def test_evaluation_leaves_random_states_as_they_were(scorer, hub):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    evaluate(scorer, ('piqa',), 1, hub, 2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


def test_the_json_is_what_the_experiments_collect(zero_shot, tmp_path):
    from asymloop_foundry.experiments.results import _harness_accuracies

    results, _ = zero_shot
    found = accuracies(results)
    # The tables take whole tasks only.
    whole = {task: {'original': 6, 'effective': 6} for task in found}
    path = result_path(tmp_path, 0, step=7)
    write(path, {**results, 'n-samples': whole}, step=7)
    content = json.loads(path.read_text())
    assert _harness_accuracies(content)['0'] == pytest.approx(
        {'winogrande': 100 * found['winogrande'], 'siqa': 100 * found['social_iqa']}
    )
    assert content['step'] == 7
    assert results['n-samples']['winogrande'] == {'original': 1267, 'effective': 6}


def test_the_table_says_metric_n_and_what_was_left_out(zero_shot):
    results, _ = zero_shot
    table = accuracy_table(results, 0, ('60m', 'asymloop'))
    assert 'acc,none' in table
    assert 'only the first 6 of 1267 rows' in table
    winogrande = next(line for line in table.splitlines() if line.startswith('winogrande'))
    accuracy = 100 * accuracies(results)['winogrande']
    assert winogrande.split() == [
        'winogrande', '6', f'{accuracy:.2f}', '50.59', f'{accuracy - 50.59:+.2f}',
    ]  # fmt: skip


@pytest.mark.parametrize('system', ['dense', 'full-loop', 'asymloop'])
@pytest.mark.parametrize('scale', ['60m', '135m', '350m', '1b'])
def test_the_papers_row_follows_from_the_yaml(scale, system):
    model = OmegaConf.load(ROOT / 'yamls' / f'{system}-{scale}.yaml').model
    fields = {k: v for k, v in model.items() if k in AsymLoopConfig.field_names()}
    fields['max_seq_len'] = 1024
    assert paper_row(AsymLoopConfig(**fields)) == (scale, system)


def test_a_model_of_no_row_has_none():
    assert paper_row(AsymLoopConfig(d_model=64, n_heads=2)) is None
