# SPDX-License-Identifier: Apache-2.0
"""Makes FSDP runnable and numerically right on CPU and gloo (torch 2.7, Composer 0.32). Tests only.

Four faults appear when there is no accelerator, and none of them on one:

1. Composer asks CUDA for the device that FSDP1 should use, which raises without a driver.
2. gloo computes a SUM where FSDP2 asks reduce-scatter for an AVG, so that gradients come out world
   size times too big, without an error.
3. FSDP1 moves the flat parameter "to the CPU" around a full state dict and frees the storage that
   it still needs, which ends the process with SIGSEGV.
4. FSDP1's full optimizer state keeps views into one reused buffer when that buffer is already on
   the CPU: every exp_avg ends up holding the values of exp_avg_sq.

Call :func:`install` before the Trainer or the first wrapped module is built. It does nothing where
CUDA is available.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import _flat_param, _optim_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

_installed = False


def _divide_after_sum(
    reduce_scatter_group: dist.ProcessGroup,
    all_reduce_group: dist.ProcessGroup | None,
    *_: Any,
    **__: Any,
) -> tuple[float, float]:
    """No division before the reduction, all of it after: FSDP2 then asks for a SUM."""
    ranks = reduce_scatter_group.size()
    if all_reduce_group is not None:
        ranks *= all_reduce_group.size()
    return 1.0, float(ranks)


def install() -> None:
    """Install the four shims, once a process, where there is no CUDA device."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True

    torch.cuda.current_device = lambda: torch.device('cpu')
    _fsdp_collectives._get_gradient_divide_factors = _divide_after_sum
    _flat_param.FlatParamHandle.to_cpu = lambda self: contextlib.nullcontext()

    unflatten = _optim_utils._unflatten_orig_param_states

    def unflatten_into_own_storage(
        fsdp_param_info: Any,
        output_states: dict[str, dict[str, Any]],
        state_name: str,
        shard_state: bool,
        to_save: bool,
        cpu_offload: bool,
    ) -> None:
        unflatten(fsdp_param_info, output_states, state_name, shard_state, to_save, cpu_offload)
        if not to_save or shard_state:
            return
        for state in output_states.values():
            if isinstance(state.get(state_name), torch.Tensor):
                state[state_name] = state[state_name].clone()

    _optim_utils._unflatten_orig_param_states = unflatten_into_own_storage
