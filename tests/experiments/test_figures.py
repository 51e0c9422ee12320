# SPDX-License-Identifier: Apache-2.0
import argparse

import pytest
from distributed.alrs_training import train

from asymloop_foundry.algorithms.records import read_records
from asymloop_foundry.callbacks.spectrum_monitor import SpectrumMonitor
from asymloop_foundry.experiments import figures

PNG = b'\x89PNG\r\n\x1a\n'


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp('runs')
    for name, algorithm in (('guided', None), ('plain', False)):
        train(
            max_duration='20ba',
            algorithm=algorithm,
            callbacks=[SpectrumMonitor('5ba')],
            save_folder=str(root / name / 'checkpoints'),
            save_interval='20ba',
        )
    return root


def command(*arguments):
    parser = argparse.ArgumentParser()
    figures.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(['figures', *map(str, arguments)])
    parsed.run(parsed)


def test_both_figures_are_drawn_from_the_records_of_runs(runs, tmp_path, capsys):
    command(f'ALRS={runs / "guided"}', f'uniform={runs / "plain"}', '--out', tmp_path)
    for name in ('figure3.png', 'figure4.png'):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert 'without uniform: no alrs.jsonl' in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ['figure3.png', 'figure4.png']


def test_figure_3_shows_every_group_the_base_and_the_ratios(runs):
    rows = read_records(runs / 'guided' / 'checkpoints' / 'alrs.jsonl')
    figure = figures.draw_learning_rates({'run': rows})
    upper, lower = figure.axes
    assert upper.get_legend_handles_labels()[1] == [
        'base',
        'decoder attention',
        'decoder ffn',
        'decoder global',
        'encoder attention',
        'encoder ffn',
    ]
    [line] = [line for line in upper.lines if line.get_label() == 'decoder ffn']
    logged = [row['mean']['decoder/ffn'] for row in rows if row['kind'] == 'lr']
    assert list(line.get_ydata()) == logged
    assert lower.get_legend_handles_labels()[1] == ['attention', 'ffn']


def test_figure_4_has_a_panel_per_group_and_a_line_per_run(runs):
    rows = {
        name: read_records(runs / name / 'checkpoints' / 'spectra.jsonl')
        for name in ('guided', 'plain')
    }
    figure = figures.draw_stable_ranks(rows)
    assert [axis.get_title() for axis in figure.axes] == [
        'decoder attention',
        'decoder ffn',
        'encoder attention',
        'encoder ffn',
        'decoder global',
    ]
    for axis in figure.axes:
        assert [line.get_label() for line in axis.lines] == ['guided', 'plain']
        assert list(axis.lines[0].get_xdata()) == [0, 5, 10, 15, 20]


def test_a_folder_without_records_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'neither alrs\.jsonl nor spectra\.jsonl'):
        command(tmp_path)


def test_a_folder_of_several_runs_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match='holds 2 files named spectra'):
        command(runs, '--out', tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match='nowhere is not a folder'):
        command(tmp_path / 'nowhere')


def test_one_label_for_two_runs_is_refused(runs):
    with pytest.raises(ValueError, match='given twice'):
        command(f'a={runs / "guided"}', f'a={runs / "plain"}')
