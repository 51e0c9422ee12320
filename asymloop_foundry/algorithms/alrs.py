# SPDX-License-Identifier: Apache-2.0
"""ALRS, heavy-tail-guided learning rates per matrix, as a Composer Algorithm (spec section 2).

This module says when things happen and where state lives; what a multiplier is and how a learning
rate moves is in :mod:`~asymloop_foundry.algorithms.allocation`, the spectra in
:mod:`~asymloop_foundry.spectra`. ``docs/alrs.md`` defines the schedule to the step.
"""

import contextlib
import json
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from composer.core import Algorithm, Event, State, Time, Timestamp, TimeUnit
from composer.loggers import Logger
from composer.utils import FSDPConfig
from torch.optim.lr_scheduler import LambdaLR

from asymloop_foundry.algorithms.allocation import Allocation, multipliers_from_alphas
from asymloop_foundry.algorithms.matrices import MATRIX_KINDS, Role, group_mean, roles_of
from asymloop_foundry.algorithms.records import RecordFile, record_folder_of
from asymloop_foundry.spectra import Estimator, Spectrum, SpectrumError, measure

__all__ = ['ALRS', 'GROUP_KEY', 'RECORD_FILE']

Mode = Literal['alrs', 'static_decoder_boost', 'uniform']

GROUP_KEY = 'alrs_name'
"""Key of an optimizer's parameter group that holds the name of its matrix, '' for the rest.

The name travels with the group through FSDP's rebuilding of the groups and through checkpoints,
which object identities do not.
"""

RECORD_FILE = 'alrs.jsonl'

_DEFAULT_BOOST = 1.5


def _batches(key: str, value: str | int | Time, smallest: int) -> int:
    duration = _time(value, TimeUnit.BATCH)
    if duration is None or duration.unit != TimeUnit.BATCH or duration.value < smallest:
        raise ValueError(
            f'alrs.{key}={value!r} must be a number of optimizer steps, at least {smallest}: write '
            f'for example {key}: 100ba.'
        )
    return int(duration.value)


def _time(value: str | int | Time, unit: TimeUnit) -> Time | None:
    """The duration that a key means; None for what is none."""
    try:
        return Time.from_input(value, unit)
    except (ValueError, TypeError, RuntimeError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(values: Any) -> Any:
    """A list as a YAML shows it, whatever OmegaConf made of it; anything else as it is."""
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else values


def _choice(key: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f'alrs.{key}={value!r} is unknown; choose one of {", ".join(choices)}.')
    return value


class ALRS(Algorithm):
    """Gives every weight matrix a learning rate according to its spectrum.

    At the first optimizer step and every ``update_interval`` steps after it, while training progress
    is within ``window``, the matrices' tail exponents are measured and mapped to multipliers of the
    base learning rate; each matrix moves to its new rate on a line over ``transition`` steps. After
    the window the multipliers stay. Embedding and head get the largest multiplier, everything else
    follows the base schedule.

    Works with every optimizer that has an ``lr`` per group, every Composer or Foundry scheduler, DDP,
    FSDP1 with ``use_orig_params`` and FSDP2. Splits the optimizer's groups into one per matrix.

    Args:
        mode: ``alrs``; ``static_decoder_boost``, a fixed multiplier on the decoder's matrices; or
            ``uniform``, the base schedule everywhere with the same groups and records.
        multiplier_range: Multipliers of the smallest and of the largest exponent.
        update_interval: Steps between refreshes.
        transition: Steps over which a learning rate moves to its new target.
        window: Training time within which refreshes happen, as ``dur`` or any unit of Composer's.
        pool: Kinds of matrices that are measured and share one minimum and maximum; kinds left out
            follow the base schedule.
        tail_fraction: Share of the squared singular values in the tail.
        estimator: ``auto``, the cheapest method that is exact to 1e-3, or ``float64``, a float64
            singular value decomposition of every matrix.
        decoder_boost: Multiplier of ``static_decoder_boost``. Default: 1.5, in that mode alone.
        exclude: Regular expressions; a parameter whose name one of them finds is not measured and
            follows the base schedule.
        legacy_window_cut: At the window's end drop a refresh whose transition is not over, and return
            to the multipliers before it, as the reference code does.
        log_interval: Steps between records of mean learning rates.
        record_folder: Folder of ``alrs.jsonl``. Default: that of the checkpoints, if any are saved.

    Raises:
        ValueError: A key is unknown, contradictory or without effect.
    """

    def __init__(
        self,
        mode: Mode = 'alrs',
        multiplier_range: Sequence[float] = (1.0, 5.0),
        update_interval: str | int | Time = '100ba',
        transition: str | int | Time = '50ba',
        window: str | Time = '0.2dur',
        pool: Sequence[str] = MATRIX_KINDS,
        tail_fraction: float = 0.5,
        estimator: Estimator = 'auto',
        decoder_boost: float | None = None,
        exclude: Sequence[str] = (),
        legacy_window_cut: bool = False,
        log_interval: str | int | Time = '10ba',
        record_folder: str | None = None,
    ) -> None:
        _choice('mode', mode, get_args(Mode))
        _choice('estimator', estimator, get_args(Estimator))
        if not (
            isinstance(multiplier_range, Sequence)
            and len(multiplier_range) == 2
            and all(map(_is_number, multiplier_range))
            and 0 < multiplier_range[0] <= multiplier_range[1] < float('inf')
        ):
            raise ValueError(
                f'alrs.multiplier_range={_listed(multiplier_range)} must be two positive numbers in '
                'ascending order, for example [1, 5].'
            )
        if not _is_number(tail_fraction) or not 0 < tail_fraction <= 1:
            raise ValueError(
                f'alrs.tail_fraction={tail_fraction!r} must be a number in (0, 1], for example 0.5.'
            )
        for key, names in (('pool', pool), ('exclude', exclude)):
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise ValueError(f'alrs.{key}={names!r} must be a list of strings.')
        for pattern in exclude:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f'alrs.exclude holds {pattern!r}, which is no regular expression ({error}); escape its '
                    'special characters, or remove it.'
                ) from error
        if not pool or len(set(pool)) != len(pool) or not set(pool) <= set(MATRIX_KINDS):
            raise ValueError(
                f'alrs.pool={list(pool)} must name some of {list(MATRIX_KINDS)}, once each.'
            )
        if mode != 'static_decoder_boost' and decoder_boost is not None:
            raise ValueError(
                f'alrs.decoder_boost={decoder_boost} has no effect with mode={mode!r}; remove it or '
                'set mode: static_decoder_boost.'
            )
        if decoder_boost is not None and not (_is_number(decoder_boost) and decoder_boost > 0):
            raise ValueError(f'alrs.decoder_boost={decoder_boost!r} must be a positive number.')
        if mode != 'alrs' and legacy_window_cut:
            raise ValueError(
                f'alrs.legacy_window_cut=true has no effect with mode={mode!r}; remove it.'
            )
        within = _time(window, TimeUnit.DURATION)
        if within is None or within.value < 0:
            raise ValueError(
                f'alrs.window={window!r} must be a duration that is not negative, for example 0.2dur.'
            )
        # What decides a learning rate, as plain values: stored in checkpoints, where it wins over
        # the YAML of a resumed run.
        self._settings: dict[str, Any] = {
            'mode': mode,
            'multiplier_range': [float(m) for m in multiplier_range],
            'update_interval': _batches('update_interval', update_interval, 1),
            'transition': _batches('transition', transition, 0),
            'window': within.to_timestring(),
            'pool': list(pool),
            'tail_fraction': float(tail_fraction),
            'estimator': estimator,
            'decoder_boost': _DEFAULT_BOOST if decoder_boost is None else float(decoder_boost),
            'exclude': list(exclude),
            'legacy_window_cut': bool(legacy_window_cut),
        }
        self._log_interval = _batches('log_interval', log_interval, 1)
        self._record_folder = record_folder
        self._allocation = Allocation()
        self._roles: dict[str, Role] = {}
        self._group_names: list[str] = []
        self._configured_lrs: dict[str, float] = {}
        self._loaded: dict[str, Any] | None = None
        self._records: RecordFile | None = None
        self.latest: tuple[int, dict[str, Spectrum]] | None = None
        """Batch and spectra of the last refresh, for callbacks that want them too."""

    def __repr__(self) -> str:
        keys = ', '.join(f'{key}={value!r}' for key, value in self._settings.items())
        return f'ALRS({keys})'

    @property
    def roles(self) -> Mapping[str, Role]:
        """Role of every trainable parameter, known from ``Event.INIT`` on."""
        return self._roles

    def match(self, event: Event, state: State) -> bool:
        """Runs when the trainer is built, when it starts and ends, and before every step."""
        del state
        return event in (
            Event.INIT,
            Event.AFTER_LOAD,
            Event.FIT_START,
            Event.BATCH_START,
            Event.FIT_END,
        )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """See :meth:`match`."""
        if event == Event.INIT:
            _check_parallelism(state)
            self._roles = roles_of(state.model)
            self._check_roles()
            self._split_groups(state)
        elif event == Event.AFTER_LOAD:
            self._check_loaded(state)
        elif event == Event.FIT_START:
            _check_schedule(state)
            self._open_records(state)
        elif event == Event.BATCH_START:
            self._set_rates(state, logger)
        elif self._records is not None:
            self._records.flush()

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Settings, multipliers and the transition.

        One JSON string: exact for every float, and the same leaf in sharded checkpoints whether or
        not a transition has a target yet.
        """
        if self._records is not None:
            # A run resumed from this checkpoint finds every row up to it.
            self._records.flush()
        state = {
            'settings': self._settings,
            'allocation': self._allocation.state_dict(),
            'base_lrs': self._configured_lrs,
            'groups': self._group_names,
        }
        return {**super().state_dict(), 'alrs': json.dumps(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` wrote; differing settings are reported after loading."""
        self._loaded = json.loads(state['alrs'])
        self._allocation = Allocation.from_state_dict(self._loaded['allocation'])

    def _check_loaded(self, state: State) -> None:
        names = [group.get(GROUP_KEY) for group in state.optimizers[0].param_groups]
        if None in names:
            raise ValueError(
                'The checkpoint was written without ALRS, and its optimizer has other parameter '
                'groups. Start from its weights with load_weights_only: true, or resume without '
                'algorithms.alrs.'
            )
        # Optimizer states are restored by name, schedules by position: both must agree.
        stored_names = names if self._loaded is None else self._loaded['groups']
        for found in (names, stored_names):
            if found != self._group_names:
                raise ValueError(
                    'The checkpoint was written with other parameter groups than this run has: '
                    f'{_first_difference(found, self._group_names)}. ALRS keeps one group per '
                    'matrix: resume with the model and the optimizer.param_groups of the first run, '
                    'or start from its weights with load_weights_only: true.'
                )
        if self._loaded is None:
            if state.timestamp.batch > 0:
                warnings.warn(
                    'The checkpoint holds no state of ALRS: its multipliers start anew at batch '
                    f'{state.timestamp.batch.value}, and stay 1 if the window is over.',
                    stacklevel=2,
                )
            return
        loaded, self._loaded = self._loaded, None
        for key, value in self._settings.items():
            kept = loaded['settings'].get(key, value)
            if kept != value:
                warnings.warn(
                    f'alrs.{key}: the checkpoint was written with {kept!r}, this configuration says '
                    f"{value!r}. The checkpoint's value wins; to use the new one, add "
                    'state/algorithms/* to load_ignore_keys, which also drops the multipliers.',
                    stacklevel=2,
                )
                self._settings[key] = kept
        stored = loaded['base_lrs']
        changed = {n for n, lr in self._configured_lrs.items() if stored.get(n, lr) != lr}
        if changed:
            name = min(changed)
            warnings.warn(
                f'optimizer.lr: the checkpoint was written with {stored[name]!r}, this configuration '
                f"says {self._configured_lrs[name]!r} ({len(changed)} groups). The checkpoint's value "
                'wins, as Composer restores optimizer and scheduler; to use the new one, start from '
                'the weights with load_weights_only: true.',
                stacklevel=2,
            )
        self._configured_lrs = stored

    # --- parameter groups ---

    def _check_roles(self) -> None:
        for pattern in self._settings['exclude']:
            if not any(re.search(pattern, name) for name in self._roles):
                raise ValueError(
                    f'alrs.exclude holds {pattern!r}, which no parameter name matches; names look '
                    f'like {next(iter(self._roles), None)!r}.'
                )
        stacked = [
            n for n, r in self._roles.items() if r.kind in MATRIX_KINDS and len(r.shape) != 2
        ]
        if stacked:
            raise ValueError(
                f'{stacked[0]} has shape {tuple(self._roles[stacked[0]].shape)}, and a learning rate '
                'per matrix needs each matrix, each expert too, as a 2-D parameter of its own, for '
                'example ffn.experts.0.gate_proj.weight.'
            )
        mode = self._settings['mode']
        if mode == 'alrs' and not self._measured_names():
            raise ValueError(
                f'alrs.pool={self._settings["pool"]} with exclude={self._settings["exclude"]} leaves '
                'no matrix of this model; known are attention, FFN and Global projections by name '
                '(q_proj, gate_proj, Wqkv, ...).'
            )
        if mode == 'static_decoder_boost' and not self._fixed_multipliers():
            raise ValueError(
                "alrs.mode='static_decoder_boost' finds no matrix in a module named decoder; use it "
                'with a model that has one, or set mode: uniform.'
            )

    def _excluded(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self._settings['exclude'])

    def _measured_names(self) -> list[str]:
        pool = self._settings['pool']
        return [n for n, r in self._roles.items() if r.kind in pool and not self._excluded(n)]

    def _fixed_multipliers(self) -> dict[str, float]:
        """What ``static_decoder_boost`` multiplies."""
        return {
            name: self._settings['decoder_boost']
            for name, role in self._roles.items()
            if role.stack == 'decoder' and role.kind in MATRIX_KINDS and not self._excluded(name)
        }

    def _split_groups(self, state: State) -> None:
        """One group per matrix, embedding and head; what remains of each group stays together.

        Before schedulers are compiled and FSDP wraps, both of which then see ordinary groups.
        """
        optimizer = state.optimizers[0]
        if optimizer.state:
            raise ValueError(
                'ALRS must split the optimizer before its first step, and this optimizer has state '
                'already; pass a fresh one.'
            )
        name_of = {id(p): name for name, p in state.model.named_parameters()}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            options = {k: v for k, v in group.items() if k not in ('params', 'param_names')}
            rest: list[torch.nn.Parameter] = []
            own: list[dict[str, Any]] = []
            for parameter in group['params']:
                name = name_of.get(id(parameter), '')
                if name in self._roles and self._roles[name].kind != 'other':
                    own.append({**options, 'params': [parameter], GROUP_KEY: name})
                else:
                    rest.append(parameter)
            if rest:
                groups.append({**options, 'params': rest, GROUP_KEY: ''})
            groups.extend(own)
        optimizer.param_groups.clear()
        for group in groups:
            optimizer.add_param_group(group)
        self._group_names = [group[GROUP_KEY] for group in groups]
        self._configured_lrs = {g[GROUP_KEY]: float(g['lr']) for g in groups if g[GROUP_KEY]}

    # --- every step ---

    def _open_records(self, state: State) -> None:
        folder = record_folder_of(state, self._record_folder)
        if folder is not None:
            self._records = RecordFile(folder / RECORD_FILE, int(state.timestamp.batch))

    def _set_rates(self, state: State, logger: Logger) -> None:
        t = int(state.timestamp.batch)
        transition = self._settings['transition']
        base = self._by_name(state.schedulers[0].get_last_lr())
        if self._settings['mode'] == 'static_decoder_boost':
            self._allocation.multipliers = self._fixed_multipliers()
        elif self._settings['mode'] == 'alrs':
            self._update_allocation(state, logger, t, base)
        rates = self._allocation.rates(t, base, transition)
        for group in state.optimizers[0].param_groups:
            if group[GROUP_KEY]:
                group['lr'] = rates[group[GROUP_KEY]]
        if t % self._log_interval == 0:
            self._log_rates(logger, t, base, rates)

    def _by_name(self, values: Sequence[float]) -> dict[str, float]:
        return {n: value for n, value in zip(self._group_names, values, strict=True) if n}

    def _update_allocation(
        self, state: State, logger: Logger, t: int, base: Mapping[str, float]
    ) -> None:
        allocation, transition = self._allocation, self._settings['transition']
        if allocation.needs_target(t, transition):
            assert allocation.refreshed_at is not None
            ahead = allocation.refreshed_at + transition - t
            allocation.aim(self._by_name(_base_lrs_ahead(state, ahead)))
        if _within(state, self._settings['window']):
            first = allocation.refreshed_at is None
            if first or t % self._settings['update_interval'] == 0:
                rates = allocation.rates(t, base, transition)
                allocation.refresh(t, self._measure(state, logger, t), rates)
        elif self._settings['legacy_window_cut'] and allocation.in_transition(t, transition + 1):
            allocation.revert()

    def _measure(self, state: State, logger: Logger, t: int) -> dict[str, float]:
        """New multipliers, from the weights as they are."""
        began = time.perf_counter()
        names = self._measured_names()
        spectra = measure(
            state.model,
            {name: self._roles[name].shape for name in names},
            estimator=self._settings['estimator'],
            tail_fraction=self._settings['tail_fraction'],
        )
        self.latest = (t, spectra)
        alphas = {}
        for name, spectrum in spectra.items():
            if spectrum.alpha is not None:
                alphas[name] = spectrum.alpha
            elif spectrum.stable_rank is not None:
                raise SpectrumError(
                    f'{name} has a constant spectrum (an orthogonal initialisation, perhaps), whose '
                    f'tail exponent is infinite. Exclude it (alrs.exclude), or initialise it otherwise.'
                )
        lowest, highest = self._settings['multiplier_range']
        # A zero matrix, as some initialisations leave, has no exponent yet and stays neutral.
        multipliers = dict.fromkeys(names, 1.0) | multipliers_from_alphas(alphas, lowest, highest)
        for name, role in self._roles.items():
            if role.kind in ('embedding', 'head') and not self._excluded(name):
                multipliers[name] = highest
        seconds = time.perf_counter() - began
        logger.log_metrics(
            {f'alrs/alpha/{name}': value for name, value in alphas.items()}
            | {f'alrs/multiplier/{name}': value for name, value in multipliers.items()}
            | {'alrs/refresh_seconds': seconds}
        )
        if self._records is not None:
            self._records.add(
                {
                    'kind': 'refresh',
                    'batch': t,
                    'seconds': seconds,
                    'alpha': alphas,
                    'multiplier': multipliers,
                }
            )
            self._records.flush()
        return multipliers

    def _log_rates(
        self, logger: Logger, t: int, base: Mapping[str, float], rates: Mapping[str, float]
    ) -> None:
        means = group_mean(rates, self._roles)
        ratios = {
            kind: means[f'decoder/{kind}'] / means[f'encoder/{kind}']
            for kind in ('attention', 'ffn')
            if f'decoder/{kind}' in means and means.get(f'encoder/{kind}', 0.0) > 0
        }
        base_mean = sum(base.values()) / len(base)
        logger.log_metrics(
            {f'alrs/lr/{group}': value for group, value in means.items()}
            | {f'alrs/lr_decoder_over_encoder/{kind}': value for kind, value in ratios.items()}
            | {'alrs/lr/base': base_mean}
        )
        if self._records is not None:
            row = {'kind': 'lr', 'batch': t, 'base': base_mean, 'mean': means, 'ratio': ratios}
            self._records.add(row)


def _first_difference(found: Sequence[Any], expected: Sequence[str]) -> str:
    if len(found) != len(expected):
        return f'{len(found)} groups instead of {len(expected)}'
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a != b:
            return f'group {index} is {a!r} instead of {b!r}'
    return 'none'


def _check_parallelism(state: State) -> None:
    if state.tp_config is not None:
        raise ValueError(
            'tp_config is set: tensor parallelism allows one parameter group alone, and ALRS keeps '
            'one per matrix. Use FSDP without tp_config.'
        )
    if isinstance(state.fsdp_config, FSDPConfig) and not state.fsdp_config.use_orig_params:
        raise ValueError(
            'fsdp_config.use_orig_params=false flattens matrices into one parameter, and ALRS keeps '
            'one parameter group per matrix. Set fsdp_config.use_orig_params: true.'
        )


def _check_schedule(state: State) -> None:
    kinds = [type(scheduler).__name__ for scheduler in state.schedulers]
    if len(kinds) != 1 or not isinstance(state.schedulers[0], LambdaLR):
        raise ValueError(
            f'ALRS reads the base learning rate off one Composer scheduler, and this run has {kinds}. '
            'Give one scheduler of Composer or Foundry, constant_with_warmup for a constant rate.'
        )
    assert state.max_duration is not None
    if state.max_duration.unit == TimeUnit.EPOCH and state.dataloader_len is None:
        raise ValueError(
            f'max_duration={state.max_duration.to_timestring()} cannot be split into steps, as the '
            'dataloader has no length. Give max_duration in ba or tok.'
        )


def _within(state: State, window: str) -> bool:
    """Whether training progress has not passed ``window``."""
    limit = Time.from_timestring(window)
    if limit.unit != TimeUnit.DURATION:
        return bool(state.timestamp.get(limit.unit) <= limit)
    total = state.max_duration
    assert total is not None
    if total.unit == TimeUnit.EPOCH:
        # Composer counts whole epochs here; a fraction of one is wanted.
        steps = int(state.dataloader_len) * total.value
        return int(state.timestamp.batch) / steps <= limit.value
    return state.timestamp.get(total.unit).value / total.value <= limit.value


def _base_lrs_ahead(state: State, steps: int) -> list[float]:
    """The base learning rate of every group, ``steps`` >= 1 steps after the coming one.

    Asks the schedule itself. Composer steps a scheduler after a batch and before counting it, so
    the rate of the step at ``t + steps`` is the schedule at ``t + steps - 1`` batches.
    """
    scheduler = state.schedulers[0]
    with _at(state, _advanced(state, steps - 1)):
        return [
            base * factor(scheduler.last_epoch + steps)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]


@contextlib.contextmanager
def _at(state: State, timestamp: Timestamp) -> Iterator[None]:
    """The state at another time: compiled schedules read it from the state they are bound to."""
    now, state.timestamp = state.timestamp, timestamp
    try:
        yield
    finally:
        state.timestamp = now


def _advanced(state: State, batches: int) -> Timestamp:
    """The timestamp ``batches`` batches later, each holding as much as the mean one so far."""
    now = state.timestamp
    done = max(int(now.batch), 1)
    samples = now.sample.value * batches // done
    tokens = now.token.value * batches // done
    epochs, in_epoch = 0, int(now.batch_in_epoch) + batches
    if state.dataloader_len is not None:
        epochs, in_epoch = divmod(in_epoch, int(state.dataloader_len))
    return now.copy(
        epoch=now.epoch + epochs,
        batch=now.batch + batches,
        sample=now.sample + samples,
        token=now.token + tokens,
        batch_in_epoch=in_epoch,
        sample_in_epoch=now.sample.value * in_epoch // done,
        token_in_epoch=now.token.value * in_epoch // done,
    )
