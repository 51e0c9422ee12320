# SPDX-License-Identifier: Apache-2.0
"""The family in its most literal form: what every fast path is tested against.

Nothing here is fast, and nothing here is shared with the modules it checks: attention is an explicit
softmax over 2N keys with two causal masks, and the model is read straight off the paper (section 3)
from a dictionary of weights.

Shapes: B batch, N positions, D width, H heads, d head width, V vocabulary.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ['reference_joint_attention', 'reference_logits']


def reference_joint_attention(
    q_BHNd: Tensor,
    k_global_BHNd: Tensor | None,
    v_global_BHNd: Tensor | None,
    k_local_BHNd: Tensor | None,
    v_local_BHNd: Tensor | None,
) -> Tensor:
    """One softmax over the keys of both sources, query i seeing positions j <= i of each.

    Args:
        q_BHNd: queries.
        k_global_BHNd: keys made from the encoder's output, or ``None``.
        v_global_BHNd: values beside them.
        k_local_BHNd: keys made from the decoder's state, or ``None``.
        v_local_BHNd: values beside them.

    Returns:
        (B, H, N, d), in the dtype of the queries.
    """
    keys = [k for k in (k_global_BHNd, k_local_BHNd) if k is not None]
    values = [v for v in (v_global_BHNd, v_local_BHNd) if v is not None]
    n = q_BHNd.shape[-2]
    groups = q_BHNd.shape[1] // keys[0].shape[1]
    k = torch.cat(keys, dim=-2).repeat_interleave(groups, dim=1)
    v = torch.cat(values, dim=-2).repeat_interleave(groups, dim=1)
    causal_NN = torch.ones(n, n, dtype=torch.bool, device=q_BHNd.device).tril()
    visible_NM = torch.cat([causal_NN] * len(keys), dim=-1)
    scores = q_BHNd @ k.transpose(-2, -1) / math.sqrt(q_BHNd.shape[-1])
    return scores.masked_fill(~visible_NM, float('-inf')).softmax(dim=-1) @ v


def reference_logits(
    weights: Mapping[str, Tensor],
    input_ids_BN: Tensor,
    *,
    n_heads: int,
    n_encoder_layers: int,
    n_decoder_layers: int,
    num_iterations: int,
    additive_injection: bool = False,
    expert_top_k: int = 2,
    normalize_expert_weights: bool = False,
    rope_theta: float = 10000.0,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Logits of any member of the family, from its state dictionary.

    Which sources a decoder layer attends to, whether it normalises queries and keys, and whether it has
    experts, follows from which weights are there.

    Args:
        weights: parameters by their names in ``AsymLoopForCausalLM``.
        input_ids_BN: token ids.
        n_heads: query heads.
        n_encoder_layers: E.
        n_decoder_layers: D.
        num_iterations: K.
        additive_injection: whether each iteration gets H_E added to its input, from a zero state.
        expert_top_k: experts of each token, where there are experts.
        normalize_expert_weights: whether the weights of a token's experts sum to 1.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the norms.

    Returns:
        (B, N, V).
    """

    def rms_norm(x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(dim=-1, keepdim=True) + norm_eps).rsqrt()
        return x * scale * weights[f'{name}.weight']

    def heads(x_BND: Tensor, name: str) -> Tensor:
        y = x_BND @ weights[f'{name}.weight'].T
        d_head = weights['model.embed_tokens.weight'].shape[1] // n_heads
        return y.unflatten(-1, (-1, d_head)).transpose(1, 2)

    def rotate(x_BHNd: Tensor) -> Tensor:
        n, d = x_BHNd.shape[-2:]
        frequency = rope_theta ** (-torch.arange(0, d, 2, dtype=x_BHNd.dtype) / d)
        angle = torch.outer(torch.arange(n, dtype=x_BHNd.dtype), frequency)
        a, b = x_BHNd[..., : d // 2], x_BHNd[..., d // 2 :]
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
        )

    def keys(x_BND: Tensor, module: str) -> Tensor:
        k = heads(x_BND, f'{module}.k_proj')
        return rotate(
            rms_norm(k, f'{module}.k_norm') if f'{module}.k_norm.weight' in weights else k
        )

    def swiglu(u: Tensor, name: str) -> Tensor:
        gate = u @ weights[f'{name}.gate_proj.weight'].T
        up = u @ weights[f'{name}.up_proj.weight'].T
        return (gate * gate.sigmoid() * up) @ weights[f'{name}.down_proj.weight'].T

    def mixture(u: Tensor, name: str) -> Tensor:
        router = weights[f'{name}.router.weight']
        score = (u @ router.T).softmax(dim=-1)
        outputs, chosen = [], []
        for j in range(len(router)):
            # Expert j runs where fewer than k experts come before it.
            before = (score > score[..., j : j + 1]).sum(-1) + (
                score[..., :j] == score[..., j : j + 1]
            ).sum(-1)
            chosen.append(score[..., j] * (before < expert_top_k))
            outputs.append(swiglu(u, f'{name}.experts.{j}'))
        weight_BNE = torch.stack(chosen, dim=-1)
        if normalize_expert_weights:
            weight_BNE = weight_BNE / weight_BNE.sum(dim=-1, keepdim=True)
        return (weight_BNE[..., None, :] * torch.stack(outputs, dim=-1)).sum(dim=-1)

    def layer(x: Tensor, name: str, k_global: Tensor | None, v_global: Tensor | None) -> Tensor:
        u = rms_norm(x, f'{name}.attn_norm')
        q = heads(u, f'{name}.attn.q_proj')
        if f'{name}.attn.q_norm.weight' in weights:
            q = rms_norm(q, f'{name}.attn.q_norm')
        k_local = v_local = None
        if f'{name}.attn.k_proj.weight' in weights:
            k_local, v_local = keys(u, f'{name}.attn'), heads(u, f'{name}.attn.v_proj')
        a = reference_joint_attention(rotate(q), k_global, v_global, k_local, v_local)
        x = x + a.transpose(1, 2).flatten(2) @ weights[f'{name}.attn.o_proj.weight'].T
        u = rms_norm(x, f'{name}.ffn_norm')
        feed_forward = mixture if f'{name}.ffn.router.weight' in weights else swiglu
        return x + feed_forward(u, f'{name}.ffn')

    h_E = weights['model.embed_tokens.weight'][input_ids_BN]
    for e in range(n_encoder_layers):
        h_E = layer(h_E, f'model.encoder.{e}', None, None)
    z = torch.zeros_like(h_E) if additive_injection else h_E
    for _ in range(num_iterations):
        z = z + h_E if additive_injection else z
        for i in range(n_decoder_layers):
            k_global = v_global = None
            if f'model.global_kv.{i}.k_proj.weight' in weights:
                k_global = keys(h_E, f'model.global_kv.{i}')
                v_global = heads(h_E, f'model.global_kv.{i}.v_proj')
            z = layer(z, f'model.decoder.{i}', k_global, v_global)
    return rms_norm(z, 'model.norm') @ weights['lm_head.weight'].T
