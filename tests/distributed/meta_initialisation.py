# SPDX-License-Identifier: Apache-2.0
"""Two processes wrap a model that began on the meta device, as Composer does with ``init_device: meta``.

Launched by torch.distributed.run. Every matrix must have the configured deviation and every norm ones.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cpu_fsdp_shims
import torch
import torch.distributed as dist
from family import FAMILY, SMALL
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM


def materialise(model, module):
    """What Composer's wrapping does with a module on the meta device."""
    module.to_empty(device='cpu', recurse=False)
    model.param_init_fn(module)


def main():
    cpu_fsdp_shims.install()
    dist.init_process_group('gloo')
    torch.manual_seed(dist.get_rank())
    for name in ('dense', 'asymloop', 'asymloop_moe'):
        config = AsymLoopConfig(**{**SMALL, **FAMILY[name], 'd_model': 64, 'd_ff': 128})
        with torch.device('meta'):
            model = AsymLoopForCausalLM(config)
        assert all(p.is_meta for p in model.parameters())
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(model.fsdp_wrap_fn),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            device_id=torch.device('cpu'),
            use_orig_params=True,
            param_init_fn=lambda module, model=model: materialise(model, module),
        )
        with FullyShardedDataParallel.summon_full_params(model):
            for key, weight in model.named_parameters():
                if 'norm' in key:
                    assert torch.equal(weight, torch.ones_like(weight)), key
                else:
                    deviations = (2 * weight.numel()) ** 0.5 * (weight.std() / config.init_std - 1)
                    assert abs(float(deviations)) < 6, key
        ids = torch.randint(0, 61, (2, 9))
        assert torch.isfinite(model(ids, labels=ids).loss)
    if dist.get_rank() == 0:
        print('initialised')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
