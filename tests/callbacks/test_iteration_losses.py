# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from composer import Evaluator, Trainer
from composer.loggers import InMemoryLogger
from family import FAMILY, SMALL
from llmfoundry import registry
from llmfoundry.utils.builders import build_callback
from torch.utils.data import DataLoader

from asymloop_foundry.callbacks.iteration_losses import IterationLosses
from asymloop_foundry.evaluation.iterations import iteration_losses
from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM


def rows(seed: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 61, (8, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 5:] = -100
    return [{'input_ids': i, 'labels': label} for i, label in zip(ids, labels, strict=True)]


@pytest.fixture(scope='module', params=['asymloop', 'full_loop', 'dense'])
def run(request):
    torch.manual_seed(0)
    model = ComposerAsymLoopCausalLM(**{**SMALL, **FAMILY[request.param]})
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows(1), batch_size=4),
        eval_dataloader=Evaluator(
            label='eval',
            dataloader=DataLoader(rows(2), batch_size=4),
            metric_names=['LanguageCrossEntropy'],
        ),
        eval_interval='1ba',
        max_duration='2ba',
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=[IterationLosses()],
        loggers=logger,
        progress_bar=False,
        precision='fp32',
        device='cpu',
    )
    trainer.fit()
    return model, logger.data, FAMILY[request.param]['num_iterations']


def logged(data, name):
    return [float(value) for _, value in data[f'metrics/eval/{name}']]


def test_the_last_iterations_loss_is_the_validation_loss(run):
    _, data, k = run
    expected = logged(data, 'LanguageCrossEntropy')
    assert len(expected) == 2
    assert logged(data, f'LanguageCrossEntropy_K{k}') == pytest.approx(expected, abs=1e-5)
    assert f'metrics/eval/LanguageCrossEntropy_K{k + 1}' not in data


def test_each_iterations_loss_is_that_of_the_model_as_it_is(run):
    model, data, k = run
    batch = {key: torch.stack([row[key] for row in rows(2)]) for key in ('input_ids', 'labels')}
    expected, _ = iteration_losses(model.model.eval(), [batch], k)
    found = [logged(data, f'LanguageCrossEntropy_K{i + 1}')[-1] for i in range(k)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_nothing_listens_after_validation(run):
    model, _, _ = run
    modules = [model.model, *model.model.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def test_foundry_builds_it_by_name():
    if 'iteration_losses' not in registry.callbacks:
        registry.callbacks.register('iteration_losses', func=IterationLosses)
    assert isinstance(build_callback('iteration_losses', {}), IterationLosses)
