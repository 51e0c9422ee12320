# SPDX-License-Identifier: Apache-2.0
"""A model with the family's names and next to no cost, trained by Composer under ALRS."""

from dataclasses import dataclass, field

import torch
from composer import Callback, DataSpec, Trainer
from composer.models import ComposerModel
from composer.optim import CosineAnnealingWithWarmupScheduler
from composer.utils import dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from asymloop_foundry.algorithms.alrs import ALRS, GROUP_KEY

VOCABULARY, WIDTH, HIDDEN, LENGTH, BATCH = 24, 8, 12, 6, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj'):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        return self.o_proj(torch.tanh(self.q_proj(x) * self.k_proj(x)) + self.v_proj(x))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.LayerNorm(WIDTH, bias=False)
        self.attn = Attention()
        self.ffn = FeedForward()

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.ffn(x)


class GlobalKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.k_proj(x)) + self.v_proj(x)


class Stacks(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(layers))
        self.global_kv = nn.ModuleList(GlobalKV() for _ in range(layers))
        self.decoder = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block | GlobalKV)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for block in self.encoder:
            x = block(x)
        globals_ = [projection(x) for projection in self.global_kv]
        for _ in range(2):
            for block, extra in zip(self.decoder, globals_, strict=True):
                x = block(x + extra)
        return self.lm_head(self.norm(x))


class Toy(ComposerModel):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.model = Stacks()

    def forward(self, batch):
        return self.model(batch)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch) if outputs is None else outputs


@dataclass(eq=False)
class History(Callback):
    """Learning rates that each optimizer step used, losses, and weights where refreshes may be."""

    stop_at: int | None = None
    weights_at: tuple[int, ...] = ()
    rates: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def batch_start(self, state, logger):
        t = state.timestamp.batch.value
        if t in self.weights_at:
            self.weights[t] = {n: p.detach().clone() for n, p in state.model.named_parameters()}

    def after_train_batch(self, state, logger):
        groups = state.optimizers[0].param_groups
        self.rates.append({group.get(GROUP_KEY): group['lr'] for group in groups})

    def batch_end(self, state, logger):
        self.losses.append(float(state.total_loss_dict['loss/train/total']))
        if state.timestamp.batch.value == self.stop_at:
            state.stop_training()


def loader(rows=40, ranks=1):
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(3))
    sampler = dist.get_sampler(tokens, shuffle=False)
    data = DataLoader(tokens, batch_size=BATCH // ranks, sampler=sampler)
    return DataSpec(data, get_num_tokens_in_batch=lambda batch: batch.numel())


SHORT = {'update_interval': '5ba', 'transition': '3ba', 'window': '0.5dur', 'log_interval': '1ba'}


def build_trainer(
    *,
    max_duration='40ba',
    scheduler=None,
    algorithm=None,
    model=None,
    lr=1e-2,
    ranks=1,
    history=None,
    callbacks=(),
    optimizer=torch.optim.AdamW,
    **trainer,
):
    """A trainer of the toy; ``algorithm`` is an ALRS, False for none, or None for a short one."""
    model = Toy() if model is None else model
    if algorithm is None:
        algorithm = ALRS(**SHORT)
    return Trainer(
        model=model,
        train_dataloader=loader(ranks=ranks),
        max_duration=max_duration,
        optimizers=optimizer(model.parameters(), lr=lr),
        schedulers=scheduler or CosineAnnealingWithWarmupScheduler('4ba', alpha_f=0.1),
        algorithms=[algorithm] if algorithm else [],
        callbacks=[*([history] if history else []), *callbacks],
        device='cpu',
        progress_bar=False,
        **trainer,
    )


def train(*, stop_at=None, weights_at=(), **options):
    """Trains and returns what happened."""
    history = History(stop_at=stop_at, weights_at=weights_at)
    trainer = build_trainer(history=history, **options)
    trainer.fit()
    trainer.close()
    return history
