# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
import torch
from composer import Trainer
from family import FAMILY, build, token_ids
from transformers import AutoTokenizer

from asymloop_foundry.evaluation.cli import main
from asymloop_foundry.evaluation.iterations import iteration_losses
from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM

K = 4


def batches():
    """Two batches of unlike size, with padding on the right."""
    found = []
    for rows, length in ((3, 19), (2, 11)):
        ids = token_ids(rows, length)
        labels = ids.clone()
        labels[0, length // 2 :] = -100
        found.append({'input_ids': ids, 'labels': labels})
    return found


@pytest.mark.parametrize('name', FAMILY)
def test_each_loss_is_that_of_a_pass_with_so_many_iterations(name):
    model = build(name)
    k_max = K if FAMILY[name]['n_decoder_layers'] else 1
    found, n_targets = iteration_losses(model, batches(), k_max)
    assert len(found) == k_max
    counts = [int((batch['labels'][:, 1:] != -100).sum()) for batch in batches()]
    assert n_targets == sum(counts)
    for k, value in enumerate(found, start=1):
        with torch.no_grad():
            alone = [float(model(**batch, num_iterations=k).loss) for batch in batches()]
        expected = sum(n * loss for n, loss in zip(counts, alone, strict=True)) / n_targets
        assert value == pytest.approx(expected, abs=1e-5)


def test_a_model_without_decoder_has_one_loss_only():
    with pytest.raises(ValueError, match='num_iterations=2 has no effect'):
        iteration_losses(build('dense'), batches(), 2)


def test_labels_that_are_all_padding_are_an_error():
    ids = token_ids()
    batch = {'input_ids': ids, 'labels': torch.full_like(ids, -100)}
    with pytest.raises(ValueError, match='no target'):
        iteration_losses(build('asymloop'), [batch])


def test_no_logits_of_all_positions_are_made():
    model = build('asymloop')
    shapes = []
    model.lm_head.register_forward_hook(lambda *call: shapes.append(call[2].shape[1]))
    iteration_losses(model, batches(), 3)
    assert set(shapes) == {1}


@pytest.fixture(scope='module')
def checkpoint(text_run, tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(text_run / 'tokenizer')
    model = ComposerAsymLoopCausalLM(
        tokenizer, vocab_size=1024, d_model=16, n_heads=2, d_ff=24, n_encoder_layers=1,
        n_decoder_layers=1, num_iterations=2, init_std=0.3, max_seq_len=32,
    )  # fmt: skip
    path = tmp_path_factory.mktemp('run') / 'last.pt'
    Trainer(model=model, device='cpu', precision='fp32').save_checkpoint(str(path))
    return path


def test_the_command_writes_every_k_that_was_asked_for(checkpoint, text_run, tmp_path, capsys):
    arguments = ['loss', str(checkpoint), '--data', str(text_run / 'padded'), '--device', 'cpu']
    assert main([*arguments, '--out', str(tmp_path), '--num-iterations', '1', '2', '5']) == 0
    several = json.loads((tmp_path / 'loss.json').read_text())
    assert main([*arguments, '--out', str(tmp_path), '--num-iterations', '2']) == 0
    alone = json.loads((tmp_path / 'loss.json').read_text())
    assert [row['num_iterations'] for row in several['losses']] == [1, 2, 5]
    assert several['losses'][1] == alone['losses'][0]
    assert several['n_targets'] == alone['n_targets'] > 0
    for row in several['losses']:
        assert row['perplexity'] == pytest.approx(math.exp(row['cross_entropy']))
    assert 'perplexity' in capsys.readouterr().out


def test_data_of_another_length_is_refused(checkpoint, text_run, tmp_path, capsys):
    arguments = ['loss', str(checkpoint), '--data', str(text_run / 'data'), '--max-length', '64']
    assert main([*arguments, '--device', 'cpu', '--out', str(tmp_path)]) == 1
    assert '64' in capsys.readouterr().err
