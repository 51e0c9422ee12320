# SPDX-License-Identifier: Apache-2.0
"""Run files for MCLI, checked with its own classes, which by themselves let unknown keys pass."""

import dataclasses
import shlex
import warnings
from pathlib import Path

import pytest
import yaml
from mcli import RunConfig
from mcli.models.run_config import FinalRunConfig
from omegaconf import OmegaConf

from asymloop_foundry.data.command import parser as convert_parser
from asymloop_foundry.evaluation.cli import _parser as eval_parser
from asymloop_foundry.preflight import MODEL_NAME

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / 'yamls' / 'mcli').glob('*.yaml'))
INTEGRATIONS = {
    'git_repo': {'git_repo', 'git_branch', 'pip_install'},
    'wandb': {'project', 'entity'},
}
TORCH = '2.7.0'


def content_of(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def commands_of(path: Path) -> list[list[str]]:
    first, *commands = content_of(path)['command'].splitlines()
    assert first == 'cd asymloop_foundry'
    return [shlex.split(line) for line in commands]


PARSERS = {'eval.py': eval_parser, 'data_prep/convert_fineweb.py': convert_parser}


def test_the_four_kinds_of_job_are_there():
    assert [path.stem for path in FILES] == [
        'evaluate',
        'prepare-data',
        'pretrain-1b',
        'pretrain-350m',
    ]


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_mcli_accepts_the_run_file_without_a_warning(path):
    assert set(content_of(path)) <= {field.name for field in dataclasses.fields(RunConfig)}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        config = RunConfig.from_file(path)
        run = FinalRunConfig.finalize_config(config).to_create_run_api_input()['runInput']
    assert run['runName'] == content_of(path)['name']
    assert run['image'].startswith(f'mosaicml/llm-foundry:{TORCH}_')
    assert run['compute']['cluster']


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_integrations_are_known_and_install_this_package(path):
    integrations = content_of(path)['integrations']
    for integration in integrations:
        keys = set(integration) - {'integration_type'}
        assert keys == INTEGRATIONS[integration['integration_type']]
    (git,) = [i for i in integrations if i['integration_type'] == 'git_repo']
    assert git['git_repo'].endswith('/asymloop_foundry')
    assert git['pip_install'].startswith('-e .')


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_every_command_exists_and_takes_its_arguments(path):
    for launcher, script, *arguments in commands_of(path):
        assert (ROOT / script).is_file()
        if launcher == 'composer':
            assert script == 'train.py'
            base = OmegaConf.load(ROOT / arguments[0])
            assert base.model.name == MODEL_NAME
            for argument in arguments[1:]:
                key = argument.partition('=')[0]
                known = OmegaConf.select(base, key.rpartition('.')[0] or key) is not None
                assert known or key.startswith('loggers.'), key
        else:
            assert launcher == 'python'
            PARSERS[script]().parse_args(arguments)


def test_1b_trains_on_four_nodes_of_eight():
    assert content_of(ROOT / 'yamls' / 'mcli' / 'pretrain-1b.yaml')['compute']['gpus'] == 32
