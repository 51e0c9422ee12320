# SPDX-License-Identifier: Apache-2.0
"""Two processes train under ALRS through Composer. Launched by torch.distributed.run.

Arguments: a folder that holds ``one/ep0-ba7-rank0.pt``, written by one process. Writes
``two.json``, learning rates and losses of each run, and ``two/ep0-ba7-rank0.pt``.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cpu_fsdp_shims
import torch.distributed as dist
from composer.utils import FSDP2Config
from distributed.alrs_training import Toy, loader, train

STRATEGIES = {
    'ddp': {},
    'fsdp1': {
        'parallelism_config': {
            'fsdp': {'sharding_strategy': 'FULL_SHARD', 'state_dict_type': 'sharded'}
        }
    },
    'fsdp1_shard_grad_op': {
        'parallelism_config': {
            'fsdp': {'sharding_strategy': 'SHARD_GRAD_OP', 'state_dict_type': 'full'}
        }
    },
    'fsdp2': {'parallelism_config': {'fsdp': FSDP2Config()}},
}


def main(folder):
    cpu_fsdp_shims.install()
    os.environ.setdefault('NODE_RANK', '0')  # Composer's launcher sets it, torch's does not
    report = {}
    for name, options in STRATEGIES.items():
        history = train(
            ranks=2,
            stop_at=24,
            eval_dataloader=loader(rows=8, ranks=2),
            eval_interval='5ba',
            **options,
        )
        report[name] = history
    for name in ('ddp', 'fsdp1', 'fsdp2'):
        saved = folder / name
        train(
            ranks=2,
            stop_at=7,
            save_folder=str(saved),
            save_interval='7ba',
            **STRATEGIES[name],
        )
        checkpoint = saved / 'ep0-ba7-rank0.pt'
        sharded = saved / 'ep0-ba7'
        report[f'{name}_resumed'] = train(
            ranks=2,
            stop_at=24,
            model=Toy(seed=9),
            load_path=str(sharded if sharded.is_dir() else checkpoint),
            **STRATEGIES[name],
        )
    report['ddp_from_one'] = train(
        ranks=2, stop_at=24, model=Toy(seed=9), load_path=str(folder / 'one' / 'ep0-ba7-rank0.pt')
    )
    if dist.get_rank() == 0:
        found = {n: {'rates': h.rates, 'losses': h.losses} for n, h in report.items()}
        (folder / 'two.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
