# SPDX-License-Identifier: Apache-2.0
"""Two processes: spectra under every sharding, as JSON. Launched by torch.distributed.run.

Reports, per strategy, rank 0's spectra, whether rank 1 has the same bits, how many decompositions
each rank made, and the most elements that a rank was ever given whole.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cpu_fsdp_shims
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from asymloop_foundry import spectra

STRATEGIES = (
    'ddp',
    'fsdp1_full_shard',
    'fsdp1_shard_grad_op',
    'fsdp1_no_shard',
    'fsdp2',
    'fsdp2_keep_gathered',
)
MOMENTS = ('before_training', 'after_step', 'after_evaluation')


class Block(nn.Module):
    """Three sizes of matrix, one of them indivisible by two, and a stack of experts."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(15, 15, bias=False)
        self.k_proj = nn.Linear(15, 15, bias=False)
        self.up_proj = nn.Linear(15, 23, bias=False)
        self.down_proj = nn.Linear(23, 15, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 15, 15) / 4)

    def forward(self, x):
        x = x + torch.tanh(self.q_proj(x)) * self.k_proj(x)
        x = x + torch.einsum('...i,eoi->...o', x, self.experts)
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)], nn.Linear(15, 15, bias=False))


def wrap(model, strategy):
    if strategy == 'ddp':
        return DistributedDataParallel(model)
    if strategy.startswith('fsdp1'):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy.removeprefix('fsdp1_').upper()],
            # What evaluation leaves gathered is in this precision, not the weights'.
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            device_id=torch.device('cpu'),
            use_orig_params=True,
        )
    for block in model[:3]:
        fully_shard(block, reshard_after_forward=strategy == 'fsdp2')
    return fully_shard(model)


def inputs():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 15, generator=generator)


def measured(model, shapes):
    """Spectra, and what this rank did for them."""
    decomposed, held = [], []
    original = spectra._unit_spectra

    def counting(unit, *rest):
        results = original(unit, *rest)
        decomposed.append(len(results))
        held.append(sum(tensor.numel() for tensor in unit))
        return results

    spectra._unit_spectra = counting
    try:
        found = spectra.measure(model, shapes)
    finally:
        spectra._unit_spectra = original
    values = {name: [s.alpha, s.stable_rank] for name, s in found.items()}
    report = {'values': values, 'decomposed': sum(decomposed), 'held': max(held, default=0)}
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return reports


def whole_weights(model, shapes):
    """The weights by FSDP's own means, to decompose them without the package's gathering."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {spectra.clean_name(n): p.detach().clone() for n, p in model.named_parameters()}
    return {
        n.removeprefix('module.'): p.full_tensor() if hasattr(p, 'full_tensor') else p.detach()
        for n, p in model.named_parameters()
    }


def main():
    dist.init_process_group('gloo')
    cpu_fsdp_shims.install()
    shapes = {n: p.shape for n, p in build().named_parameters()}
    report = {}
    for strategy in STRATEGIES:
        model = wrap(build(), strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for moment in MOMENTS:
            if moment == 'after_step':
                model(inputs()).float().square().mean().backward()
                optimizer.step()
            elif moment == 'after_evaluation':
                with torch.no_grad():
                    model(inputs())
            reports = measured(model, shapes)
            plain = spectra_alone(whole_weights(model, shapes), shapes)
            report[f'{strategy}-{moment}'] = {'ranks': reports, 'plain': plain}
        model(inputs()).float().square().mean().backward()
        optimizer.step()
    report['broken'] = errors_of_a_broken_weight(shapes)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    dist.destroy_process_group()


def errors_of_a_broken_weight(shapes):
    """What each rank raises for a NaN that lies in one rank's shard."""
    model = build()
    model[1].up_proj.weight.data[0, 0] = torch.nan
    try:
        spectra.measure(wrap(model, 'fsdp2'), shapes)
        message = 'nothing'
    except spectra.SpectrumError as error:
        message = str(error).split('. ')[0]
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return messages


def spectra_alone(weights, shapes):
    """Each matrix by itself, with the same estimator."""
    values = {}
    for name, shape in shapes.items():
        for matrix_name, matrix in zip(
            spectra.matrix_names(name, shape),
            weights[name] if len(shape) == 3 else [weights[name]],
            strict=True,
        ):
            eigenvalues = spectra.squared_singular_values([matrix])[0]
            values[matrix_name] = [
                spectra.alpha(eigenvalues, larger_side=max(matrix.shape)).item(),
                spectra.normalized_stable_rank(eigenvalues).item(),
            ]
    return values


if __name__ == '__main__':
    main()
