# SPDX-License-Identifier: Apache-2.0
"""Two processes train a member of the family and save sharded checkpoints, and an export of each.

Launched by torch.distributed.run. Arguments: a folder, a tokenizer's folder. For ``fsdp1`` and ``fsdp2``
it writes Composer's sharded checkpoint to ``NAME/ep0-ba2`` and what the callback exports to
``NAME/huggingface/ba2``.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cpu_fsdp_shims
import torch
from composer import Trainer
from composer.utils import FSDP2Config
from family import FAMILY, SMALL
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer

from asymloop_foundry.callbacks.hf_export import HFExport
from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM

STRATEGIES = {
    'fsdp1': {'sharding_strategy': 'FULL_SHARD', 'state_dict_type': 'sharded'},
    'fsdp2': FSDP2Config(),
}


def main(folder: Path, tokenizer: str) -> None:
    cpu_fsdp_shims.install()
    os.environ.setdefault('NODE_RANK', '0')  # Composer's launcher sets it, torch's does not
    for name, fsdp in STRATEGIES.items():
        torch.manual_seed(0)
        model = ComposerAsymLoopCausalLM(
            AutoTokenizer.from_pretrained(tokenizer),
            **{**SMALL, **FAMILY['asymloop'], 'vocab_size': 1024, 'activation_checkpointing': True},
        )
        rows = [{'input_ids': ids, 'labels': ids} for ids in torch.randint(5, 500, (8, 12))]
        sampler = DistributedSampler(
            rows, num_replicas=int(os.environ['WORLD_SIZE']), rank=int(os.environ['RANK'])
        )
        Trainer(
            model=model,
            train_dataloader=DataLoader(rows, batch_size=2, sampler=sampler),
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            max_duration='2ba',
            parallelism_config={'fsdp': fsdp},
            callbacks=[HFExport(save_folder=str(folder / name), save_interval='2ba')],
            save_folder=str(folder / name),
            save_interval='2ba',
            progress_bar=False,
            precision='fp32',
            device='cpu',
        ).fit()


if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2])
