# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from composer.models import ComposerModel
from distributed.alrs_training import SHORT, History, build_trainer, train

from asymloop_foundry import spectra
from asymloop_foundry.algorithms.alrs import ALRS
from asymloop_foundry.algorithms.records import read_records
from asymloop_foundry.callbacks.spectrum_monitor import SpectrumMonitor


def stable_rank(weight):
    matrix = weight.double().numpy()
    largest = np.linalg.norm(matrix, 2)
    return np.linalg.norm(matrix, 'fro') ** 2 / (largest**2 * min(matrix.shape))


@pytest.mark.parametrize('with_alrs', [False, True])
def test_group_means_are_those_of_the_weights_at_each_measurement(tmp_path, with_alrs):
    history = train(
        max_duration='12ba',
        algorithm=ALRS(**SHORT) if with_alrs else False,
        weights_at=(0, 5, 10),
        callbacks=[SpectrumMonitor('5ba')],
        save_folder=str(tmp_path),
        save_interval='12ba',
    )
    rows = read_records(tmp_path / 'spectra.jsonl')
    assert [row['batch'] for row in rows] == [0, 5, 10, 12]
    for row in rows[:3]:
        weights = history.weights[row['batch']]
        for stack in ('encoder', 'decoder'):
            for kind, part in (('attention', '.attn.'), ('ffn', '.ffn.')):
                members = [w for n, w in weights.items() if f'.{stack}.' in n and part in n]
                expected = sum(map(stable_rank, members)) / len(members)
                assert row['mean_stable_rank'][f'{stack}/{kind}'] == pytest.approx(
                    expected, rel=1e-4
                )
        globals_ = [stable_rank(w) for n, w in weights.items() if 'global_kv' in n]
        assert row['mean_stable_rank']['decoder/global'] == pytest.approx(np.mean(globals_))
        assert set(row['stable_rank']) == {n for n in weights if '_proj' in n}


def test_what_alrs_has_just_measured_is_not_decomposed_again(monkeypatch, tmp_path):
    counted = []
    original = spectra._unit_spectra

    def counting(unit, *rest):
        counted.append(len(unit))
        return original(unit, *rest)

    monkeypatch.setattr(spectra, '_unit_spectra', counting)
    history = History(stop_at=3)
    trainer = build_trainer(
        history=history, callbacks=[SpectrumMonitor('5ba', record_folder=str(tmp_path))]
    )
    trainer.fit()
    trainer.close()
    matrices = len(read_records(tmp_path / 'spectra.jsonl')[0]['stable_rank'])
    # Once at the first step for both, once at the end for the monitor alone.
    assert sum(counted) == 2 * matrices


def test_training_is_unchanged_by_being_watched():
    watched = train(max_duration='6ba', callbacks=[SpectrumMonitor('2ba')])
    assert watched.losses == train(max_duration='6ba').losses


@pytest.mark.parametrize('interval', ['0ba', '1ep', '100tok'])
def test_an_interval_that_is_no_number_of_batches_is_refused(interval):
    with pytest.raises(ValueError, match=rf"spectrum_monitor\.interval='{interval}'"):
        SpectrumMonitor(interval)


class Plain(ComposerModel):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch):
        return self.weight.sum()

    def loss(self, outputs, batch):
        return outputs


def test_a_model_without_known_matrices_is_refused():
    with pytest.raises(ValueError, match='finds no matrix'):
        build_trainer(model=Plain(), algorithm=False, callbacks=[SpectrumMonitor()])
