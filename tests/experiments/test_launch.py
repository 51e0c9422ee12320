# SPDX-License-Identifier: Apache-2.0
import json
import shlex
import subprocess
import sys

import pytest
import yaml
from mcli import RunConfig
from mcli.models.run_config import FinalRunConfig
from omegaconf import OmegaConf

from asymloop_foundry.experiments.__main__ import main
from asymloop_foundry.experiments.launch import Launch, merged_config, repository_root
from asymloop_foundry.experiments.runs import RUNS


def test_the_printed_command_is_what_is_trained(capsys):
    assert main(['command', '4b/lr-x2-k5', '--runs', '/r', '--set', 'precision=fp32']) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ['composer', 'train.py', 'yamls/asymloop-60m.yaml']
    assert (repository_root() / words[2]).is_file()
    assert words[-1] == 'precision=fp32'
    config = OmegaConf.from_cli(words[3:])
    assert config.model.num_iterations == 5
    assert config.optimizer.lr == 2e-3
    assert config.save_folder == '/r/paper-60m-asymloop-k5-lr-x2-seed6198/checkpoints'
    assert config.callbacks.results_writer == {
        'folder': '/r/paper-60m-asymloop-k5-lr-x2-seed6198',
        'experiment': 'paper/60m-asymloop-k5-lr-x2',
    }


def test_keys_that_the_yaml_has_already_are_not_repeated():
    overrides = Launch(RUNS['60m-dense']).overrides()
    assert set(overrides) == {
        'run_name',
        'save_folder',
        'callbacks.results_writer.folder',
        'callbacks.results_writer.experiment',
    }


def test_keys_of_alrs_do_not_switch_it_on_where_rates_are_uniform():
    changed = ('algorithms.alrs.update_interval=10ba',)
    config = merged_config(Launch(RUNS['60m-dense'], 'tiny', extra=changed))
    assert config.algorithms.alrs == {'mode': 'uniform', 'update_interval': '10ba'}


def test_each_seed_is_a_run_of_its_own(capsys):
    main(['command', '10/135m-full-loop-k2'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert len({shlex.split(line)[3] for line in lines}) == 3
    assert 'seed=6200' in lines[2]


def test_fine_tuning_starts_from_its_parents_last_checkpoint():
    config = merged_config(Launch(RUNS['1b-gsm8k-full-loop-k2'], runs_folder='/r'))
    assert config.load_path == '/r/paper-1b-full-loop-k2-seed6198/checkpoints/ep0-ba38147'
    assert config.load_weights_only
    tiny = merged_config(Launch(RUNS['1b-gsm8k-full-loop-k2'], 'tiny', runs_folder='/r'))
    assert tiny.load_path == '/r/tiny-1b-full-loop-k2-seed6198/checkpoints/latest-rank0.pt'


def test_missing_data_and_checkpoints_are_named_before_anything_starts(tmp_path, capsys):
    arguments = ['--scale', 'tiny', '--data', f'{tmp_path}/data', '--runs', str(tmp_path)]
    assert main(['run', '13/dense', *arguments]) == 1
    message = capsys.readouterr().err
    assert f'training data {tmp_path}/data/gsm8k' in message
    assert 'data_prep/convert_gsm8k.py' in message
    assert 'experiments run 1b-dense --scale tiny' in message


def test_run_trains_once_and_leaves_what_is_finished_alone(tmp_path, monkeypatch):
    (tmp_path / 'data' / 'data').mkdir(parents=True)
    commands = []

    def train(command, **_):
        commands.append(command)
        folder = next(w for w in command if w.startswith('callbacks.results_writer.folder='))
        results = {'finished': True}
        with open(folder.partition('=')[2] + '/results.json', 'w') as file:
            json.dump(results, file)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, 'run', train)
    arguments = ['run', '4c', '--scale', 'tiny', '--data', f'{tmp_path}/data', '--runs']
    assert main([*arguments, f'{tmp_path}/runs', '-n', '2']) == 0
    assert len(commands) == 2
    assert commands[0][:5] == [sys.executable, '-m', 'composer.cli', '-n', '2']
    assert main([*arguments, f'{tmp_path}/runs']) == 0
    assert len(commands) == 2
    logs = sorted(tmp_path.glob('runs/*/train.log'))
    assert len(logs) == 2
    assert logs[0].read_text().startswith('$ composer train.py yamls/asymloop-tiny.yaml ')


def test_a_run_that_fails_says_where_its_output_is(tmp_path, monkeypatch, capsys):
    (tmp_path / 'data' / 'data').mkdir(parents=True)
    monkeypatch.setattr(subprocess, 'run', lambda c, **_: subprocess.CompletedProcess(c, 3))
    arguments = ['--scale', 'tiny', '--data', f'{tmp_path}/data', '--runs', str(tmp_path)]
    assert main(['run', '60m-dense', *arguments]) == 1
    assert 'stopped with exit status 3' in capsys.readouterr().err


@pytest.mark.parametrize(('row', 'gpus', 'bucket_folder'), [
    ('1/1b-asymloop-k3', 32, 'paper-1b-asymloop-k3-seed6198'),
    ('4a/no-local-kv-k5', 8, 'paper-60m-no-local-kv-k5-seed6198'),
])  # fmt: skip
def test_the_run_file_of_a_row_is_one_that_mcli_accepts(tmp_path, row, gpus, bucket_folder):
    path = tmp_path / 'run.yaml'
    assert main(['command', row, '--mcli', str(path)]) == 0
    final = FinalRunConfig.finalize_config(RunConfig.from_file(path)).to_create_run_api_input()
    assert final['runInput']['compute']['gpus'] == gpus
    command = yaml.safe_load(path.read_text())['command'].splitlines()
    assert command[0] == 'cd asymloop_foundry'
    assert shlex.split(command[1])[:2] == ['composer', 'train.py']
    assert f'save_folder=oci://YOUR-BUCKET/runs/{bucket_folder}/checkpoints' in command[1]
    assert 'variables.data_remote=oci://YOUR-BUCKET/fineweb-edu-t5' in command[1]


def test_a_run_file_holds_one_run(tmp_path, capsys):
    assert main(['command', '4c', '--mcli', str(tmp_path / 'run.yaml')]) == 1
    assert '--mcli writes one run, and these are 2' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
