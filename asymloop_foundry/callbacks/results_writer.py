# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves behind for the tables: one ``results.json``."""

import hashlib
import json
import math
import platform
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, maybe_create_object_store_from_uri, parse_uri
from llmfoundry.interfaces import CallbackWithConfig
from omegaconf import OmegaConf

from asymloop_foundry.files import RESULTS_FILE, write_json

__all__ = ['ResultsWriter']

PACKAGES = ('torch', 'mosaicml', 'llm-foundry', 'transformers')
# The first steps of a process pay for allocation, compilation and data workers.
WARM_UP_STEPS = 10


class ResultsWriter(CallbackWithConfig):
    """Keeps the validation metrics of a run, and what they cost, in ``folder/results.json``.

    The file is rewritten at each evaluation and at the end, whole or not at all, by the first rank; to
    ``s3://`` and ``oci://`` folders it is uploaded.
    ``finished`` says whether the run reached its duration. Earlier evaluations survive a resume, since
    they are part of the checkpoint.

    Args:
        train_config: the run's configuration; Foundry passes it.
        folder: where the file goes; ``{run_name}`` is replaced.
        experiment: the name that ``python -m asymloop_foundry.experiments`` knows the run by.
    """

    def __init__(self, train_config: Mapping[str, Any], folder: str, experiment: str | None = None):
        Callback.__init__(self)
        self.folder = folder
        self.experiment = experiment
        self.config = _plain(train_config)
        self.trajectory: list[dict[str, Any]] = []
        self.step_seconds: list[float] = []
        self.parameters = 0

    def init(self, state: State, logger: Logger) -> None:
        """Counts the parameters, while no rank holds but a part of them."""
        self.parameters = sum(p.numel() for p in state.model.parameters())

    def batch_end(self, state: State, logger: Logger) -> None:
        """Notes how long the step took, on this rank and without evaluation."""
        self.step_seconds.append(state.timestamp.batch_wct.total_seconds())

    def eval_end(self, state: State, logger: Logger) -> None:
        """Adds the evaluation that just ended, and writes."""
        label = state.dataloader_label
        if label is None:
            return
        metrics = {
            name: float(state.eval_metric_values[name])
            for name in state.eval_metrics.get(label, {})
        }
        self.trajectory.append(
            {
                'step': state.timestamp.batch.value,
                'tokens': state.timestamp.token.value,
                'evaluator': label,
                'metrics': {name: value for name, value in metrics.items() if math.isfinite(value)},
            }
        )
        self._write(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Writes; evaluations that follow the last step write again."""
        self._write(state)

    def state_dict(self) -> dict[str, Any]:
        """The evaluations so far."""
        return {'trajectory': list(self.trajectory)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the evaluations of the run that is resumed."""
        self.trajectory = list(state['trajectory'])

    def _write(self, state: State) -> None:
        if dist.get_global_rank() != 0:
            return
        folder = self.folder.format(run_name=state.run_name)
        store = maybe_create_object_store_from_uri(folder)
        if store is None:
            write_json(Path(folder) / RESULTS_FILE, self._record(state))
            return
        with tempfile.TemporaryDirectory() as local:
            path = Path(local) / RESULTS_FILE
            write_json(path, self._record(state))
            store.upload_object(f'{parse_uri(folder)[2].rstrip("/")}/{RESULTS_FILE}', path)

    def _record(self, state: State) -> dict[str, Any]:
        time, elapsed = state.timestamp, state.get_elapsed_duration()
        latest = {entry['evaluator']: entry['metrics'] for entry in self.trajectory}
        steady = self.step_seconds[WARM_UP_STEPS:] or self.step_seconds
        return {
            'experiment': self.experiment,
            'run_name': state.run_name,
            'seed': self.config.get('seed'),
            'finished': elapsed is not None and float(elapsed) >= 1.0,
            'steps': time.batch.value,
            'samples': time.sample.value,
            'tokens': time.token.value,
            'metrics': latest,
            'trajectory': self.trajectory,
            'parameters': self.parameters,
            'seconds': time.total_wct.total_seconds(),
            'seconds_per_step': statistics.median(steady) if steady else None,
            'peak_gib': _peak_bytes() / 2**30,
            'device': _device(),
            'world_size': dist.get_world_size(),
            'versions': {package: version(package) for package in PACKAGES},
            'config_sha256': hashlib.sha256(
                json.dumps(self.config, sort_keys=True).encode()
            ).hexdigest(),
            'config': self.config,
        }


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as dictionaries, lists and scalars, its references resolved."""
    container = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
    plain = OmegaConf.to_container(container, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _peak_bytes() -> int:
    """The most memory this rank held: the allocator's on a GPU, the process's on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
