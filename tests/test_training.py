# SPDX-License-Identifier: Apache-2.0
"""The tiny YAML through Foundry: launchers, ranks, resume, kill, and what validation means."""

import math
import os
import signal
import subprocess
import time

import pytest
import torch
from streaming import StreamingDataset
from tiny_runs import LAUNCHERS, TINY, launch, overrides, validation
from torch.nn import functional as F

from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM

ALRS = {
    'algorithms.alrs.update_interval': '3ba',
    'algorithms.alrs.transition': '2ba',
    'algorithms.alrs.window': '0.6dur',
}


@pytest.fixture(scope='module')
def train(text_run):
    """Trains in this process and returns the trainer."""
    from llmfoundry.command_utils import train_from_yaml

    def run(work_dir, **changes):
        return train_from_yaml(TINY, overrides(text_run, work_dir, **changes))

    return run


@pytest.fixture(scope='module')
def undisturbed(train, tmp_path_factory):
    """Eight steps with ALRS in one process."""
    work_dir = tmp_path_factory.mktemp('undisturbed')
    trainer = train(work_dir, **ALRS)
    weights = {k: v.clone() for k, v in trainer.state.model.state_dict().items()}
    trainer.close()
    return work_dir, weights


def test_training_lowers_validation_loss_at_every_evaluation(undisturbed):
    losses = list(validation(undisturbed[0]).values())
    assert len(losses) == 9
    assert losses[0] == pytest.approx(math.log(1024), abs=0.5)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize('stopped_at', [2, 4, 6])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(train, undisturbed, tmp_path, stopped_at):
    work_dir, weights = undisturbed
    trainer = train(
        tmp_path, load_path=work_dir / 'checkpoints' / f'ep0-ba{stopped_at}-rank0.pt', **ALRS
    )
    assert validation(tmp_path) == validation(work_dir)
    for name, weight in trainer.state.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    trainer.close()


def test_a_killed_run_continues_by_the_same_command(text_run, undisturbed, tmp_path):
    work_dir, _ = undisturbed
    arguments = overrides(text_run, tmp_path, **ALRS)
    run = subprocess.Popen(
        [*LAUNCHERS['train.py'], TINY, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / 'checkpoints' / 'ep0-ba4-rank0.pt').exists():
        assert run.poll() is None, 'the run ended before it could be killed'
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    launch('train.py', arguments)
    assert validation(tmp_path) == validation(work_dir)


def test_two_ranks_give_one_processs_losses(text_run, undisturbed, tmp_path):
    launch('composer', overrides(text_run, tmp_path, **ALRS))
    one, two = validation(undisturbed[0]), validation(tmp_path)
    assert one.keys() == two.keys()
    for step, loss in one.items():
        assert two[step] == pytest.approx(loss, abs=2e-5), step


def test_foundrys_own_command_trains_the_yaml(text_run, undisturbed, tmp_path):
    launch('llmfoundry', overrides(text_run, tmp_path, max_duration='1ba', **ALRS), cwd=tmp_path)
    assert validation(tmp_path)[0] == validation(undisturbed[0])[0]


@pytest.mark.parametrize('batch_size', [1, 7, 64])
def test_validation_loss_does_not_depend_on_the_evaluation_batch(
    train, text_run, tmp_path, batch_size
):
    local = text_run / 'padded'
    trainer = train(
        tmp_path,
        max_duration='1ba',
        device_eval_batch_size=batch_size,
        **{'train_loader.dataset.local': local, 'eval_loader.dataset.local': local},
    )
    model = trainer.state.model.model.eval()
    total = targets = 0
    for row in StreamingDataset(local=str(local), split='val', shuffle=False, batch_size=1):
        ids = torch.from_numpy(row['tokens'].astype('int64'))[None]
        ids = ids[:, : int((ids != model.config.pad_token_id).sum())]
        with torch.no_grad():
            logits = model(ids).logits
        total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction='sum').double()
        targets += ids.shape[1] - 1
    assert validation(tmp_path)[1] == pytest.approx((total / targets).item(), rel=1e-5)
    trainer.close()


@pytest.mark.parametrize(('batches', 'batch_size'), [(1, 4), (3, 2), (30, 1)])
def test_a_model_that_knows_nothing_scores_the_log_of_the_vocabulary(batches, batch_size):
    model = ComposerAsymLoopCausalLM(
        vocab_size=97, d_model=8, n_heads=2, d_ff=8, n_encoder_layers=1, n_decoder_layers=1
    )
    torch.nn.init.zeros_(model.model.lm_head.weight)
    metric = model.get_metrics()['LanguageCrossEntropy']
    generator = torch.Generator().manual_seed(0)
    for i in range(batches):
        ids = torch.randint(0, 97, (batch_size, 12), generator=generator)
        labels = ids.clone()
        labels[:, 3 + i % 8 :] = -100
        batch = {'input_ids': ids, 'labels': labels}
        model.update_metric(batch, model.eval_forward(batch), metric)
    assert metric.compute().item() == pytest.approx(math.log(97), rel=1e-6)


def test_a_token_duration_counts_positions_of_padded_rows(train, text_run, tmp_path):
    local = text_run / 'padded'
    trainer = train(
        tmp_path,
        max_duration=f'{3 * 8 * 32}tok',
        eval_interval='100ba',
        **{'train_loader.dataset.local': local, 'eval_loader.dataset.local': local},
    )
    assert trainer.state.timestamp.batch.value == 3
    trainer.close()


def test_microbatches_do_not_change_the_weights(train, text_run, tmp_path):
    local = text_run / 'padded'
    weights = []
    for microbatch in (8, 2):
        trainer = train(
            tmp_path / str(microbatch),
            max_duration='3ba',
            eval_interval='100ba',
            device_train_microbatch_size=microbatch,
            **{'train_loader.dataset.local': local, 'eval_loader.dataset.local': local},
        )
        weights.append([p.detach().clone() for p in trainer.state.model.parameters()])
        trainer.close()
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
