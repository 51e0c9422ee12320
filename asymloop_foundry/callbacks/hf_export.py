# SPDX-License-Identifier: Apache-2.0
"""Folders for ``AutoModelForCausalLM``, written during training."""

from llmfoundry.callbacks.hf_checkpointer import HuggingFaceCheckpointer
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from asymloop_foundry.export import portable, portable_tokenizer

__all__ = ['HFExport']


class HFExport(HuggingFaceCheckpointer):
    """Foundry's ``hf_checkpointer`` with its arguments, for this family.

    Foundry's own writes our code files too. This one also gives the folder what
    :func:`asymloop_foundry.export.export` gives it: a configuration without the training machine's
    attention kernel and recomputation, and a tokenizer that adds nothing to a text.
    """

    def transform_config(self, original_config: PretrainedConfig) -> PretrainedConfig:
        """A copy that runs on any machine."""
        return portable(original_config)

    def transform_model_and_tokenizer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The tokenizer without a template of special tokens, for models that take ids and a mask."""
        return model, portable_tokenizer(tokenizer)
