# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that add nothing to a text."""

import json

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ['adds_special_tokens', 'without_special_tokens']

_PROBE = 'a'


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``tokenizer(text)`` has a token more than the text, as T5's ``</s>``."""
    return (
        tokenizer(_PROBE)['input_ids'] != tokenizer(_PROBE, add_special_tokens=False)['input_ids']
    )


def without_special_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer, so that a text gives its own tokens and no others.

    lm-eval calls ``tokenizer.encode`` as the tokenizer's author meant it unless it is told otherwise;
    T5's then closes each context with ``</s>``, and the continuation, cut off at the context's length,
    loses its first token. A folder that holds this tokenizer has no such trap whatever the caller
    passes. Training loses nothing: data preparation puts its own EOS.

    The class is the generic one, which takes ``tokenizer.json`` as it is: T5's own class puts the
    template back in transformers 5.

    Args:
        tokenizer: any tokenizer; one that already adds nothing is returned as it is.

    Raises:
        ValueError: the tokenizer adds special tokens and has no ``tokenizer.json`` form.
    """
    if not adds_special_tokens(tokenizer):
        return tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f'the tokenizer {tokenizer.name_or_path!r} adds special tokens to each text and has no '
            'tokenizer.json; load it with use_fast=True.'
        )
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend['post_processor'] = None
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        name_or_path=tokenizer.name_or_path,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        model_input_names=['input_ids', 'attention_mask'],
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )
    return plain
