# SPDX-License-Identifier: Apache-2.0
"""What README and docs tell a reader to type is taken by the programs, and every link leads somewhere."""

import argparse
import inspect
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from llmfoundry import registry
from omegaconf import OmegaConf

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/**/*.md')])
PROGRAMS = ('python', 'composer', 'llmfoundry', 'make')
MODEL_KEYS = set(inspect.signature(AsymLoopConfig.__init__).parameters)


def code_lines(page: Path) -> list[str]:
    """Lines of fenced and indented blocks, continued ones joined."""
    text = page.read_text(encoding='utf-8').replace('\\\n', ' ')
    fenced = [
        line for block in re.findall(r'```\w*\n(.*?)```', text, re.S) for line in block.splitlines()
    ]
    indented = re.findall(r'^ {4}(\S.*)$', text, re.M)
    return [line.strip() for line in (*fenced, *indented)]


def commands() -> list[str]:
    found = {line for page in PAGES for line in code_lines(page)}
    return sorted(line for line in found if line.split(' ')[0] in PROGRAMS)


class ParsedError(Exception):
    """The program's own parser has taken the arguments."""


def parse(program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a program up to the end of its argument parsing."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        original(self, args, namespace)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', parse_args)
    monkeypatch.setattr(sys, 'argv', program)
    if program[0] == '-m':
        monkeypatch.setattr(sys, 'argv', program[1:])
        runpy.run_module(program[1], run_name='__main__', alter_sys=True)
        return
    monkeypatch.syspath_prepend(str((ROOT / program[0]).parent))
    runpy.run_path(str(ROOT / program[0]), run_name='__main__')


@pytest.mark.parametrize('line', [c for c in commands() if c.startswith('python ')])
def test_programs_take_the_documented_arguments(line, monkeypatch):
    words = shlex.split(re.sub(r'[\[\]]', '', line), comments=True)[1:]
    if words[:2] == ['-m', 'pytest']:
        return
    if words[0] == 'train.py':
        check_overrides(words)
        return
    # What a program says without them is another test's business.
    with pytest.raises(ParsedError):
        parse(words, monkeypatch)


def check_overrides(words: list[str]) -> None:
    """A training command: the YAML exists, and its arguments name keys that it or the model has."""
    start = words.index('train.py') if 'train.py' in words else words.index('train')
    config = OmegaConf.load(ROOT / words[start + 1])
    for pair in words[start + 2 :]:
        key, separator, _ = pair.partition('=')
        assert separator, pair
        group, _, name = key.partition('.')
        known = OmegaConf.select(config, key) is not None
        if group == 'model':
            known = known or name in MODEL_KEYS
        elif group == 'algorithms':
            known = known or name.split('.')[0] in registry.algorithms.get_all()
        assert known, f'{key} is no key of {words[start + 1]}'


@pytest.mark.parametrize(
    'line', [c for c in commands() if c.startswith('composer ') or c.startswith('llmfoundry train')]
)
def test_training_commands_name_existing_yamls_and_keys(line):
    check_overrides(shlex.split(line, comments=True))


@pytest.mark.parametrize('line', [c for c in commands() if c.startswith('make ')])
def test_make_targets_exist(line):
    target = next(word for word in shlex.split(line, comments=True)[1:] if '=' not in word)
    assert re.search(rf'^{target}:', (ROOT / 'Makefile').read_text(), re.M)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r'\]\(([^)#\s]+)[^)]*\)', page.read_text(encoding='utf-8')):
        if '://' not in target:
            assert (page.parent / target).exists(), target
