# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch
from composer import Callback, Evaluator, Trainer
from composer.metrics import CrossEntropy
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

from asymloop_foundry.callbacks import results_writer
from asymloop_foundry.callbacks.results_writer import ResultsWriter

CONFIG = {'seed': 3, 'variables': {'width': 4}, 'model': {'width': '${variables.width}'}}


class Interruption(Callback):
    def batch_start(self, state, logger):
        if state.timestamp.batch == 3:
            raise KeyboardInterrupt


def trainer(folder: str, *callbacks: Callback, **kwargs) -> Trainer:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    loader = DataLoader(data, batch_size=4)
    model = ComposerClassifier(torch.nn.Linear(4, 3), num_classes=3, val_metrics=CrossEntropy())
    return Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=Evaluator(label='validation', dataloader=loader),
        eval_interval='2ba',
        max_duration='4ba',
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[ResultsWriter(CONFIG, folder=folder, experiment='tiny/60m-dense'), *callbacks],
        run_name='a-run',
        device='cpu',
        progress_bar=False,
        loggers=[],
        **kwargs,
    )


@pytest.fixture
def fitted(tmp_path):
    trained = trainer(f'{tmp_path}/{{run_name}}')
    trained.fit()
    results = json.loads((tmp_path / 'a-run' / 'results.json').read_text())
    return trained, results


def test_the_last_evaluation_and_every_earlier_one_are_kept(fitted):
    trained, results = fitted
    assert [entry['step'] for entry in results['trajectory']] == [2, 4]
    measured = float(trained.state.eval_metric_values['CrossEntropy'])
    assert results['metrics'] == {'validation': {'CrossEntropy': pytest.approx(measured)}}
    assert results['trajectory'][-1]['metrics'] == results['metrics']['validation']


def test_what_the_run_was_and_cost_is_beside_it(fitted):
    _, results = fitted
    assert results['experiment'] == 'tiny/60m-dense'
    assert results['seed'] == 3
    assert results['finished']
    assert (results['steps'], results['samples']) == (4, 16)
    assert results['parameters'] == 15
    assert 0 < results['seconds_per_step'] < results['seconds']
    assert results['peak_gib'] > 0
    assert results['config']['model'] == {'width': 4}
    assert len(results['config_sha256']) == 64


def test_an_interrupted_run_is_not_finished_and_a_resumed_one_has_all_evaluations(tmp_path):
    folder = str(tmp_path / 'run')
    checkpoints = str(tmp_path / 'checkpoints')
    stopped = trainer(folder, Interruption(), save_folder=checkpoints, save_interval='2ba')
    with pytest.raises(KeyboardInterrupt):
        stopped.fit()
    results = json.loads((tmp_path / 'run' / 'results.json').read_text())
    assert (results['steps'], results['finished']) == (2, False)
    trainer(folder, load_path=f'{checkpoints}/latest-rank0.pt').fit()
    results = json.loads((tmp_path / 'run' / 'results.json').read_text())
    assert [entry['step'] for entry in results['trajectory']] == [2, 4]
    assert results['finished']


def test_a_remote_folder_gets_the_file_uploaded(monkeypatch):
    uploaded = {}

    class Store:
        def upload_object(self, name, path):
            uploaded[name] = json.loads(Path(path).read_text())

    monkeypatch.setattr(
        results_writer,
        'maybe_create_object_store_from_uri',
        lambda uri: Store() if '://' in uri else None,
    )
    trainer('oci://bucket/runs/{run_name}').fit()
    assert list(uploaded) == ['runs/a-run/results.json']
    assert uploaded['runs/a-run/results.json']['finished']
