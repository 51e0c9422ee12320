# SPDX-License-Identifier: Apache-2.0
"""The plain keys of a training configuration: known, of the right kind, and not contradicting each other.

Where Foundry, Composer or torch would say it late, deep in a traceback, or not at all (an unknown key
of a data set is dropped in silence), it is said here, before anything is built. What they say well is
left to them.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from composer.core import Precision, Time, TimeUnit
from composer.utils import FSDP2Config, FSDPConfig, dist
from llmfoundry import registry
from llmfoundry.data.finetuning.dataloader import _ALLOWED_DATASET_KEYS as FINETUNING_KEYS
from llmfoundry.data.finetuning.tasks import StreamingFinetuningDataset
from llmfoundry.data.text_data import StreamingTextDataset
from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS
from streaming import StreamingDataset

from asymloop_foundry.models.composer_asymloop import refuse_unknown_keys
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig

__all__ = ['check_run', 'loaders_of']

REQUIRED = (
    'max_seq_len',
    'max_duration',
    'global_train_batch_size',
    'device_eval_batch_size',
    'model',
    'tokenizer',
    'optimizer',
    'scheduler',
    'train_loader',
)
# Foundry's own, filled in from the others.
_DERIVED = {'n_gpus', 'device_train_batch_size', 'device_train_grad_accum'}
_INIT_DEVICES = ('cpu', 'meta', 'mixed')
_CHOICES = {
    'fsdp_config.sharding_strategy': (
        'NO_SHARD',
        'SHARD_GRAD_OP',
        'FULL_SHARD',
        'HYBRID_SHARD',
        '_HYBRID_SHARD_ZERO2',
    ),
    'fsdp_config.state_dict_type': ('full', 'sharded'),
    'algorithms.gradient_clipping.clipping_type': ('norm', 'value', 'adaptive'),
    'model.init_device': _INIT_DEVICES,
}
# What Foundry takes out of an optimizer's keys before it builds it.
_OPTIMIZER_EXTRAS = {'disable_grad', 'param_groups'}
# What the collators and replication of Foundry's loaders read beside the data set's own keys.
_LOADER_EXTRAS = {
    'text': {'eos_token_id', 'bos_token_id', 'seq_parallel_replication'},
    'finetuning': {
        *FINETUNING_KEYS,
        *('decoder_only_format', 'hf_name', 'hf_kwargs', 'preprocessing_fn', 'safe_load'),
        *('target_prompts', 'target_responses', 'max_seq_len'),
    },
}
_DATASETS = {'text': StreamingTextDataset, 'finetuning': StreamingFinetuningDataset}


def check_run(cfg: Mapping[str, Any]) -> None:
    """Refuses a configuration that is wrong by itself, whatever data and checkpoints there are.

    Args:
        cfg: Foundry's training configuration, before any other transform.

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    _check_top_level(cfg)
    _check_numbers(cfg)
    _check_durations(cfg)
    _check_model(cfg['model'])
    _check_lengths(cfg)
    _check_device(cfg)
    _check_components(cfg)
    _check_optimizer(cfg['optimizer'])
    _check_fsdp(cfg)
    _check_checkpointing(cfg)
    _check_loaders(cfg)
    _check_saving(cfg)


def loaders_of(cfg: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The training loader and every evaluation loader, by key."""
    loaders = [('train_loader', cfg['train_loader'])]
    if cfg.get('eval_loader') is not None:
        loaders.append(('eval_loader', cfg['eval_loader']))
    for i, loader in enumerate(cfg.get('eval_loaders') or []):
        loaders.append((f'eval_loader[{i}]', loader))
    return loaders


def _check_top_level(cfg: Mapping[str, Any]) -> None:
    known = TRAIN_CONFIG_KEYS - _DERIVED
    for key, value in cfg.items():
        if key not in known:
            raise ValueError(
                f'{key}={_short(value)}: a training configuration has no such key; '
                f'{_nearest(key, known)} Put values of your own below `variables`.'
            )
    for key in REQUIRED:
        if cfg.get(key) is None:
            raise ValueError(f'{key} is missing; every training configuration needs it.')
    for key in ('model', 'tokenizer', 'optimizer', 'scheduler', 'train_loader'):
        _check_named(key, cfg[key])
    for key, loader in loaders_of(cfg)[1:]:
        _check_named(key, loader)
    for key in ('algorithms', 'callbacks', 'loggers', 'fsdp_config', 'tp_config', 'variables'):
        if cfg.get(key) is not None and not isinstance(cfg[key], Mapping):
            raise ValueError(f'{key}={_short(cfg[key])} must be a mapping of names to their keys.')


def _check_named(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f'{key}={_short(value)} must be a mapping with the key name.')
    if not isinstance(value.get('name'), str) or not value['name']:
        raise ValueError(f'{key}.name={_short(value.get("name"))} must be a name; add it to {key}.')


def _check_numbers(cfg: Mapping[str, Any]) -> None:
    for key in ('global_train_batch_size', 'device_eval_batch_size'):
        _check_int(key, cfg[key], 1)
    microbatch = cfg.get('device_train_microbatch_size', 'auto')
    if microbatch != 'auto' and not (_is_int(microbatch) and microbatch >= 1):
        raise ValueError(
            f'device_train_microbatch_size={microbatch!r} must be a number of rows of at least 1, or '
            'auto on a GPU.'
        )
    ranks, batch = dist.get_world_size(), cfg['global_train_batch_size']
    if batch % ranks:
        raise ValueError(
            f'global_train_batch_size={batch} cannot be shared by {ranks} processes; choose a multiple '
            f'of {ranks}, such as {-(-batch // ranks) * ranks}.'
        )
    _check_int('seed', cfg.get('seed', 17), 0)
    for key in ('train_subset_num_batches', 'eval_subset_num_batches'):
        if cfg.get(key, -1) != -1:
            _check_int(key, cfg[key], 1, 'or -1 for all')
    if cfg.get('save_num_checkpoints_to_keep', -1) != -1:
        _check_int(
            'save_num_checkpoints_to_keep',
            cfg['save_num_checkpoints_to_keep'],
            1,
            'or -1 for all: a run without a checkpoint cannot be resumed',
        )
    if cfg.get('dist_timeout') is not None:
        _check_number('dist_timeout', cfg['dist_timeout'], above=0)


def _check_durations(cfg: Mapping[str, Any]) -> None:
    _check_time('max_duration', cfg['max_duration'], 1, '200ba', ('dur',))
    for key in ('save_interval', 'console_log_interval'):
        if cfg.get(key) is not None:
            _check_time(key, cfg[key], 1, '100ba')
    if cfg.get('eval_interval') is not None:
        _check_time('eval_interval', cfg['eval_interval'], 0, '100ba')
    scheduler = cfg['scheduler']
    for key in ('t_warmup', 't_max'):
        if key in scheduler:
            _check_time(f'scheduler.{key}', scheduler[key], 0, '0.1dur')
    for key in ('alpha_f', 'alpha', 'alpha_i'):
        if key in scheduler:
            _check_number(f'scheduler.{key}', scheduler[key], least=0)


def _check_time(
    key: str, value: Any, least: int, example: str, unfit: Collection[str] = ()
) -> None:
    try:
        if isinstance(value, bool):
            raise ValueError('a truth value')
        time = Time.from_input(value, TimeUnit.EPOCH)
    except (ValueError, TypeError, RuntimeError):
        time = None
    if time is None or time.unit.value in unfit or not (time.value >= least or 0 < time.value < 1):
        units = 'ba (batches), ep (epochs), sp (rows), tok (tokens)'
        raise ValueError(
            f'{key}={value!r} is no duration here; give a number of at least {least} with its unit, '
            f'{units}{"" if "dur" in unfit else " or dur (share of the run)"}, for example {example}.'
        )


def _check_model(model: Mapping[str, Any]) -> None:
    device = model.get('init_device', 'cpu')
    _check_choice('model.init_device', device)
    own = {
        key: value
        for key, value in model.items()
        if key not in ('name', 'init_device', 'master_weights_dtype')
    }
    refuse_unknown_keys(own)
    try:
        AsymLoopConfig(**own)
    except (ValueError, TypeError) as error:
        raise ValueError(f'model.{error}') from error


def _check_lengths(cfg: Mapping[str, Any]) -> None:
    length = cfg['max_seq_len']
    _check_int('max_seq_len', length, 2)
    others = [('model.max_seq_len', cfg['model'].get('max_seq_len'))]
    for key, loader in loaders_of(cfg):
        dataset = loader.get('dataset')
        if isinstance(dataset, Mapping):
            others.append((f'{key}.dataset.max_seq_len', dataset.get('max_seq_len')))
    for key, value in others:
        if value is not None and value != length:
            raise ValueError(
                f'{key}={value} differs from max_seq_len={length}; write {key}: ${{max_seq_len}}.'
            )


def _check_device(cfg: Mapping[str, Any]) -> None:
    precision = cfg.get('precision', 'amp_bf16')
    known = [p.value for p in Precision]
    if precision not in known:
        raise ValueError(f'precision={precision!r} must be one of {", ".join(known)}.')
    if torch.cuda.is_available():
        return
    if precision != 'fp32':
        raise ValueError(
            f'precision={precision}: Composer trains in fp32 alone on a CPU; set precision=fp32.'
        )
    if cfg.get('device_train_microbatch_size', 'auto') == 'auto':
        raise ValueError(
            'device_train_microbatch_size=auto needs a GPU, whose memory it probes; on a CPU give '
            'the number of rows.'
        )


def _check_components(cfg: Mapping[str, Any]) -> None:
    """Names that the registries know, with keys that their constructors take."""
    for key, kinds, given_by_foundry, extras in (
        ('optimizer', registry.optimizers, {'params'}, _OPTIMIZER_EXTRAS),
        ('scheduler', registry.schedulers, set(), set()),
    ):
        keys = {k: v for k, v in cfg[key].items() if k != 'name'}
        constructor = _registered(f'{key}.name', cfg[key]['name'], kinds)
        _check_arguments(key, constructor, keys, given_by_foundry, extras)
    for key, registries in (
        ('algorithms', (registry.algorithms,)),
        ('callbacks', (registry.callbacks, registry.callbacks_with_config)),
        ('loggers', (registry.loggers,)),
    ):
        for name, value in (cfg.get(key) or {}).items():
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(
                    f'{key}.{name}={_short(value)} must be a mapping of its keys; write {key}.{name}: '
                    '{} for the defaults.'
                )
            constructor = _registered(f'{key}.{name}', name, *registries)
            _check_arguments(f'{key}.{name}', constructor, value or {}, {'train_config'})
    clipping = (cfg.get('algorithms') or {}).get('gradient_clipping')
    if clipping:
        prefix = 'algorithms.gradient_clipping'
        _check_choice(f'{prefix}.clipping_type', clipping['clipping_type'])
        _check_number(f'{prefix}.clipping_threshold', clipping['clipping_threshold'], above=0)


def _check_optimizer(optimizer: Mapping[str, Any]) -> None:
    if 'lr' not in optimizer:
        raise ValueError('optimizer.lr is missing; give the peak learning rate.')
    _check_number('optimizer.lr', optimizer['lr'], above=0)
    for key in ('weight_decay', 'eps'):
        if key in optimizer:
            _check_number(f'optimizer.{key}', optimizer[key], least=0)
    betas = optimizer.get('betas')
    if betas is not None and not (
        isinstance(betas, (list, tuple))
        and len(betas) == 2
        and all(_is_number(beta) and 0 <= beta < 1 for beta in betas)
    ):
        raise ValueError(
            f'optimizer.betas={betas!r} must be two numbers of [0, 1), for example [0.9, 0.95].'
        )


def _check_fsdp(cfg: Mapping[str, Any]) -> None:
    fsdp = cfg.get('fsdp_config') or {}
    known = {field.name for field in (*fields(FSDPConfig), *fields(FSDP2Config))}
    _refuse_unknown('fsdp_config', fsdp, {name for name in known if name[0] != '_'})
    for key in ('sharding_strategy', 'state_dict_type'):
        if key in fsdp:
            _check_choice(f'fsdp_config.{key}', fsdp[key])
    if fsdp.get('use_orig_params') is False and 'alrs' in (cfg.get('algorithms') or {}):
        raise ValueError(
            'fsdp_config.use_orig_params=false flattens matrices into one parameter, and '
            'algorithms.alrs keeps one group per matrix; set fsdp_config.use_orig_params: true.'
        )


def _check_checkpointing(cfg: Mapping[str, Any]) -> None:
    fsdp = cfg.get('fsdp_config') or {}
    if not fsdp.get('activation_checkpointing', False):
        return
    if fsdp.get('activation_checkpointing_reentrant', True):
        raise ValueError(
            'fsdp_config.activation_checkpointing_reentrant=true (its default): a decoder layer is '
            'called num_iterations times in one forward pass, which reentrant checkpointing counts '
            'as one; set fsdp_config.activation_checkpointing_reentrant=false.'
        )
    if cfg['model'].get('activation_checkpointing', False):
        raise ValueError(
            'model.activation_checkpointing=true and fsdp_config.activation_checkpointing=true would '
            'recompute each layer twice; keep the one in fsdp_config, or the one in model for runs '
            'without FSDP.'
        )


def _check_loaders(cfg: Mapping[str, Any]) -> None:
    for key, loader in loaders_of(cfg):
        name = loader['name']
        constructor = _registered(f'{key}.name', name, registry.dataloaders)
        given = {'tokenizer', 'device_batch_size'}
        keys = {k: v for k, v in loader.items() if k not in ('name', 'label')}
        _check_arguments(key, constructor, keys, given)
        if not isinstance(loader['dataset'], Mapping):
            raise ValueError(
                f'{key}.dataset={_short(loader["dataset"])} must be a mapping of keys such as local.'
            )
        _check_workers(key, loader)
        if name in _DATASETS:
            _check_dataset(f'{key}.dataset', name, loader['dataset'])


def _check_workers(key: str, loader: Mapping[str, Any]) -> None:
    _check_int(f'{key}.num_workers', loader['num_workers'], 0)
    for name, default, idle in (('prefetch_factor', 2, None), ('persistent_workers', True, False)):
        value = loader.get(name, default)
        if loader['num_workers'] == 0 and value != idle:
            remedy = 'null' if idle is None else 'false'
            raise ValueError(
                f'{key}.{name}={value!r} needs worker processes, and {key}.num_workers=0; set '
                f'{key}.{name}: {remedy}, or give workers.'
            )
    if not isinstance(loader.get('drop_last', False), bool):
        raise ValueError(f'{key}.drop_last={loader["drop_last"]!r} must be true or false.')


def _check_dataset(key: str, kind: str, dataset: Mapping[str, Any]) -> None:
    known = {
        *inspect.signature(_DATASETS[kind]).parameters,
        *inspect.signature(StreamingDataset).parameters,
        *_LOADER_EXTRAS[kind],
    } - {'tokenizer', 'batch_size', 'kwargs'}
    _refuse_unknown(key, dataset, known)
    if dataset.get('max_seq_len') is None:
        raise ValueError(
            f'{key}.max_seq_len is missing; write {key}.max_seq_len: ${{max_seq_len}}.'
        )
    for name in ('shuffle', 'decoder_only_format', 'allow_pad_trimming'):
        if not isinstance(dataset.get(name, False), bool):
            raise ValueError(f'{key}.{name}={dataset[name]!r} must be true or false.')
    places = ('local', 'remote', 'streams') + (('hf_name',) if kind == 'finetuning' else ())
    if not any(dataset.get(place) for place in places):
        raise ValueError(
            f'{key}.local={dataset.get("local")!r}: no data is named; give one of {", ".join(places)}.'
        )
    if kind == 'finetuning':
        _check_finetuning(key, dataset)


def _check_finetuning(key: str, dataset: Mapping[str, Any]) -> None:
    if dataset.get('decoder_only_format') is not True:
        raise ValueError(
            f'{key}.decoder_only_format={dataset.get("decoder_only_format")!r}: the family reads prompt '
            f'and response as one sequence; set {key}.decoder_only_format: true.'
        )
    if dataset.get('local') and not (dataset.get('remote') or dataset.get('streams')):
        raise ValueError(
            f'{key}.local={dataset["local"]!r} without {key}.remote: Foundry takes a folder of shards '
            f'for one only if remote is set; set {key}.remote to the same folder.'
        )
    if dataset.get('packing_ratio') is not None:
        raise ValueError(
            f'{key}.packing_ratio={dataset["packing_ratio"]!r}: packed rows need attention that stops '
            'between examples, which the family does not have; remove the key.'
        )


def _check_saving(cfg: Mapping[str, Any]) -> None:
    if cfg.get('autoresume'):
        for key in ('save_folder', 'run_name'):
            if not cfg.get(key):
                raise ValueError(
                    f'autoresume=true with {key}={cfg.get(key)!r}: the run finds its own checkpoints by '
                    f'{key}; give it, or set autoresume: false.'
                )
        for key in ('save_overwrite', 'save_weights_only'):
            if cfg.get(key):
                raise ValueError(
                    f'autoresume=true with {key}=true: a run resumes from whole checkpoints that are '
                    f'never written over; set {key}: false, or autoresume: false.'
                )
    ignored = cfg.get('load_ignore_keys')
    if ignored is not None and (isinstance(ignored, str) or not isinstance(ignored, Iterable)):
        raise ValueError(f'load_ignore_keys={ignored!r} must be a list of patterns.')
    if cfg.get('load_weights_only') and not cfg.get('load_path'):
        raise ValueError(
            'load_weights_only=true has no effect without load_path; give load_path, or remove it.'
        )


def _registered(key: str, name: str, *registries: Any) -> Callable[..., Any]:
    for kinds in registries:
        if name in kinds:
            return kinds.get(name)
    known = sorted({entry for kinds in registries for entry in kinds.get_all()})
    raise ValueError(
        f'{key}={name!r} is not registered; {_nearest(name, known)} Known: {", ".join(known)}.'
    )


def _check_arguments(
    key: str,
    constructor: Callable[..., Any],
    arguments: Mapping[str, Any],
    given: Collection[str],
    extras: Collection[str] = (),
) -> None:
    """Refuses keys that a constructor does not take, and names those that it lacks."""
    parameters = inspect.signature(constructor).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return
    _refuse_unknown(key, arguments, (set(parameters) - set(given)) | set(extras))
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and name not in given
        if needed and arguments.get(name) is None:
            raise ValueError(f'{key}.{name} is missing; {key} needs it.')


def _refuse_unknown(key: str, found: Mapping[str, Any], known: Collection[str]) -> None:
    for name, value in found.items():
        if name not in known:
            raise ValueError(
                f'{key}.{name}={_short(value)}: {key} has no such key; {_nearest(name, known)}'
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f'did you mean {near[0]}?' if near else 'remove it.'


def _check_choice(key: str, value: Any) -> None:
    if value not in _CHOICES[key]:
        raise ValueError(f'{key}={value!r} must be one of {", ".join(_CHOICES[key])}.')


def _check_int(key: str, value: Any, least: int, otherwise: str = '') -> None:
    if not _is_int(value) or value < least:
        tail = f', {otherwise}' if otherwise else ''
        raise ValueError(f'{key}={_short(value)} must be an integer of at least {least}{tail}.')


def _check_number(
    key: str, value: Any, least: float | None = None, above: float | None = None
) -> None:
    fits = _is_number(value) and value < float('inf')
    if fits and least is not None and value >= least:
        return
    if fits and above is not None and value > above:
        return
    bound = f'of at least {least}' if least is not None else f'above {above}'
    raise ValueError(f'{key}={_short(value)} must be a number {bound}.')


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:77]}...'
