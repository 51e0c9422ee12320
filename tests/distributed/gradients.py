# SPDX-License-Identifier: Apache-2.0
"""Two processes: relative errors of sharded gradients against one process's, as JSON.

Launched by ``torch.distributed.run``; see test_sharded_gradients.py.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cpu_fsdp_shims
import torch
import torch.distributed as dist
from family import build, token_ids
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

SYSTEMS = ('dense', 'full_loop', 'asymloop', 'no_local_kv', 'asymloop_moe')
STRATEGIES = ('ddp', 'fsdp1_full_shard', 'fsdp1_shard_grad_op', 'fsdp2', 'fsdp2_keep_gathered')


def wrap(model, strategy):
    if strategy == 'ddp':
        return DistributedDataParallel(model)
    if strategy.startswith('fsdp1'):
        sharding = strategy.removeprefix('fsdp1_').upper()
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(model.fsdp_wrap_fn),
            sharding_strategy=ShardingStrategy[sharding],
            device_id=torch.device('cpu'),
            use_orig_params=True,
        )
    for module in list(model.modules()):
        if model.fsdp_wrap_fn(module):
            fully_shard(module, reshard_after_forward=strategy == 'fsdp2')
    return fully_shard(model)


def clean(name):
    for prefix in ('_fsdp_wrapped_module.', '_checkpoint_wrapped_module.', 'module.'):
        name = name.replace(prefix, '')
    return name


def gradients(model, strategy):
    if strategy.startswith('fsdp1'):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {clean(n): p.grad.clone() for n, p in model.named_parameters()}
    return {
        clean(n): p.grad.full_tensor() if hasattr(p.grad, 'full_tensor') else p.grad
        for n, p in model.named_parameters()
    }


def main(result):
    cpu_fsdp_shims.install()
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    ids = token_ids(rows=4)
    mine = ids[2 * rank : 2 * rank + 2]
    errors = {}
    for system in SYSTEMS:
        single = build(system).train()
        single(ids, labels=ids).loss.backward()
        expected = {n: p.grad for n, p in single.named_parameters()}
        for strategy in STRATEGIES:
            for recompute in (False, True):
                model = build(system).train()
                if recompute:
                    apply_activation_checkpointing(
                        model, check_fn=model.activation_checkpointing_fn
                    )
                model = wrap(model, strategy)
                model(mine, labels=mine).loss.backward()
                found = gradients(model, strategy)
                assert found.keys() == expected.keys()
                errors[f'{system}-{strategy}-{"recompute" if recompute else "plain"}'] = max(
                    ((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()
                )
    if rank == 0:
        Path(result).write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1])
