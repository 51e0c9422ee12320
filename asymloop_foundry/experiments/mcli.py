# SPDX-License-Identifier: Apache-2.0
"""Run files for MCLI, made from those in ``yamls/mcli``."""

import re
from dataclasses import replace

import yaml

from .launch import Launch, repository_root

__all__ = ['run_file']

# The largest models train on four nodes, as in the paper; the others fit one.
TEMPLATES = {'1b': 'pretrain-1b.yaml'}
DEFAULT_TEMPLATE = 'pretrain-350m.yaml'
NAME_LENGTH = 40  # the platform adds a suffix to a name that must stay below 64 characters


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '|' if '\n' in text else None
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


_Dumper.add_representer(str, _block)


def run_file(launch: Launch) -> str:
    """The text of a run file that trains a row on the platform.

    Image, integrations and compute are those of the run file in ``yamls/mcli`` for the same size, with
    its placeholders in capitals; name and command are the row's. Runs go to the bucket of that file
    unless their folder is remote already, since the machine's own disk goes with it.
    """
    folder = repository_root() / 'yamls' / 'mcli'
    template = folder / TEMPLATES.get(launch.run.scale, DEFAULT_TEMPLATE)
    content = yaml.safe_load(template.read_text(encoding='utf-8'))
    content['name'] = re.sub('[^a-z0-9]+', '-', launch.run_name.lower())[:NAME_LENGTH].strip('-')
    first, _, train = content['command'].partition('\n')
    bucket = re.findall(r'variables\.data_remote=(\S+)/', train)[0]
    remote = replace(
        launch,
        runs_folder=launch.runs_folder if '://' in launch.runs_folder else f'{bucket}/runs',
        extra=(f'variables.data_remote={bucket}/fineweb-edu-t5', *launch.extra),
    )
    content['command'] = f'{first}\n{remote.command()}'
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10_000)
    return f'# {launch.experiment}: mcli run -f THIS-FILE, once what is in capitals is replaced\n{text}'
