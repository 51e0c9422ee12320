# SPDX-License-Identifier: Apache-2.0
"""Scores 11 continuations on however many ranks there are, and has rank 0 write them: argument 1."""

import json
import sys
from pathlib import Path

import torch
from composer.utils import dist, get_device
from lm_eval.api.instance import Instance
from transformers import AutoTokenizer

from asymloop_foundry.evaluation.scorer import ContinuationScorer
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

if __name__ == '__main__':
    dist.initialize_dist(get_device('cpu'), timeout=60)
    torch.manual_seed(0)
    config = AsymLoopConfig(
        vocab_size=32128, d_model=16, n_heads=2, d_ff=24, n_encoder_layers=1, n_decoder_layers=1
    )
    scorer = ContinuationScorer(
        AsymLoopForCausalLM(config).eval(), AutoTokenizer.from_pretrained(sys.argv[2]), 2
    )
    calls = []
    scorer.model.register_forward_hook(lambda *_: calls.append(1))
    requests = [
        Instance('loglikelihood', {}, ('Once there was', ' a fox' * (1 + i % 4) + f' {i}'), i)
        for i in range(11)
    ]
    scores = scorer.loglikelihood(requests, disable_tqdm=True)
    n_calls = len(calls)
    # The same on this rank alone, one at a time.
    alone = [
        scorer._loglikelihood_tokens([('', *scorer._encode_pair(*request.args))])[0]
        for request in requests
    ]
    everywhere = dist.all_gather_object((scores, n_calls, alone))
    if dist.get_global_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everywhere))
