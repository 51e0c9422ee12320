# SPDX-License-Identifier: Apache-2.0
"""What the paper's Tables 5, 9 and 11 count, recomputed from the configurations, beside its numbers."""

import argparse
import json
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..models.configuration_asymloop import AsymLoopConfig
from ..models.flops import (
    forward_breakdown,
    forward_flops,
    kv_cache_bytes,
    parameter_count,
    training_flops,
)
from ..models.modeling_asymloop import AsymLoopForCausalLM
from .paper import ARCHITECTURES, FORWARD_GFLOPS, STEP_GFLOPS
from .systems import backbone, config_of
from .text_table import render

__all__ = [
    'add_parser',
    'cost_rows',
    'counted_training_flops',
    'table5_rows',
    'table9_rows',
    'table11_rows',
]

SEQ_LEN = 1024
# K in the paper's cost tables: equal effective depth.
ITERATIONS = {'dense': 1, 'full-loop': 2, 'full-loop-wide': 2, 'asymloop': 3}

Row = dict[str, Any]


def table5_rows() -> list[Row]:
    """Parameters of Dense and AsymLoop at each scale, in millions."""
    return [
        {
            'scale': scale,
            'model': system,
            'quantity': 'parameters_millions',
            'ours': parameter_count(_config(scale, system)) / 1e6,
            'paper': printed,
        }
        for scale, size in ARCHITECTURES.items()
        for system, printed in (
            ('dense', size.dense_millions),
            ('asymloop', size.asymloop_millions),
        )
    ]


def table9_rows() -> list[Row]:
    """GFLOPs per token of a forward pass, and what Global KV adds in per cent of Full Loop."""
    rows: list[Row] = []
    for scale, printed in FORWARD_GFLOPS.items():
        full_loop = forward_flops(_config(scale, 'full-loop'), 1, SEQ_LEN)
        asymloop = forward_breakdown(_config(scale, 'asymloop'), 1, SEQ_LEN)
        ours = (
            full_loop / SEQ_LEN / 1e9,
            asymloop.total / SEQ_LEN / 1e9,
            100 * asymloop.global_projections / full_loop,
            100 * asymloop.global_attention / full_loop,
            100 * (asymloop.total - full_loop) / full_loop,
        )
        rows += [
            {'scale': scale, 'quantity': quantity, 'ours': mine, 'paper': theirs}
            for quantity, mine, theirs in zip(TABLE9_QUANTITIES, ours, printed, strict=True)
        ]
    return rows


TABLE9_QUANTITIES = (
    'full_loop_gflops_per_token',
    'asymloop_gflops_per_token',
    'global_projections_percent',
    'global_attention_percent',
    'total_percent',
)


def table11_rows() -> list[Row]:
    """GFLOPs of a training step over one row with full recomputation of the layers.

    ``ours`` is the formula, ``counted`` what torch counts while the model runs forward and backward. The
    printed number of the widened Full Loop at 135M does not follow from the rule that gives the other
    three to every digit; both are shown.
    """
    return [
        {
            'scale': scale,
            'model': system,
            'quantity': 'training_gflops_per_step',
            'ours': training_flops(_config(scale, system), 1, SEQ_LEN, recompute=True) / 1e9,
            'counted': counted_training_flops(_config(scale, system), 1, SEQ_LEN) / 1e9,
            'paper': printed,
        }
        for (scale, system), printed in STEP_GFLOPS.items()
    ]


def counted_training_flops(config: AsymLoopConfig, batch: int, seq_len: int) -> int:
    """FLOPs that torch counts in a forward and backward pass with activation checkpointing.

    The model runs operator by operator on the meta device, where nothing is computed and nothing stored.
    """
    recomputing = AsymLoopConfig(**{**config.to_dict(), 'activation_checkpointing': True})
    with torch.device('meta'):
        model = AsymLoopForCausalLM(recomputing).train()
        ids = torch.zeros(batch, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


def cost_rows() -> list[Row]:
    """What the paper does not tabulate: the same costs as causal kernels pay them, and the cache.

    GFLOPs are per token at N = 1024; ``kv_cache_bytes`` is per token in bf16.
    """
    rows: list[Row] = []
    for scale in ARCHITECTURES:
        for system in ('dense', 'full-loop', 'asymloop'):
            config = _config(scale, system)
            row: Row = {'scale': scale, 'model': system, 'k': config.num_iterations}
            for name, causal in (('full', False), ('causal', True)):
                row[f'forward_{name}'] = _per_token(
                    forward_flops(config, 1, SEQ_LEN, causal=causal)
                )
                row[f'training_{name}'] = _per_token(
                    training_flops(config, 1, SEQ_LEN, causal=causal)
                )
            row['kv_cache_bytes'] = kv_cache_bytes(config)
            rows.append(row)
    return rows


def add_parser(commands: Any) -> None:
    """Adds ``arithmetic`` to the sub-commands of ``python -m asymloop_foundry.experiments``."""
    parser = commands.add_parser(
        'arithmetic',
        help='parameters and FLOPs of Tables 5, 9 and 11 beside the printed ones',
        description='Recomputes Tables 5, 9 and 11 from the configurations, beside the printed numbers.',
    )
    parser.add_argument(
        '--json', action='store_true', help='print one JSON object instead of tables'
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the tables."""
    table5, table9, table11 = table5_rows(), table9_rows(), table11_rows()
    if arguments.json:
        print(json.dumps({'table5': table5, 'table9': table9, 'table11': table11}))
        return
    print('Table 5: parameters in millions, QKNorm weights included')
    print(
        render(
            ['scale', 'model', 'ours', 'paper'],
            [[r['scale'], r['model'], f'{r["ours"]:.6f}', f'{r["paper"]:g}'] for r in table5],
        )
    )
    print('\nTable 9: forward pass at N = 1024, GFLOPs per token and per cent of Full Loop')
    print(
        render(
            ['scale', 'quantity', 'ours', 'paper'],
            [[r['scale'], r['quantity'], _digits(r, 'ours'), _digits(r, 'paper')] for r in table9],
        )
    )
    print('\nTable 11: training step of one row of 1,024 with recomputation, GFLOPs')
    print(
        render(
            ['scale', 'model', 'ours', 'counted', 'paper', 'ours - paper'],
            [
                [
                    r['scale'],
                    r['model'],
                    f'{r["ours"]:.3f}',
                    f'{r["counted"]:.3f}',
                    f'{r["paper"]:.3f}',
                    f'{r["ours"] - r["paper"]:+.3f}',
                ]
                for r in table11
            ],
        )
    )
    print(
        '\nGFLOPs per token at N = 1024 with full and with causal attention; bf16 cache per token'
    )
    headers = ['scale', 'model', 'K', 'forward', '(causal)', 'training', '(causal)', 'KV bytes']
    print(
        render(
            headers,
            [
                [
                    r['scale'],
                    r['model'],
                    str(r['k']),
                    f'{r["forward_full"]:.6f}',
                    f'{r["forward_causal"]:.6f}',
                    f'{r["training_full"]:.6f}',
                    f'{r["training_causal"]:.6f}',
                    f'{r["kv_cache_bytes"]:,}',
                ]
                for r in cost_rows()
            ],
        )
    )


def _config(scale: str, system: str) -> AsymLoopConfig:
    return config_of(system, backbone(scale), ITERATIONS[system])


def _per_token(flops: int) -> float:
    return flops / SEQ_LEN / 1e9


def _digits(row: Row, key: str) -> str:
    return f'{row[key]:.2f}' if row['quantity'].endswith('percent') else f'{row[key]:.6f}'
