# SPDX-License-Identifier: Apache-2.0
"""Every training run behind the paper's tables, and its analogue for a CPU.

A run says which system is trained and how; :mod:`.tables` says which printed numbers it gives. A run at
``--scale tiny`` is the same system, K, ablation and learning-rate method on a backbone that two cores
train in minutes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..models.flops import active_parameter_count, parameter_count
from .paper import ARCHITECTURES
from .systems import Backbone, backbone, config_of, model_fields

__all__ = ['RUNS', 'SCALES', 'SEED', 'Run']

SEED = 6198
SCALES = ('paper', 'tiny')
# The paper does not print its static boost; 1.5 is the ratio that ALRS itself reaches (appendix 9.2).
STATIC_BOOST = 1.5
MOE = {'n_experts': 8, 'expert_top_k': 2}
# Two cores: a 60M analogue of 0.7 million parameters takes 2,000 steps of 0.5 to 0.7 s, about 11 tokens
# per parameter, from which on looped models lead Dense; wider and deeper ones see as many per parameter.
TINY_STEPS = 2000
TINY_TOKENS_PER_STEP = 32 * 128
TINY_SIZES = {
    '60m': Backbone(4, 64, 172, 2, vocab_size=4096, max_seq_len=128),
    '135m': Backbone(8, 64, 172, 2, vocab_size=4096, max_seq_len=128),
    '350m': Backbone(8, 96, 258, 3, vocab_size=4096, max_seq_len=128),
    '1b': Backbone(8, 128, 344, 4, vocab_size=4096, max_seq_len=128),
}
TINY_LR_FACTOR = 4.0


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: the run's name, unique.
        scale: 60m, 135m, 350m or 1b.
        system: a key of :data:`.systems.SYSTEMS`.
        k: K, iterations of the decoder.
        qk_norm: where queries and keys are normalised; the system's own choice when ``None``.
        rates: how matrices get their learning rates: ``uniform``, ``alrs`` or
            ``static_decoder_boost``.
        max_multiplier: the largest multiplier of ALRS.
        lr_factor: the base learning rate, in multiples of the scale's.
        steps: optimizer steps at the paper's scale; the scale's own when ``None``.
        backbone_name: ``llama``, ``olmo`` (Table 12) or ``moe`` (Table 14).
        parent: the pretraining run that a fine-tuning run starts from.
    """

    name: str
    scale: str
    system: str
    k: int = 1
    qk_norm: str | None = None
    rates: str = 'uniform'
    max_multiplier: int = 5
    lr_factor: float = 1.0
    steps: int | None = None
    backbone_name: str = 'llama'
    parent: str | None = None

    @property
    def is_fine_tuning(self) -> bool:
        """Whether the run starts from the weights of another."""
        return self.parent is not None

    def size(self, scale: str = 'paper') -> Backbone:
        """The backbone of the run at the paper's scale or at ``tiny``."""
        tiny = scale == 'tiny'
        size = TINY_SIZES[self.scale] if tiny else backbone(self.scale)
        extra: dict[str, Any] = {}
        if tiny:
            # Entries grow as the width shrinks, so that activations keep the scale they have at 768.
            extra['init_std'] = round(0.02 * (768 / size.d_model) ** 0.5, 2)
        if self.backbone_name == 'olmo':
            extra['init_cutoff'] = 3.0
            if tiny:
                return _replace(size, d_ff=4 * size.d_model, extra=extra)
            return Backbone(8, 512, 2048, 8, vocab_size=49152, extra=extra)
        if self.backbone_name == 'moe':
            # Two experts of half the width have the parameters of the dense FFN.
            return _replace(size, d_ff=size.d_ff // 2, extra={**extra, **MOE})
        if tiny and self.is_fine_tuning:
            return _replace(size, max_seq_len=512, extra=extra)
        return _replace(size, extra=extra)

    def model(self, scale: str = 'paper') -> dict[str, Any]:
        """Every model field."""
        return model_fields(self.system, self.size(scale), self.k, self.qk_norm)

    def parameters(self, scale: str = 'paper') -> int:
        """Number of parameters."""
        return parameter_count(config_of(self.system, self.size(scale), self.k, self.qk_norm))

    def n_steps(self, scale: str = 'paper') -> int:
        """Optimizer steps.

        Tiny runs see as many tokens per active parameter as the 60M analogue does, Dense's count for
        all systems of a scale, in the paper's own proportion where it trains longer than usual.
        """
        usual = ARCHITECTURES[self.scale].steps
        if scale == 'paper' or self.is_fine_tuning:
            return self.steps or usual
        dense = active_parameter_count(config_of('dense', TINY_SIZES[self.scale]))
        smallest = active_parameter_count(config_of('dense', TINY_SIZES['60m']))
        longer = (self.steps or usual) / usual if self.scale == '350m' else 1.0
        return 10 * round(TINY_STEPS * dense / smallest * longer / 10)

    def settings(self, scale: str = 'paper') -> dict[str, Any]:
        """Training keys that say what the run is, by their dotted names; model fields included."""
        if self.is_fine_tuning:
            return self._fine_tuning_settings(scale)
        tiny = scale == 'tiny'
        steps = self.n_steps(scale)
        lr = ARCHITECTURES[self.scale].peak_lr * self.lr_factor * (TINY_LR_FACTOR if tiny else 1)
        settings: dict[str, Any] = {
            **{f'model.{key}': value for key, value in self.model(scale).items()},
            'max_duration': f'{steps}ba',
            'optimizer.lr': lr,
        }
        if tiny:
            settings |= {
                'eval_interval': f'{steps // 5}ba',
                'save_interval': f'{steps // 4}ba',
                'eval_first': False,
            }
        if self.backbone_name == 'olmo' and not tiny:
            settings |= {
                'tokenizer.name': 'HuggingFaceTB/SmolLM-135M',
                # It has no pad token; this one of its own never occurs in text.
                'tokenizer.kwargs.pad_token': '<empty_output>',
                'variables.data_local': './data/fineweb-edu-smollm',
            }
        return settings | self._rate_settings(tiny)

    def _fine_tuning_settings(self, scale: str) -> dict[str, Any]:
        settings = {f'model.{key}': value for key, value in self.model(scale).items()}
        if scale == 'tiny':
            settings |= {
                'max_seq_len': self.size(scale).max_seq_len,
                'optimizer.lr': 1e-3,
                'precision': 'fp32',
                'device_train_microbatch_size': 32,
                'device_eval_batch_size': 32,
            }
            for loader in ('train_loader', 'eval_loader'):
                settings |= {
                    f'{loader}.num_workers': 0,
                    f'{loader}.prefetch_factor': None,
                    f'{loader}.persistent_workers': False,
                    f'{loader}.pin_memory': False,
                }
        return settings

    def _rate_settings(self, tiny: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {'algorithms.alrs.mode': self.rates}
        if self.rates == 'alrs':
            settings['algorithms.alrs.multiplier_range'] = [1, self.max_multiplier]
            # Tiny: as many refreshes in a fifth of 2,000 steps as the 60M runs have in theirs of 3,200.
            settings['algorithms.alrs.update_interval'] = '60ba' if tiny else '100ba'
            settings['algorithms.alrs.transition'] = '30ba' if tiny else '50ba'
            settings['algorithms.alrs.window'] = '0.2dur'
        elif self.rates == 'static_decoder_boost':
            settings['algorithms.alrs.decoder_boost'] = STATIC_BOOST
        return settings


def _replace(size: Backbone, **changes: Any) -> Backbone:
    return Backbone(**{**size.__dict__, **changes})


def _main_runs() -> Iterator[Run]:
    """Tables 1 and 3: the three systems at each scale, at effective depths L, 2L and 3L (1B: 2L)."""
    for scale in ARCHITECTURES:
        yield Run(f'{scale}-dense', scale, 'dense')
        for k in (2,) if scale == '1b' else (2, 3):
            yield Run(f'{scale}-full-loop-k{k}', scale, 'full-loop', k)
        for k in (3,) if scale == '1b' else (1, 3, 5):
            yield Run(f'{scale}-asymloop-k{k}', scale, 'asymloop', k, rates='alrs')


def _longer_runs() -> Iterator[Run]:
    """Table 2: 35B tokens at 350M."""
    for system, k, rates in (
        ('dense', 1, 'uniform'),
        ('full-loop', 2, 'uniform'),
        ('asymloop', 3, 'alrs'),
    ):
        yield Run(f'350m-35b-{_with_k(system, k)}', '350m', system, k, rates=rates, steps=66757)


def _ablations() -> Iterator[Run]:
    """Tables 4, 6, 7 and 8, all at 60M."""
    yield Run('60m-asymloop-k1-uniform', '60m', 'asymloop', 1)
    yield Run('60m-no-global-kv-k1', '60m', 'no-global-kv', 1)
    for k in (3, 5):
        yield Run(f'60m-asymloop-k{k}-uniform', '60m', 'asymloop', k)
        yield Run(f'60m-asymloop-k{k}-no-qk-norm', '60m', 'asymloop', k, qk_norm='none')
        for system in ('no-global-kv', 'no-local-kv', 'param-matched'):
            yield Run(f'60m-{system}-k{k}', '60m', system, k)
        for factor in (0.5, 2, 4):
            yield Run(
                f'60m-asymloop-k{k}-lr-x{factor}',
                '60m',
                'asymloop',
                k,
                rates='alrs',
                lr_factor=factor,
            )
        yield Run(
            f'60m-asymloop-k{k}-static-boost', '60m', 'asymloop', k, rates='static_decoder_boost'
        )
    yield Run('60m-additive-injection-k3', '60m', 'additive-injection', 3)
    yield Run('60m-dense-alrs', '60m', 'dense', rates='alrs')
    yield Run('60m-full-loop-k2-alrs', '60m', 'full-loop', 2, rates='alrs')
    yield Run('60m-full-loop-k2-qk-norm', '60m', 'full-loop', 2, qk_norm='decoder')


def _widened() -> Iterator[Run]:
    """Table 10: Full Loop at AsymLoop's training FLOPs."""
    for scale in ('60m', '135m'):
        yield Run(f'{scale}-full-loop-wide-k2', scale, 'full-loop-wide', 2)


def _olmo() -> Iterator[Run]:
    """Table 12."""
    for system, k, rates in (
        ('dense', 1, 'uniform'),
        ('full-loop', 2, 'uniform'),
        ('asymloop', 3, 'alrs'),
    ):
        yield Run(
            f'olmo-{_with_k(system, k)}',
            '60m',
            system,
            k,
            rates=rates,
            max_multiplier=3,
            backbone_name='olmo',
        )


def _moe() -> Iterator[Run]:
    """Table 14; the paper names AdamW and a cosine schedule for it, and no ALRS."""
    for scale, steps in (('60m', 3052), ('135m', 5722)):
        for system, k in (('dense', 1), ('full-loop', 2), ('asymloop', 3)):
            yield Run(
                f'{scale}-moe-{_with_k(system, k)}',
                scale,
                system,
                k,
                steps=steps,
                backbone_name='moe',
            )


def _fine_tuning() -> Iterator[Run]:
    """Table 13."""
    for system, k in (('dense', 1), ('full-loop', 2), ('asymloop', 3)):
        name = _with_k(system, k)
        yield Run(f'1b-gsm8k-{name}', '1b', system, k, steps=654, parent=f'1b-{name}')


def _with_k(system: str, k: int) -> str:
    return system if system == 'dense' else f'{system}-k{k}'


def _registry() -> Mapping[str, Run]:
    parts = (_main_runs, _longer_runs, _ablations, _widened, _olmo, _moe, _fine_tuning)
    runs = [run for part in parts for run in part()]
    by_name = {run.name: run for run in runs}
    if len(by_name) != len(runs):
        raise AssertionError('two runs share a name')
    return by_name


RUNS = _registry()
