# SPDX-License-Identifier: Apache-2.0
"""Sparse mixture of experts in place of a layer's feed-forward part (paper, appendix on MoE).

A router gives each token k of E experts; no token is dropped. The tokens' copies are put in the order
of their experts, each expert then multiplies one contiguous slice, and the results are summed back in
the tokens' order. Both movements are gathers in the backward pass as well, so that sums have one order
and training is reproducible. Nothing is kept in a module between calls: a call returns its router
logits, and the auxiliary losses are computed from those of all executed calls, once a forward pass,
however often activation checkpointing runs a call.

Shapes: B batch, N positions, T = B N tokens, D width, E experts, K experts of a token, S = T K copies
of tokens in the order of their experts, C executed calls.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_asymloop import AsymLoopConfig

__all__ = ['AsymLoopOutput', 'MixtureOfExperts', 'RouterLosses', 'choose_experts', 'router_losses']


class RouterLosses(NamedTuple):
    """What training adds to the cross-entropy, each before its coefficient.

    Attributes:
        load_balancing: 1 when tokens and probabilities are spread evenly, E / K at the worst.
        router_z: mean squared log-sum-exp of the router logits.
    """

    load_balancing: Tensor
    router_z: Tensor

    def weighted(self, config: AsymLoopConfig) -> Tensor:
        """What is added to the loss."""
        balancing = config.load_balancing_coef * self.load_balancing
        return balancing + config.router_z_coef * self.router_z


@dataclass
class AsymLoopOutput(CausalLMOutputWithPast):
    """Loss, logits and cache; in training with experts, the routers' losses that ``loss`` contains."""

    router_losses: RouterLosses | None = None


class MixtureOfExperts(nn.Module):
    """The k likeliest of E experts for each token, weighted by the router's probabilities.

    Args:
        config: the model's configuration.
        experts: E modules from (S, D) to (S, D).
    """

    def __init__(self, config: AsymLoopConfig, experts: Iterable[nn.Module]):
        super().__init__()
        self.top_k = config.expert_top_k
        self.normalize = config.normalize_expert_weights
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = nn.ModuleList(experts)

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, D) to (B, N, D), and the router logits, (B, N, E) in at least fp32."""
        x_TD = x_BND.flatten(0, 1)
        logits_TE = self._router_logits(x_TD)
        chosen_TK = choose_experts(logits_TE, self.top_k)
        gate_TK = logits_TE.softmax(dim=-1).gather(-1, chosen_TK)
        if self.normalize:
            gate_TK = gate_TK / gate_TK.sum(dim=-1, keepdim=True)

        order_S = chosen_TK.flatten().argsort(stable=True)
        slot_TK = torch.empty_like(order_S)
        slot_TK[order_S] = torch.arange(order_S.numel(), device=order_S.device)
        slot_TK = slot_TK.view_as(chosen_TK)
        sizes = chosen_TK.flatten().bincount(minlength=len(self.experts)).tolist()

        x_SD = _Dispatch.apply(x_TD, order_S // self.top_k, slot_TK)
        # An expert without tokens runs too while training, so that its weights get (zero) gradients.
        y_SD = torch.cat([
            expert(rows)
            for expert, rows in zip(self.experts, x_SD.split(sizes), strict=True)
            if rows.shape[0] or torch.is_grad_enabled()
        ])  # fmt: skip
        y_TD = _Combine.apply(y_SD, gate_TK, order_S, slot_TK)
        return y_TD.view_as(x_BND).to(x_BND.dtype), logits_TE.unflatten(0, x_BND.shape[:2])

    def _router_logits(self, x_TD: Tensor) -> Tensor:
        """In full precision, autocast or not: rounding would decide who comes second."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.router.weight.to(dtype))


def choose_experts(logits_E: Tensor, top_k: int) -> Tensor:
    """Indices of the ``top_k`` largest logits, (..., E) to (..., K); among equals the first."""
    return logits_E.detach().sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


class _Dispatch(torch.autograd.Function):
    """Copies of tokens in the order of their experts; the gradients of a token's copies are summed."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_S: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return x_TD.index_select(0, token_S)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        first, *others = (grad_SD.index_select(0, slot_T) for slot_T in slot_TK.unbind(-1))
        return sum(others, first), None, None


class _Combine(torch.autograd.Function):
    """Sum of a token's copies, each times its gate, in the gates' precision."""

    @staticmethod
    def forward(
        ctx: Any, y_SD: Tensor, gate_TK: Tensor, order_S: Tensor, slot_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_SD, gate_TK, order_S, slot_TK)
        first, *others = zip(slot_TK.unbind(-1), gate_TK.unbind(-1), strict=True)
        y_TD = y_SD.index_select(0, first[0]) * first[1][:, None]
        for slot_T, gate_T in others:
            y_TD.addcmul_(y_SD.index_select(0, slot_T).to(y_TD.dtype), gate_T[:, None])
        return y_TD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_SD, gate_TK, order_S, slot_TK = ctx.saved_tensors
        grad_SD = grad_TD.index_select(0, order_S // gate_TK.shape[-1])
        dgate_S = torch.linalg.vecdot(grad_SD, y_SD.to(grad_SD.dtype))
        dy_SD = grad_SD.mul_(gate_TK.flatten()[order_S][:, None])
        return dy_SD.to(y_SD.dtype), dgate_S[slot_TK], None, None


def router_losses(
    config: AsymLoopConfig,
    logits: Sequence[Tensor],
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> RouterLosses:
    """Load-balancing and z-loss: means over the executed calls and over the tokens that are no padding.

    Load balancing is ``E / (K T) sum_i count_i mean_t p_ti``. The counts have no gradient. Where several
    processes train together, the counts are those of all of them: given the counts both losses are
    means over tokens, as the cross-entropy is, so that whatever averages that over processes makes
    these the losses of the whole batch. One small all-reduce; every process must take part.

    Args:
        config: the model's configuration.
        logits: (B, N, E) of each executed call.
        input_ids: (B, N); ``pad_token_id`` is padding where there is no mask.
        attention_mask: (B, N), 0 for padding.
    """
    logits_CTE = torch.stack([call.flatten(0, 1) for call in logits])
    if attention_mask is not None:
        real_T1 = attention_mask.reshape(-1, 1).bool()
    elif input_ids is not None and config.pad_token_id is not None:
        real_T1 = input_ids.reshape(-1, 1) != config.pad_token_id
    else:
        real_T1 = torch.ones_like(logits_CTE[0, :, :1], dtype=torch.bool)
    n_real = real_T1.sum().clamp(min=1)

    lse_CT1 = logits_CTE.logsumexp(dim=-1, keepdim=True)
    router_z = (lse_CT1.square() * real_T1).sum() / (n_real * len(logits))

    chosen_CTK = choose_experts(logits_CTE, config.expert_top_k)
    taken_CTE = torch.zeros_like(logits_CTE, dtype=torch.bool).scatter_(-1, chosen_CTK, True)
    count_CE = (taken_CTE & real_T1).sum(dim=1)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count_CE)
    count_CE = count_CE.to(logits_CTE.dtype)
    share_CE = count_CE / count_CE.sum(dim=-1, keepdim=True).clamp(min=1)
    mean_CE = (logits_CTE.softmax(dim=-1) * real_T1).sum(dim=1) / n_real
    balancing_C = config.n_experts * (share_CE * mean_CE).sum(dim=-1)
    return RouterLosses(balancing_C.mean(), router_z)
