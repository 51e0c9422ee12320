# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from composer import Trainer
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from asymloop_foundry.callbacks.harness import Harness
from asymloop_foundry.evaluation.harness import accuracies, evaluate
from asymloop_foundry.evaluation.scorer import ContinuationScorer
from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM


@pytest.fixture(scope='module')
def tokenizer(t5_tokenizer_dir):
    return AutoTokenizer.from_pretrained(t5_tokenizer_dir)


@pytest.fixture(scope='module')
def train(tokenizer):
    def run(*callbacks):
        torch.manual_seed(0)
        model = ComposerAsymLoopCausalLM(
            tokenizer, vocab_size=32128, d_model=16, n_heads=2, d_ff=24, n_encoder_layers=1,
            n_decoder_layers=1, num_iterations=2, init_std=0.3,
        )  # fmt: skip
        rows = [{'input_ids': ids, 'labels': ids} for ids in torch.randint(5, 500, (16, 12))]
        logger = InMemoryLogger()
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(rows, batch_size=4, shuffle=True),
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            max_duration='4ba',
            callbacks=list(callbacks),
            loggers=logger,
            progress_bar=False,
            precision='fp32',
            device='cpu',
            seed=1,
        )
        trainer.fit()
        return model, logger

    return run


@pytest.fixture(scope='module')
def evaluated(train, data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp('harness')
    callback = Harness(
        folder=str(folder / '{run_name}'),
        interval='2ba',
        shots=[1],
        tasks=['piqa', 'openbookqa'],
        data=str(data_dir / 'hub_schema'),
        batch_size=4,
        limit=4,
    )
    model, logger = train(callback)
    return model, logger, folder


def test_each_interval_leaves_a_file_and_logs_each_task(evaluated):
    _, logger, folder = evaluated
    names = sorted(path.name for path in folder.rglob('*.json'))
    assert names == [f'harness-ba{step}-1shot.json' for step in (2, 4)]
    for task in ('piqa', 'openbookqa', 'mean'):
        logged = logger.data[f'harness/{task}/1-shot/acc']
        assert [time.batch.value for time, _ in logged] == [2, 4]
    content = json.loads(next(folder.rglob('harness-ba2-1shot.json')).read_text())
    assert content['step'] == 2


def test_the_last_scores_are_those_of_the_trained_model(evaluated, tokenizer, data_dir):
    model, logger, _ = evaluated
    scorer = ContinuationScorer(model.model.eval(), tokenizer, 2)
    found = accuracies(evaluate(scorer, ('piqa',), 1, data_dir / 'hub_schema', 4))
    assert logger.data['harness/piqa/1-shot/acc'][-1][1] == found['piqa']


def test_training_is_the_same_with_and_without(evaluated, train):
    model, _, _ = evaluated
    alone, _ = train()
    for with_callback, without in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(with_callback, without)


def test_a_wrong_task_or_folder_is_an_error_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"harness\.tasks: 'lambada'"):
        Harness(folder=str(tmp_path), tasks=['lambada'])
    with pytest.raises(FileNotFoundError, match='openbookqa/main'):
        Harness(folder=str(tmp_path), data=str(tmp_path))
