# SPDX-License-Identifier: Apache-2.0
"""Exact arithmetic of the family: FLOPs, parameters and bytes of cache, from a configuration alone.

One multiply-accumulate is two FLOPs, and only matrix products are counted, as in the paper (appendices
11 and 12). Symbols: B batch, N positions, d width, m SwiGLU width, V vocabulary, E encoder layers,
D decoder layers, K iterations.
"""

from dataclasses import dataclass

from .configuration_asymloop import AsymLoopConfig

__all__ = [
    'ForwardFlops',
    'active_parameter_count',
    'forward_breakdown',
    'forward_flops',
    'kv_cache_bytes',
    'parameter_count',
    'training_flops',
]


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass, split by what the backward pass does with each part.

    Attributes:
        layer_products: products with the weights of encoder and decoder layers, all K iterations.
        down_products: the share of ``layer_products`` in the last product of each layer call.
        own_attention: scores and weighted sums over a layer's own keys (Local, or the encoder's).
        global_attention: the same over the Global keys.
        global_projections: Global keys and values from the encoder's output, once whatever K is.
        head: logits of every position.
    """

    layer_products: int
    down_products: int
    own_attention: int
    global_attention: int
    global_projections: int
    head: int

    @property
    def attention(self) -> int:
        """FLOPs of all scores and weighted sums."""
        return self.own_attention + self.global_attention

    @property
    def total(self) -> int:
        """FLOPs of the whole forward pass."""
        return self.layer_products + self.attention + self.global_projections + self.head


def forward_breakdown(
    config: AsymLoopConfig,
    batch: int,
    seq_len: int,
    num_iterations: int | None = None,
    causal: bool = False,
) -> ForwardFlops:
    """FLOPs of one forward pass over ``batch`` rows of ``seq_len`` positions, part by part.

    Args:
        config: the model.
        batch: B, rows.
        seq_len: N, positions of each row.
        num_iterations: K, the configuration's own when ``None``.
        causal: count the N (N + 1) / 2 pairs that a causal kernel needs, instead of the N x N pairs of
            full attention matrices that the paper counts.

    Raises:
        ValueError: the model cannot run ``num_iterations`` iterations.
    """
    k = _iterations(config, num_iterations)
    tokens = batch * seq_len
    pairs = batch * (seq_len * (seq_len + 1) // 2 if causal else seq_len**2)
    encoder_calls = config.n_encoder_layers
    decoder_calls = k * config.n_decoder_layers
    calls = encoder_calls + decoder_calls
    layer_weights = (
        encoder_calls * _attention_weights(config, own_keys=True)
        + decoder_calls * _attention_weights(config, own_keys=config.local_kv)
        + calls * (_experts_per_token(config) * _ffn_weights(config) + _router_weights(config))
    )
    down_weights = calls * _experts_per_token(config) * config.d_model * config.d_ff
    own_calls = encoder_calls + (decoder_calls if config.local_kv else 0)
    global_calls = decoder_calls if config.global_kv else 0
    return ForwardFlops(
        layer_products=2 * tokens * layer_weights,
        down_products=2 * tokens * down_weights,
        own_attention=4 * pairs * config.d_model * own_calls,
        global_attention=4 * pairs * config.d_model * global_calls,
        global_projections=2 * tokens * _global_weights(config),
        head=2 * tokens * config.d_model * config.vocab_size,
    )


def forward_flops(
    config: AsymLoopConfig,
    batch: int,
    seq_len: int,
    num_iterations: int | None = None,
    causal: bool = False,
) -> int:
    """FLOPs of one forward pass; the arguments are those of :func:`forward_breakdown`.

    With full attention matrices this is Table 9's count (appendix 11): C(m) = 8 d^2 + 6 d m + 4 N d
    for a token in a layer call, 2 d V for the head, 4 D d^2 for the Global projections, 4 K D N d for
    attention to the Global keys.
    """
    return forward_breakdown(config, batch, seq_len, num_iterations, causal).total


def training_flops(
    config: AsymLoopConfig,
    batch: int,
    seq_len: int,
    num_iterations: int | None = None,
    causal: bool = False,
    recompute: bool = False,
) -> int:
    """FLOPs of one forward and backward pass over ``batch`` rows of ``seq_len`` positions.

    A product with weights costs twice its forward again in the backward pass. Attention costs 2.5
    times, since a flash kernel rebuilds the scores: five products where the forward pass has two.

    Args:
        config: the model.
        batch: B, rows.
        seq_len: N, positions of each row.
        num_iterations: K, the configuration's own when ``None``.
        causal: count only the pairs that a causal kernel needs.
        recompute: add the second forward pass of activation checkpointing, which runs each layer call
            until everything is there that its backward pass needs: up to the input of its last product,
            or with experts all of it, since the gates' gradients need the experts' outputs. Head and
            Global projections lie outside. With full attention matrices this is Table 11's count.

    Raises:
        ValueError: the model cannot run ``num_iterations`` iterations.
    """
    forward = forward_breakdown(config, batch, seq_len, num_iterations, causal)
    products = forward.layer_products + forward.global_projections + forward.head
    flops = 3 * products + 7 * forward.attention // 2
    if recompute:
        flops += forward.layer_products + forward.attention
        if config.n_experts == 0:
            flops -= forward.down_products
    return flops


def parameter_count(config: AsymLoopConfig) -> int:
    """Number of parameters: embedding, head, layers, Global projections and every norm."""
    return _parameters(config, config.n_experts or 1)


def active_parameter_count(config: AsymLoopConfig) -> int:
    """Number of parameters that one token uses.

    Table 14's rule: of each layer's experts the top-k count, whatever K is, because iterations share
    experts and routers. Equal to :func:`parameter_count` without experts.
    """
    return _parameters(config, _experts_per_token(config))


def kv_cache_bytes(
    config: AsymLoopConfig, num_iterations: int | None = None, bytes_per_element: int = 2
) -> int:
    """Bytes that one token adds to the generation cache of one sequence.

    Keys and values of E encoder layers, of D Global slots whatever K is, and of K x D Local slots.

    Args:
        config: the model.
        num_iterations: K, the configuration's own when ``None``.
        bytes_per_element: 2 for bf16 and fp16, 4 for fp32.

    Raises:
        ValueError: the model cannot run ``num_iterations`` iterations.
    """
    k = _iterations(config, num_iterations)
    slots = config.n_encoder_layers
    slots += config.n_decoder_layers if config.global_kv else 0
    slots += k * config.n_decoder_layers if config.local_kv else 0
    return 2 * slots * _kv_width(config) * bytes_per_element


def _iterations(config: AsymLoopConfig, num_iterations: int | None) -> int:
    return config.check_iterations(
        config.num_iterations if num_iterations is None else num_iterations
    )


def _parameters(config: AsymLoopConfig, experts_counted: int) -> int:
    d, e, d_layers = config.d_model, config.n_encoder_layers, config.n_decoder_layers
    layers = e + d_layers
    return (
        2 * config.vocab_size * d
        + (2 * layers + 1) * d
        + e * _attention_weights(config, own_keys=True)
        + d_layers * _attention_weights(config, own_keys=config.local_kv)
        + layers * (experts_counted * _ffn_weights(config) + _router_weights(config))
        + _global_weights(config)
        + _qk_norm_weights(config)
    )


def _kv_width(config: AsymLoopConfig) -> int:
    return config.n_kv_heads * config.d_head


def _attention_weights(config: AsymLoopConfig, own_keys: bool) -> int:
    keys_and_values = 2 * config.d_model * _kv_width(config) if own_keys else 0
    return 2 * config.d_model**2 + keys_and_values


def _ffn_weights(config: AsymLoopConfig) -> int:
    return 3 * config.d_model * config.d_ff


def _global_weights(config: AsymLoopConfig) -> int:
    if not config.global_kv:
        return 0
    return config.n_decoder_layers * 2 * config.d_model * _kv_width(config)


def _qk_norm_weights(config: AsymLoopConfig) -> int:
    """One weight per element of a head: for queries, for own keys, and for Global keys."""
    encoder = 2 if config.qk_norm == 'all' else 0
    decoder = 0 if config.qk_norm == 'none' else 1 + config.local_kv + config.global_kv
    return config.d_head * (config.n_encoder_layers * encoder + config.n_decoder_layers * decoder)


def _experts_per_token(config: AsymLoopConfig) -> int:
    return config.expert_top_k if config.n_experts else 1


def _router_weights(config: AsymLoopConfig) -> int:
    return config.d_model * config.n_experts
