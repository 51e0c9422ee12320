# SPDX-License-Identifier: Apache-2.0
"""The family as the ComposerModel that Foundry builds for ``model.name: asymloop_causal_lm``."""

import difflib
from collections.abc import Mapping, MutableMapping
from typing import Any

from composer.models import HuggingFaceModel
from llmfoundry.metrics import DEFAULT_CAUSAL_LM_EVAL_METRICS
from llmfoundry.utils.builders import build_metric
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from .configuration_asymloop import AsymLoopConfig
from .flops import training_flops
from .modeling_asymloop import AsymLoopForCausalLM

AutoConfig.register(AsymLoopConfig.model_type, AsymLoopConfig, exist_ok=True)
AutoModelForCausalLM.register(AsymLoopConfig, AsymLoopForCausalLM, exist_ok=True)


class ComposerAsymLoopCausalLM(HuggingFaceModel):
    """Any member of the family, with Foundry's validation and in-context metrics.

    Training never makes (B, N, V) logits, so there are no training metrics beyond the loss and, with
    experts, the two losses of the routers.

    Args:
        tokenizer: the run's tokenizer; its vocabulary must fit ``vocab_size``.
        init_device: where Foundry builds the model (``cpu``, ``meta`` or ``mixed``); read by Foundry.
        **model_config: fields of :class:`AsymLoopConfig`.

    Raises:
        ValueError: a key is unknown, a value is out of range, or the tokenizer does not fit.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        init_device: str = 'cpu',
        **model_config: Any,
    ):
        del init_device
        refuse_unknown_keys(model_config)
        if tokenizer is not None:
            model_config.setdefault('pad_token_id', tokenizer.pad_token_id)
            model_config.setdefault('eos_token_id', tokenizer.eos_token_id)
        config = AsymLoopConfig(**model_config)
        if tokenizer is not None:
            refuse_small_vocabulary(config.vocab_size, tokenizer)
        super().__init__(
            model=AsymLoopForCausalLM(config),
            tokenizer=tokenizer,
            use_logits=True,
            metrics=[],
            eval_metrics=[build_metric(name, {}) for name in DEFAULT_CAUSAL_LM_EVAL_METRICS],
            shift_labels=True,
        )

    def loss(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Any]
    ) -> Tensor | dict[str, Tensor]:
        """Mean next-token cross-entropy of the last iteration, over the targets that are no padding.

        With experts it is ``total``, to which the routers' losses are added with their coefficients;
        these are logged beside it, each before its coefficient.
        """
        router_losses = outputs.get('router_losses')
        if router_losses is None:
            return outputs['loss']
        return {'total': outputs['loss'], **router_losses._asdict()}

    def eval_forward(self, batch: MutableMapping[str, Any], outputs: Any = None) -> Any:
        """Logits in fp32, so that metrics are exact whatever the precision of the matrix products."""
        output = super().eval_forward(batch, outputs)
        return output.float() if isinstance(output, Tensor) else output

    def flops_per_batch(self, batch: Mapping[str, Any]) -> int:
        """Forward and backward FLOPs of a batch, all K iterations counted (for SpeedMonitor's MFU)."""
        n_rows, seq_len = batch['input_ids'].shape
        return training_flops(self.config, n_rows, seq_len)


def refuse_unknown_keys(model_config: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the nearest key, for a key that the family does not have."""
    for key, value in model_config.items():
        if key not in AsymLoopConfig.field_names():
            near = difflib.get_close_matches(key, AsymLoopConfig.field_names(), n=1)
            remedy = f'did you mean {near[0]}?' if near else 'remove it.'
            raise ValueError(
                f'model.{key}={value!r}: asymloop_causal_lm has no such key; {remedy} '
                f'Its keys are {", ".join(sorted(AsymLoopConfig.field_names()))}.'
            )


def refuse_small_vocabulary(vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError where the tokenizer can give an id that the embedding does not have."""
    if vocab_size < len(tokenizer):
        multiple = -(-len(tokenizer) // 128) * 128
        raise ValueError(
            f'model.vocab_size={vocab_size} is smaller than the tokenizer '
            f'{tokenizer.name_or_path!r}, which has {len(tokenizer)} tokens; set model.vocab_size '
            f'to at least that, for example {multiple} (the next multiple of 128).'
        )
