# SPDX-License-Identifier: Apache-2.0
"""Records how the weights' spectra change in training: Figure 4, with or without ALRS."""

from collections.abc import Mapping

import torch
from composer.core import Callback, State, Time, TimeUnit
from composer.loggers import Logger

from asymloop_foundry.algorithms.alrs import ALRS
from asymloop_foundry.algorithms.matrices import MATRIX_KINDS, Role, group_mean, roles_of
from asymloop_foundry.algorithms.records import RecordFile, record_folder_of
from asymloop_foundry.spectra import Spectrum, measure

__all__ = ['RECORD_FILE', 'SpectrumMonitor']

RECORD_FILE = 'spectra.jsonl'


class SpectrumMonitor(Callback):
    """Normalised stable rank and tail exponent of every weight matrix, and their means per group.

    Logs ``spectra/stable_rank/<stack>/<kind>`` and ``spectra/alpha/<stack>/<kind>`` and keeps the
    values of every matrix in ``spectra.jsonl``. Attention means the local q, k, v and o matrices, FFN
    gate, up and down; the Global projections are a group of their own (Figure 4). What ALRS has
    measured for the same step is not decomposed again.

    Args:
        interval: Batches between measurements; the first is made before the first step and the last
            after the last one.
        record_folder: Folder of ``spectra.jsonl``. Default: that of the checkpoints, if any are saved.
    """

    def __init__(
        self, interval: str | int | Time = '100ba', record_folder: str | None = None
    ) -> None:
        every = Time.from_input(interval, TimeUnit.BATCH)
        if every.unit != TimeUnit.BATCH or every.value < 1:
            raise ValueError(
                f'spectrum_monitor.interval={interval!r} must be a number of batches, at least 1: '
                'write for example interval: 100ba.'
            )
        self._interval = int(every.value)
        self._record_folder = record_folder
        self._roles: dict[str, Role] = {}
        self._records: RecordFile | None = None
        self._last: int | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Learns names, roles and whole shapes before anything wraps the model."""
        del logger
        self._roles = {n: r for n, r in roles_of(state.model).items() if r.kind in MATRIX_KINDS}
        if not self._roles:
            raise ValueError(
                'spectrum_monitor finds no matrix in this model; known are attention, FFN and Global '
                'projections by name (q_proj, gate_proj, Wqkv, ...).'
            )

    def fit_start(self, state: State, logger: Logger) -> None:
        """Opens the record."""
        del logger
        folder = record_folder_of(state, self._record_folder)
        if folder is not None:
            self._records = RecordFile(folder / RECORD_FILE, int(state.timestamp.batch))

    def batch_start(self, state: State, logger: Logger) -> None:
        """Measures every ``interval`` batches, after ALRS has had its turn."""
        if int(state.timestamp.batch) % self._interval == 0:
            self._measure(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Measures the trained weights."""
        if self._last != int(state.timestamp.batch):
            self._measure(state, logger)

    def _measure(self, state: State, logger: Logger) -> None:
        batch = int(state.timestamp.batch)
        self._last = batch
        spectra = _already_measured(state, batch)
        shapes = {
            name: torch.Size(role.shape)
            for name, role in self._roles.items()
            if name not in spectra
        }
        if shapes:
            spectra = {**spectra, **measure(state.model, shapes)}
        ranks = {n: s.stable_rank for n, s in spectra.items() if s.stable_rank is not None}
        alphas = {n: s.alpha for n, s in spectra.items() if s.alpha is not None}
        mean_ranks, mean_alphas = group_mean(ranks, self._roles), group_mean(alphas, self._roles)
        logger.log_metrics(
            {f'spectra/stable_rank/{group}': value for group, value in mean_ranks.items()}
            | {f'spectra/alpha/{group}': value for group, value in mean_alphas.items()}
        )
        if self._records is not None:
            self._records.add(
                {
                    'kind': 'spectra',
                    'batch': batch,
                    'mean_stable_rank': mean_ranks,
                    'mean_alpha': mean_alphas,
                    'stable_rank': ranks,
                    'alpha': alphas,
                }
            )
            self._records.flush()


def _already_measured(state: State, batch: int) -> Mapping[str, Spectrum]:
    """What ALRS measured on these same weights, the refresh and this callback sharing a batch.

    Only ``batch_start`` sees it: by ``fit_end`` the batch has advanced.
    """
    for algorithm in state.algorithms:
        if isinstance(algorithm, ALRS) and algorithm.latest and algorithm.latest[0] == batch:
            return algorithm.latest[1]
    return {}
