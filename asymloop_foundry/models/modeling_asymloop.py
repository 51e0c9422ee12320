# SPDX-License-Identifier: Apache-2.0
"""The Asymmetric Looped Transformer and its family (paper, section 3).

A causal encoder runs once; each decoder layer gets Global keys and values from its output; the
weight-tied decoder is iterated K times and attends, under one softmax, to the Global keys and to the
Local keys of its own changing state.

Shapes: B batch, N positions of this call, M positions visible (cached and new), D width, H heads,
d head width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeModelOutputWithPast

from .autocast import to_autocast
from .cache_asymloop import CACHE, Append, CacheSlots, choose_cache, positions, visible_keys
from .configuration_asymloop import AsymLoopConfig
from .cross_entropy import linear_cross_entropy
from .fused import RMSNorm, Rope, rotate_heads
from .joint_attention import joint_attention
from .moe import AsymLoopOutput, MixtureOfExperts, router_losses
from .reference import reference_joint_attention  # noqa: F401 (an export carries what is imported here)

KeysValues = tuple[Tensor, Tensor]


def rope_table(positions_BN: Tensor, d_head: int, theta: float) -> Rope:
    """Cosines and sines of the rotary embedding, (B, 1, N, d) each, in fp32."""
    pairs = torch.arange(0, d_head, 2, device=positions_BN.device, dtype=torch.float32)
    angle_BNd = positions_BN[..., None].float() * theta ** (-pairs / d_head)
    angle_B1Nd = torch.cat([angle_BNd, angle_BNd], dim=-1)[:, None]
    return angle_B1Nd.cos(), angle_B1Nd.sin()


def split_heads(x_BND: Tensor, d_head: int) -> Tensor:
    """(B, N, H d) to (B, H, N, d), without a copy."""
    return x_BND.unflatten(-1, (-1, d_head)).transpose(1, 2)


def _head_norm(config: AsymLoopConfig, enabled: bool) -> RMSNorm | None:
    return RMSNorm(config.d_head, eps=config.norm_eps) if enabled else None


def keys_values(source: 'GlobalKV | Attention', x_BND: Tensor, rope: Rope) -> KeysValues:
    """K = RoPE(QKNorm(x W_K)) and V = x W_V of one source, (B, H, N, d) each (section 3.2)."""
    v_BHNd = split_heads(source.v_proj(x_BND), source.d_head)
    k_BHNd = split_heads(source.k_proj(x_BND), source.d_head)
    return rotate_heads(k_BHNd, rope, source.k_norm), v_BHNd


class GlobalKV(nn.Module):
    """The encoder's output as one decoder layer sees it at every iteration (section 3.2).

    A module of its own rather than part of the layer, since it runs once per forward pass, outside the
    layer's K calls: FSDP gathers weights, and activation checkpointing recomputes, by module call.
    """

    def __init__(self, config: AsymLoopConfig):
        super().__init__()
        self.d_head = config.d_head
        d_kv = config.n_kv_heads * config.d_head
        self.k_proj = nn.Linear(config.d_model, d_kv, bias=False)
        self.v_proj = nn.Linear(config.d_model, d_kv, bias=False)
        self.k_norm = _head_norm(config, config.qk_norm != 'none')

    def forward(self, h_BND: Tensor, rope: Rope) -> KeysValues:
        """Global keys and values, (B, H, N, d) each."""
        return keys_values(self, to_autocast(h_BND), rope)


class Attention(nn.Module):
    """Queries of the layer's input, read under one softmax against Global and Local keys."""

    def __init__(self, config: AsymLoopConfig, local_kv: bool, qk_norm: bool):
        super().__init__()
        self.d_head = config.d_head
        self.local_kv = local_kv
        self.backend = config.attn_backend
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.q_norm = _head_norm(config, qk_norm)
        if local_kv:
            d_kv = config.n_kv_heads * config.d_head
            self.k_proj = nn.Linear(config.d_model, d_kv, bias=False)
            self.v_proj = nn.Linear(config.d_model, d_kv, bias=False)
            self.k_norm = _head_norm(config, qk_norm)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self,
        x_BND: Tensor,
        rope: Rope,
        global_kv: KeysValues | None,
        mask_B1NM: Tensor | None,
        append: Append | None,
    ) -> Tensor:
        """Returns (B, N, D); ``append`` puts the Local source behind what a cache holds of it."""
        x_BND = to_autocast(x_BND)
        k_global, v_global = global_kv or (None, None)
        k_local = v_local = None
        if self.local_kv:
            k_local, v_local = keys_values(self, x_BND, rope)
            if append is not None:
                k_local, v_local = append(k_local, v_local)
        q_BHNd = split_heads(self.q_proj(x_BND), self.d_head)
        q_BHNd = rotate_heads(q_BHNd, rope, self.q_norm)
        a_BHNd = joint_attention(
            q_BHNd,
            k_global,
            v_global,
            k_local,
            v_local,
            mask=mask_B1NM,
            backend=self.backend,
        )
        return self.o_proj(a_BHNd.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, config: AsymLoopConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) to (B, N, D)."""
        x_BND = to_autocast(x_BND)
        return self.down_proj(F.silu(self.gate_proj(x_BND)) * self.up_proj(x_BND))


class Block(nn.Module):
    """A pre-norm layer, of the encoder or of the decoder: attention, then SwiGLU or experts of it."""

    def __init__(self, config: AsymLoopConfig, local_kv: bool, qk_norm: bool):
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.attn = Attention(config, local_kv, qk_norm)
        self.ffn_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        experts = (SwiGLU(config) for _ in range(config.n_experts))
        self.ffn = MixtureOfExperts(config, experts) if config.n_experts else SwiGLU(config)

    def forward(
        self,
        x_BND: Tensor,
        rope: Rope,
        global_kv: KeysValues | None = None,
        mask_B1NM: Tensor | None = None,
        append: Append | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, D) to (B, N, D), and the logits of the layer's router, if it has one."""
        x_BND = x_BND + self.attn(self.attn_norm(x_BND), rope, global_kv, mask_B1NM, append)
        y_BND = self.ffn(self.ffn_norm(x_BND))
        y_BND, router_logits = y_BND if isinstance(y_BND, tuple) else (y_BND, None)
        return x_BND + y_BND, router_logits


class AsymLoopPreTrainedModel(PreTrainedModel):
    """Initialisation, and what FSDP and activation checkpointing need to know of the family."""

    config_class = AsymLoopConfig
    base_model_prefix = 'model'
    supports_gradient_checkpointing = True
    _supports_cache_class = True  # transformers 4 refuses a cache in `generate` otherwise
    _no_split_modules = ['Block', 'GlobalKV']  # noqa: RUF012 (as the base class declares it)

    def _init_weights(self, module: nn.Module) -> None:
        """Every matrix from N(0, init_std), truncated if asked; every norm 1 (no depth scaling)."""
        std, cutoff = self.config.init_std, self.config.init_cutoff
        if isinstance(module, (nn.Linear, nn.Embedding)):
            if cutoff is None:
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.trunc_normal_(module.weight, std=std, a=-cutoff * std, b=cutoff * std)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def param_init_fn(self, module: nn.Module) -> None:
        """Initialises a module that Composer built on the meta device."""
        self._init_weights(module)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """The units that FSDP shards: each layer, and each layer's Global projections."""
        return isinstance(module, (Block, GlobalKV))

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        """The unit that is recomputed in the backward pass: a layer call."""
        return isinstance(module, Block)


class AsymLoopModel(AsymLoopPreTrainedModel):
    """Embedding, encoder, Global projections, looped decoder and final norm."""

    def __init__(self, config: AsymLoopConfig):
        super().__init__(config)
        decoder_norm = config.qk_norm != 'none'
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = nn.ModuleList(
            Block(config, local_kv=True, qk_norm=config.qk_norm == 'all')
            for _ in range(config.n_encoder_layers)
        )
        self.global_kv = nn.ModuleList(
            GlobalKV(config) for _ in range(config.n_decoder_layers if config.global_kv else 0)
        )
        self.decoder = nn.ModuleList(
            Block(config, local_kv=config.local_kv, qk_norm=decoder_norm)
            for _ in range(config.n_decoder_layers)
        )
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.gradient_checkpointing = config.activation_checkpointing
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the token embedding."""
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_iterations: int | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Runs the encoder once and the decoder K times.

        Args:
            input_ids: (B, N) token ids.
            attention_mask: (B, M), 0 for padding; needed only where padding is not on the right.
            position_ids: (B, N) rotary positions; by default they count what the mask shows.
            past_key_values: keys and values of earlier positions.
            inputs_embeds: (B, N, D) instead of ``input_ids``.
            use_cache: return keys and values; by default the configuration's choice outside training.
            num_iterations: K, where it should differ from the configuration's.
            cache: the name of ``past_key_values`` in transformers 5.
            **kwargs: ignored arguments of transformers' generation loop.

        Returns:
            The normalised last state, (B, N, D), the cache, and the router logits of each layer call.

        Raises:
            ValueError: ``num_iterations`` cannot be run, or the cache was filled with another K.
        """
        config = self.config
        K = config.check_iterations(
            config.num_iterations if num_iterations is None else num_iterations
        )
        x_BND = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        use_cache = config.use_cache and not self.training if use_cache is None else use_cache
        cache = choose_cache(past_key_values if cache is None else cache, use_cache, recompute)
        slots = CacheSlots(config, K, cache)

        mask_B1NM = visible_keys(attention_mask, x_BND.shape[1], slots.n_past, x_BND.device)
        if position_ids is None:
            position_ids = positions(attention_mask, x_BND.shape[1], slots.n_past, x_BND.device)
        rope = rope_table(position_ids, config.d_head, config.rope_theta)
        router_logits: list[Tensor] = []

        def run(
            layer: nn.Module, x: Tensor, kv: KeysValues | None, append: Append | None
        ) -> Tensor:
            if recompute:
                x, logits = checkpoint(layer, x, rope, kv, mask_B1NM, use_reentrant=False)
            else:
                x, logits = layer(x, rope, kv, mask_B1NM, append)
            if logits is not None:
                router_logits.append(logits)
            return x

        for e, layer in enumerate(self.encoder):
            x_BND = run(layer, x_BND, None, slots.encoder(e))
        h_BND = x_BND  # H_E

        global_kvs: list[KeysValues | None] = [None] * config.n_decoder_layers
        for i, project in enumerate(self.global_kv):
            append = slots.global_kv(i)
            kv = project(h_BND, rope)
            global_kvs[i] = kv if append is None else append(*kv)

        for t in range(K if self.decoder else 0):
            if config.input_injection == 'additive' and t > 0:
                x_BND = x_BND + h_BND  # at t = 0 the state is zero: z_1 = D(0 + H_E)
            for i, layer in enumerate(self.decoder):
                x_BND = run(layer, x_BND, global_kvs[i], slots.local(t, i))
        return MoeModelOutputWithPast(
            last_hidden_state=self.norm(x_BND),
            router_logits=tuple(router_logits) or None,
            **{CACHE: cache if use_cache else None},
        )


class AsymLoopForCausalLM(AsymLoopPreTrainedModel, GenerationMixin):
    """The family with its untied head: next-token logits, loss and generation."""

    def __init__(self, config: AsymLoopConfig):
        super().__init__(config)
        self.model = AsymLoopModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replaces the head."""
        self.lm_head = value

    def get_decoder(self) -> AsymLoopModel:
        """The model below the head."""
        return self.model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_iterations: int | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> AsymLoopOutput:
        """Logits of the last iteration and, given labels, the mean next-token cross-entropy.

        Args:
            input_ids: (B, N) token ids.
            attention_mask: (B, M), 0 for padding.
            position_ids: (B, N) rotary positions.
            past_key_values: keys and values of earlier positions.
            inputs_embeds: (B, N, D) instead of ``input_ids``.
            labels: (B, N), the ids of these same positions (the shift is done here); -100 is not scored.
                In training mode the losses of the experts' routers are added.
            use_cache: return keys and values.
            num_iterations: K, where it should differ from the configuration's.
            logits_to_keep: only the logits of the last so many positions, or of these; 0 keeps all.
            return_logits: whether (B, N, V) is made; by default not in training with labels, where the
                loss never holds it.
            cache: the name of ``past_key_values`` in transformers 5.
            **kwargs: passed to the model.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_iterations=num_iterations,
            **kwargs,
        )
        x_BND = output.last_hidden_state
        loss = logits = parts = None
        if labels is not None:
            loss = linear_cross_entropy(x_BND, self.lm_head.weight, labels)
            if self.training and output.router_logits is not None:
                parts = router_losses(self.config, output.router_logits, input_ids, attention_mask)
                loss = loss + parts.weighted(self.config)
        if return_logits is None:
            return_logits = labels is None or not self.training
        if return_logits:
            if isinstance(logits_to_keep, int):
                x_BND = x_BND[:, -logits_to_keep:]
            else:
                x_BND = x_BND[:, logits_to_keep]
            logits = self.lm_head(x_BND)
        return AsymLoopOutput(
            loss=loss, logits=logits, router_losses=parts, **{CACHE: output.get(CACHE)}
        )


# What is saved carries this code, also when it was itself loaded from such a folder.
AsymLoopConfig.register_for_auto_class()
AsymLoopForCausalLM.register_for_auto_class('AutoModelForCausalLM')
