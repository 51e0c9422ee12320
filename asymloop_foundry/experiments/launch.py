# SPDX-License-Identifier: Apache-2.0
"""From a run of the registry to the command that trains it."""

import inspect
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..files import RESULTS_FILE
from ..models.configuration_asymloop import AsymLoopConfig
from .runs import RUNS, SEED, Run

__all__ = ['Launch', 'base_yaml', 'merged_config', 'repository_root']

FAMILIES = {'dense': 'dense', 'full-loop': 'full-loop', 'full-loop-wide': 'full-loop'}
MISSING = object()


def repository_root() -> Path:
    """The clone that holds ``train.py`` and ``yamls/``.

    Raises:
        FileNotFoundError: the package is installed without them.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / 'train.py').is_file() or not (root / 'yamls').is_dir():
        raise FileNotFoundError(
            f'{root} has no train.py and yamls/: experiments run from a clone of the repository; '
            'install it there with `pip install -e .`.'
        )
    return root


def base_yaml(run: Run, scale: str) -> str:
    """The YAML that a run starts from, relative to the repository."""
    if run.is_fine_tuning:
        return 'yamls/sft/gsm8k-1b.yaml'
    if scale == 'tiny':
        return 'yamls/asymloop-tiny.yaml'
    return f'yamls/{FAMILIES.get(run.system, "asymloop")}-{run.scale}.yaml'


@dataclass(frozen=True)
class Launch:
    """A run with everything that its command needs.

    Attributes:
        run: the run.
        scale: ``paper`` or ``tiny``.
        seed: the seed of weights and data order.
        runs_folder: where run folders go.
        data: what ``convert_fineweb.py`` wrote (at ``tiny``: the folder that holds it as ``data`` beside
            ``tokenizer``); the YAML's own when ``None``.
        extra: further ``key=value`` arguments, which win.
    """

    run: Run
    scale: str = 'paper'
    seed: int = SEED
    runs_folder: str = './runs'
    data: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def experiment(self) -> str:
        """The name under which results are collected."""
        return f'{self.scale}/{self.run.name}'

    @property
    def run_name(self) -> str:
        """Composer's name of the run: unique over scales and seeds."""
        return f'{self.scale}-{self.run.name}-seed{self.seed}'

    @property
    def folder(self) -> str:
        """The run's folder: results, log and checkpoints."""
        return f'{self.runs_folder}/{self.run_name}'

    @property
    def yaml(self) -> str:
        """The YAML that the run starts from, relative to the repository."""
        return base_yaml(self.run, self.scale)

    def overrides(self) -> dict[str, Any]:
        """Every key that differs from the YAML, by its dotted name."""
        base = OmegaConf.load(repository_root() / self.yaml)
        defaults = _model_defaults()
        settings = {
            'run_name': self.run_name,
            'seed': self.seed,
            'save_folder': f'{self.folder}/checkpoints',
            **self.run.settings(self.scale),
            **self._data_settings(),
            'callbacks.results_writer.folder': self.folder,
            'callbacks.results_writer.experiment': self.experiment,
        }
        if OmegaConf.select(base, 'algorithms.alrs') is not None:
            defaults['algorithms.alrs.mode'] = 'alrs'
        elif settings.get('algorithms.alrs.mode') == 'uniform' and not self._sets_alrs():
            del settings['algorithms.alrs.mode']
        return {
            key: value
            for key, value in settings.items()
            if _get(base, key, defaults.get(key, MISSING)) != value
        }

    def arguments(self) -> list[str]:
        """The arguments of ``composer``."""
        pairs = [f'{key}={_yaml_value(value)}' for key, value in self.overrides().items()]
        return ['train.py', self.yaml, *pairs, *self.extra]

    def command(self) -> str:
        """The exact line for a shell, in the repository's folder."""
        return shlex.join(['composer', *self.arguments()])

    def finished(self) -> bool:
        """Whether the run has left its results and reached its duration."""
        path = self._absolute(self.folder) / RESULTS_FILE
        return path.is_file() and json.loads(path.read_text(encoding='utf-8'))['finished']

    def missing_inputs(self) -> list[str]:
        """What the run needs and does not find, each with the remedy."""
        config = merged_config(self)
        missing = []
        dataset = config.train_loader.dataset
        local = self._absolute(dataset.local)
        if dataset.get('remote') in (None, dataset.local) and not local.is_dir():
            script = 'gsm8k' if self.run.is_fine_tuning else 'fineweb'
            missing.append(
                f'training data {local}: write it with data_prep/convert_{script}.py, or name '
                'another folder with --data.'
            )
        if self.run.parent is not None:
            checkpoint = self._absolute(config.load_path)
            if not checkpoint.exists():
                missing.append(
                    f'checkpoint {checkpoint}: train it first, `python -m '
                    f'asymloop_foundry.experiments run {self.run.parent} --scale {self.scale}`, or '
                    'name another with --set load_path=PATH.'
                )
        return missing

    def train(self, n_processes: int | None = None) -> int:
        """Trains, its output going to ``train.log`` in the run's folder, and returns the exit status.

        Args:
            n_processes: ranks on this machine; one per GPU when ``None``, or one without a GPU.

        Raises:
            FileNotFoundError: training data or a checkpoint to start from is missing.
        """
        if missing := self.missing_inputs():
            raise FileNotFoundError(f'{self.run_name} needs ' + ' It needs '.join(missing))
        folder = self._absolute(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        ranks = [] if n_processes is None else ['-n', str(n_processes)]
        launcher = [sys.executable, '-m', 'composer.cli', *ranks, *self.arguments()]
        with open(folder / 'train.log', 'a', encoding='utf-8') as log:
            log.write(f'$ {self.command()}\n')
            log.flush()
            return subprocess.run(
                launcher, cwd=repository_root(), stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode

    def _sets_alrs(self) -> bool:
        """Whether further keys would switch ALRS on, whose mode is ``alrs`` by default."""
        return any(argument.startswith('algorithms.alrs') for argument in self.extra)

    def _data_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if self.data is not None:
            settings |= self._data_folder(self.data)
        if self.run.parent is not None:
            parent = Launch(RUNS[self.run.parent], self.scale, SEED, self.runs_folder)
            # The 1B YAMLs save sharded checkpoints, a folder each; the tiny one a single file.
            name = (
                'latest-rank0.pt'
                if self.scale == 'tiny'
                else f'ep0-ba{parent.run.n_steps(self.scale)}'
            )
            settings['load_path'] = f'{parent.folder}/checkpoints/{name}'
        return settings

    def _data_folder(self, data: str) -> dict[str, Any]:
        if self.scale != 'tiny':
            return {'variables.data_local': data}
        if self.run.is_fine_tuning:
            return {'variables.data_local': f'{data}/gsm8k', 'tokenizer.name': f'{data}/tokenizer'}
        return {'variables.work_dir': data}

    def _absolute(self, path: str) -> Path:
        return repository_root() / path


def merged_config(launch: Launch) -> DictConfig:
    """The configuration that ``train.py`` reads: the YAML with the command's arguments over it."""
    base = OmegaConf.load(repository_root() / launch.yaml)
    merged = OmegaConf.merge(base, OmegaConf.from_cli(launch.arguments()[2:]))
    assert isinstance(merged, DictConfig)
    return merged


def _model_defaults() -> dict[str, Any]:
    parameters = inspect.signature(AsymLoopConfig.__init__).parameters
    return {
        f'model.{name}': parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def _get(config: Any, key: str, default: Any) -> Any:
    value = OmegaConf.select(config, key, default=MISSING)
    if value is MISSING:
        return default
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _yaml_value(value: Any) -> str:
    """A value as OmegaConf reads it from a command line."""
    if value is None:
        return 'null'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return '[' + ','.join(_yaml_value(item) for item in value) + ']'
    return str(value)
