# SPDX-License-Identifier: Apache-2.0
"""``eval.py`` on a Composer checkpoint, as a user calls it."""

import json

import pytest
import torch
from composer import Trainer
from llmfoundry import registry

from asymloop_foundry.data.icl import ICL_TASKS, write_tasks
from asymloop_foundry.evaluation.cli import main
from asymloop_foundry.evaluation.icl_datasets import MultipleChoice, Schema
from asymloop_foundry.evaluation.loading import load
from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM

for name, kind in (('asymloop_multiple_choice', MultipleChoice), ('asymloop_schema', Schema)):
    if name not in registry.icl_datasets:
        registry.icl_datasets.register(name, func=kind)


@pytest.fixture(scope='module')
def trained(t5_tokenizer):
    torch.manual_seed(0)
    return ComposerAsymLoopCausalLM(
        t5_tokenizer, vocab_size=32128, d_model=16, n_heads=2, d_ff=24, n_encoder_layers=1,
        n_decoder_layers=1, num_iterations=2, init_std=0.3,
    )  # fmt: skip


@pytest.fixture(scope='module')
def checkpoint(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp('run') / 'checkpoints' / 'last.pt'
    Trainer(model=trained, device='cpu', precision='fp32').save_checkpoint(str(path))
    return path


def test_a_checkpoint_gives_the_trained_model_and_a_plain_tokenizer(checkpoint, trained):
    loaded = load(checkpoint)
    ids = torch.tensor([[8, 9, 10, 400]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, trained.model.eval()(ids).logits)
    assert loaded.tokenizer('the cat')['input_ids'] == [8, 1712]
    assert loaded.step == 0


def test_harness_runs_from_a_checkpoint_with_another_k(checkpoint, data_dir, tmp_path, capsys):
    arguments = ['harness', str(checkpoint), '--data', str(data_dir / 'hub_schema')]
    arguments += ['--tasks', 'piqa', '--shots', '0', '--limit', '5', '--device', 'cpu']
    results = {}
    for k in ('1', '4'):
        out = tmp_path / k
        assert main([*arguments, '--num-iterations', k, '--out', str(out), '--samples']) == 0
        results[k] = json.loads((out / 'harness-0shot.json').read_text())
        assert results[k]['num_iterations'] == int(k)
    rows = [(tmp_path / k / 'samples-piqa-0shot.jsonl').read_text() for k in results]
    assert rows[0] != rows[1]
    assert 'piqa' in capsys.readouterr().out


def test_the_gauntlet_runs_from_a_checkpoint(checkpoint, data_dir, tmp_path):
    data = tmp_path / 'icl'
    write_tasks(data, data_dir / 'hub_schema', ICL_TASKS)
    for path in data.iterdir():
        lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
        path.write_text(''.join(lines[:6]), encoding='utf-8')
    arguments = ['icl', str(checkpoint), '--data', str(data), '--out', str(tmp_path)]
    assert main([*arguments, '--batch-size', '8', '--shots', '0', '1']) == 0
    results = json.loads((tmp_path / 'gauntlet.json').read_text())
    labels = {f'{task.name}/{n}-shot' for task in ICL_TASKS for n in (0, 1)}
    assert set(results['accuracy']) == labels
    assert all(
        6 * value == pytest.approx(round(6 * value)) for value in results['accuracy'].values()
    )
    mean = sum(results['accuracy'].values()) / len(labels)
    assert results['mean'] == pytest.approx(mean)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['harness', 'nothing-here.pt'], 'give a Composer checkpoint'),
        (['harness', 'CHECKPOINT', '--tasks', 'lambada'], 'is none of'),
        (['harness', 'CHECKPOINT', '--num-iterations', '0'], 'num_iterations=0'),
        (['icl', 'CHECKPOINT', '--data', '.'], 'convert_icl.py'),
        (['gsm8k', 'CHECKPOINT', '--data', 'nowhere'], 'no test.jsonl'),
    ],
)
def test_mistakes_end_with_a_line_that_says_what_to_do(checkpoint, capsys, arguments, message):
    named = [str(checkpoint) if word == 'CHECKPOINT' else word for word in arguments]
    assert main([*named, '--device', 'cpu']) == 1
    assert message in capsys.readouterr().err
