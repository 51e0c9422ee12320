# SPDX-License-Identifier: Apache-2.0
"""One configuration for the whole family: Dense, Full Loop, AsymLoop and every ablation."""

import inspect
from typing import Any

from transformers import PretrainedConfig

QK_NORM = ('none', 'decoder', 'all')
INPUT_INJECTION = ('none', 'additive')
ATTENTION_BACKENDS = ('auto', 'cpu_flash', 'cuda_flash', 'flash_attn', 'efficient', 'reference')


class AsymLoopConfig(PretrainedConfig):
    """Where a model stands in the family of looped Transformers (paper, section 3).

    ========================  =====  =====  =====  =============  ============
    system                    E      D      K      ``global_kv``  ``local_kv``
    ========================  =====  =====  =====  =============  ============
    Dense                     L      0      1      -              -
    Full Loop                 0      L      2, 3   False          True
    AsymLoop                  L/2    L/2    1-5    True           True
    without Global KV         L/2    L/2    K      False          True
    without Local KV          L/2    L/2    K      True           False
    ========================  =====  =====  =====  =============  ============

    Args:
        vocab_size: V, rows of the embedding and of the head. T5 wants 32,128 for its 32,100 tokens.
        d_model: d, width of the residual stream.
        n_heads: attention heads; the head width d / n_heads must be even (RoPE rotates pairs).
        n_kv_heads: heads of keys and values when fewer than ``n_heads`` (grouped queries).
        d_ff: m, inner width of SwiGLU; of each expert where there are experts.
        n_encoder_layers: E, layers that run once.
        n_decoder_layers: D, layers that are iterated.
        num_iterations: K, how many times the decoder runs.
        global_kv: whether decoder layers attend to keys and values made from the encoder's output.
        local_kv: whether decoder layers attend to keys and values made from their own input.
        qk_norm: RMSNorm over each head of queries and keys: in no layer (``none``), in the decoder
            and the Global keys (``decoder``), or in the encoder too (``all``).
        input_injection: ``additive`` gives each iteration the previous state plus the encoder's
            output, starting from zero (Table 7); ``none`` gives it the previous state.
        max_seq_len: N, the longest sequence that the model is meant for.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of every RMSNorm.
        init_std: standard deviation of every initial matrix.
        init_cutoff: truncate that normal distribution at this many deviations; ``None`` does not.
        n_experts: SwiGLU experts in place of each feed-forward part; 0 for one dense SwiGLU.
        expert_top_k: experts of each token.
        normalize_expert_weights: divide the weights of a token's experts by their sum.
        load_balancing_coef: share of the load-balancing loss in the training loss.
        router_z_coef: share of the router z-loss in the training loss.
        attn_backend: ``auto`` or one of the back ends of ``joint_attention``.
        activation_checkpointing: recompute each layer call in the backward pass.
        use_cache: whether ``generate`` keeps keys and values.
        pad_token_id: id that fills short rows.
        eos_token_id: id that ends a document.
        **kwargs: passed on to ``transformers.PretrainedConfig``.

    Raises:
        ValueError: a value is out of range, contradicts another, or could have no effect.
    """

    model_type = 'asymloop'
    keys_to_ignore_at_inference = ('past_key_values', 'cache')
    attribute_map = {  # noqa: RUF012 (a plain dictionary is what the base class reads)
        'hidden_size': 'd_model',
        'num_attention_heads': 'n_heads',
        'num_key_value_heads': 'n_kv_heads',
        'intermediate_size': 'd_ff',
        'max_position_embeddings': 'max_seq_len',
        'initializer_range': 'init_std',
        'rms_norm_eps': 'norm_eps',
    }

    def __init__(
        self,
        vocab_size: int = 32128,
        d_model: int = 768,
        n_heads: int = 12,
        n_kv_heads: int | None = None,
        d_ff: int = 2048,
        n_encoder_layers: int = 6,
        n_decoder_layers: int = 6,
        num_iterations: int = 3,
        global_kv: bool = True,
        local_kv: bool = True,
        qk_norm: str = 'none',
        input_injection: str = 'none',
        max_seq_len: int = 1024,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
        init_cutoff: float | None = None,
        n_experts: int = 0,
        expert_top_k: int = 2,
        normalize_expert_weights: bool = False,
        load_balancing_coef: float = 0.01,
        router_z_coef: float = 0.001,
        attn_backend: str = 'auto',
        activation_checkpointing: bool = False,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        eos_token_id: int | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.d_ff = d_ff
        self.n_encoder_layers = n_encoder_layers
        self.n_decoder_layers = n_decoder_layers
        self.num_iterations = num_iterations
        self.global_kv = global_kv
        self.local_kv = local_kv
        self.qk_norm = qk_norm
        self.input_injection = input_injection
        self.max_seq_len = max_seq_len
        self.rope_theta = rope_theta
        self.norm_eps = norm_eps
        self.init_std = init_std
        self.init_cutoff = init_cutoff
        self.n_experts = n_experts
        self.expert_top_k = expert_top_k
        self.normalize_expert_weights = normalize_expert_weights
        self.load_balancing_coef = load_balancing_coef
        self.router_z_coef = router_z_coef
        self.attn_backend = attn_backend
        self.activation_checkpointing = activation_checkpointing
        self.use_cache = use_cache
        kwargs.setdefault('tie_word_embeddings', False)
        super().__init__(pad_token_id=pad_token_id, eos_token_id=eos_token_id, **kwargs)
        self._validate()

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def effective_depth(self) -> int:
        """J = E + K D, the number of layers executed in one forward pass."""
        return self.n_encoder_layers + self.num_iterations * self.n_decoder_layers

    @property
    def num_hidden_layers(self) -> int:
        """L = E + D, the number of layers that have parameters."""
        return self.n_encoder_layers + self.n_decoder_layers

    @classmethod
    def field_names(cls) -> frozenset[str]:
        """Names of the family's own fields: what a YAML may set."""
        parameters = inspect.signature(cls.__init__).parameters
        return frozenset(parameters) - {'self', 'kwargs'}

    def check_iterations(self, num_iterations: Any) -> int:
        """Returns K if this model can run that many iterations.

        Raises:
            ValueError: K is no integer of at least 1, or there is no decoder to iterate.
        """
        if not _is_int(num_iterations) or num_iterations < 1:
            raise ValueError(
                f'num_iterations={num_iterations!r}: the decoder runs a whole number of times, at '
                'least once; give num_iterations >= 1.'
            )
        if self.n_decoder_layers == 0 and num_iterations != 1:
            raise ValueError(
                f'num_iterations={num_iterations} has no effect with n_decoder_layers=0; set '
                'num_iterations=1, or give the decoder layers.'
            )
        return num_iterations

    def _validate(self) -> None:
        for key in ('vocab_size', 'd_model', 'n_heads', 'n_kv_heads', 'd_ff', 'max_seq_len'):
            value = getattr(self, key)
            if not _is_int(value) or value < 1:
                raise ValueError(f'{key}={value!r} must be a positive integer.')
        for key in ('n_encoder_layers', 'n_decoder_layers', 'n_experts'):
            value = getattr(self, key)
            if not _is_int(value) or value < 0:
                raise ValueError(f'{key}={value!r} must be an integer of at least 0.')
        for key in (
            'global_kv',
            'local_kv',
            'normalize_expert_weights',
            'activation_checkpointing',
        ):
            value = getattr(self, key)
            if not isinstance(value, bool):
                raise ValueError(f'{key}={value!r} must be true or false.')
        for key in ('rope_theta', 'norm_eps', 'init_std'):
            value = getattr(self, key)
            if not _is_number(value) or not 0 < value < float('inf'):
                raise ValueError(f'{key}={value!r} must be a positive number.')
        if self.init_cutoff is not None and not (
            _is_number(self.init_cutoff) and self.init_cutoff > 0
        ):
            raise ValueError(
                f'init_cutoff={self.init_cutoff!r} must be a positive number of standard '
                'deviations, or null for no truncation.'
            )
        for key, choices in (
            ('qk_norm', QK_NORM),
            ('input_injection', INPUT_INJECTION),
            ('attn_backend', ATTENTION_BACKENDS),
        ):
            value = getattr(self, key)
            if value not in choices:
                raise ValueError(f'{key}={value!r} must be one of {", ".join(choices)}.')
        self._validate_heads()
        self._validate_topology()
        self._validate_experts()

    def _validate_heads(self) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(
                f'd_model={self.d_model} is not divisible by n_heads={self.n_heads}; choose '
                'n_heads that divides d_model.'
            )
        if self.d_head % 2:
            raise ValueError(
                f'd_model={self.d_model} with n_heads={self.n_heads} gives the odd head width '
                f'{self.d_head}; RoPE rotates pairs, so choose n_heads that gives an even width.'
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f'n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}; choose '
                'n_kv_heads that divides n_heads.'
            )

    def _validate_topology(self) -> None:
        if self.n_encoder_layers + self.n_decoder_layers == 0:
            raise ValueError(
                'n_encoder_layers=0 and n_decoder_layers=0 leave no layer; give at least one of '
                'them a positive number.'
            )
        self.check_iterations(self.num_iterations)
        if self.n_decoder_layers == 0:
            for key, idle in (
                ('global_kv', False),
                ('local_kv', False),
                ('qk_norm', 'decoder'),
                ('input_injection', 'additive'),
            ):
                if getattr(self, key) == idle:
                    raise ValueError(
                        f'{key}={idle!r} has no effect with n_decoder_layers=0; leave {key} out, '
                        'or give the decoder layers.'
                    )
        if not self.global_kv and not self.local_kv:
            raise ValueError(
                'global_kv=False and local_kv=False leave the decoder nothing to attend to; set '
                'at least one of them to true.'
            )
        if self.tie_word_embeddings:
            raise ValueError(
                'tie_word_embeddings=True: the family has an untied head; leave the key out.'
            )

    def _validate_experts(self) -> None:
        if not _is_int(self.expert_top_k) or self.expert_top_k < 1:
            raise ValueError(f'expert_top_k={self.expert_top_k!r} must be a positive integer.')
        for key in ('load_balancing_coef', 'router_z_coef'):
            value = getattr(self, key)
            if not _is_number(value) or not 0 <= value < float('inf'):
                raise ValueError(f'{key}={value!r} must be a number of at least 0.')
        if self.n_experts == 0:
            parameters = inspect.signature(AsymLoopConfig.__init__).parameters
            for key in (
                'expert_top_k',
                'normalize_expert_weights',
                'load_balancing_coef',
                'router_z_coef',
            ):
                if getattr(self, key) != parameters[key].default:
                    raise ValueError(
                        f'{key}={getattr(self, key)!r} has no effect with n_experts=0; leave {key} '
                        'out, or set n_experts.'
                    )
            return
        if self.n_experts == 1:
            raise ValueError(
                'n_experts=1 is one dense SwiGLU with a router that has no choice; leave n_experts '
                'out, or give at least 2.'
            )
        if self.expert_top_k > self.n_experts:
            raise ValueError(
                f'expert_top_k={self.expert_top_k} is more than n_experts={self.n_experts}; choose '
                'expert_top_k of at most n_experts.'
            )
        if self.normalize_expert_weights and self.expert_top_k == 1:
            raise ValueError(
                'normalize_expert_weights=True with expert_top_k=1 makes every weight 1, so that '
                'the cross-entropy never reaches the router; set normalize_expert_weights=False.'
            )
        if self.normalize_expert_weights and self.expert_top_k == self.n_experts:
            raise ValueError(
                f'normalize_expert_weights=True has no effect with expert_top_k={self.expert_top_k} '
                f'of n_experts={self.n_experts}: their weights sum to 1; leave it out.'
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
