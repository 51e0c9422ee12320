# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from asymloop_foundry.evaluation.scorer import ContinuationScorer
from asymloop_foundry.evaluation.tokenizers import without_special_tokens

PAIRS = [
    ('The dog', ' the cat sat'),
    ('Question: Why does ice float on water?\nAnswer:', ' Because it is less dense'),
    ('Question: Why does ice float on water?\nAnswer:', ' It does not'),
    ('Question: Why does ice float on water?\nAnswer:', ' yes'),
    ('A.', ' B'),
    ('one two three four five six seven eight nine ten ' * 4, ' eleven'),
    ('x', ' a much longer continuation than its context, with punctuation; and so on'),
]


def requests():
    return [
        Instance(request_type='loglikelihood', doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(PAIRS)
    ]


@pytest.fixture(scope='module')
def literal(t5_model, t5_tokenizer):
    """Each pair alone, by the chain rule over T5's own pieces."""
    found = []
    for context, continuation in PAIRS:
        ids = t5_tokenizer(context + continuation, add_special_tokens=False)['input_ids']
        n_context = len(t5_tokenizer(context, add_special_tokens=False)['input_ids'])
        with torch.no_grad():
            logits = t5_model(torch.tensor([ids])).logits[0].double()
        total = 0.0
        for position in range(n_context, len(ids)):
            row = logits[position - 1]
            total += float(row[ids[position]] - torch.logsumexp(row, dim=0))
        found.append(total)
    return found


@pytest.mark.parametrize('batch_size', [1, 4, 16])
def test_scores_are_the_chain_rule_whatever_the_batch_size(
    t5_model, t5_tokenizer, literal, batch_size
):
    scorer = ContinuationScorer(t5_model, t5_tokenizer, batch_size)
    scores = [score for score, _ in scorer.loglikelihood(requests(), disable_tqdm=True)]
    assert scores == pytest.approx(literal, abs=1e-4)


def test_greedy_says_whether_argmax_gives_the_continuation(t5_model, t5_tokenizer):
    context = t5_tokenizer('The dog', add_special_tokens=False)['input_ids']
    with torch.no_grad():
        best = int(t5_model(torch.tensor([context])).logits[0, -1].argmax())
    scorer = ContinuationScorer(t5_model, t5_tokenizer, 2)
    found = scorer._loglikelihood_tokens([('', context, [best]), ('', context, [best - 1])])
    assert [greedy for _, greedy in found] == [True, False]


def test_a_continuation_keeps_its_first_piece_and_gains_no_eos(t5_model, t5_tokenizer):
    scorer = ContinuationScorer(t5_model, t5_tokenizer, 1)
    context, continuation = scorer._encode_pair('The dog', ' the cat sat')
    assert t5_tokenizer.convert_ids_to_tokens(continuation) == ['▁the', '▁cat', '▁', 's', 'at']
    assert t5_tokenizer.decode(continuation) == 'the cat sat'
    assert 1 not in context + continuation


def test_an_eos_that_gets_into_a_text_is_an_error(t5_model, t5_tokenizer):
    scorer = ContinuationScorer(t5_model, t5_tokenizer, 1)
    with pytest.raises(ValueError, match='EOS token'):
        scorer._encode_pair('The dog </s>', ' sat')


def test_lm_evals_own_class_is_right_with_our_tokenizer_and_its_defaults(
    t5_model, t5_tokenizer, literal
):
    own = HFLM(
        pretrained=t5_model,
        tokenizer=without_special_tokens(t5_tokenizer),
        backend='causal',
        batch_size=3,
    )
    assert own.add_bos_token is None
    scores = [score for score, _ in own.loglikelihood(requests(), disable_tqdm=True)]
    assert scores == pytest.approx(literal, abs=1e-4)


def test_lm_evals_own_class_is_wrong_with_t5s_tokenizer(t5_model, t5_tokenizer, literal):
    """The trap itself: when lm-eval closes it, the workaround can go."""
    trapped = HFLM(pretrained=t5_model, tokenizer=t5_tokenizer, backend='causal', batch_size=3)
    scores = [score for score, _ in trapped.loglikelihood(requests(), disable_tqdm=True)]
    assert all(abs(a - b) > 1e-2 for a, b in zip(scores, literal, strict=True))


def test_a_prompt_longer_than_the_context_loses_its_beginning(t5_model, t5_tokenizer):
    scorer = ContinuationScorer(t5_model, t5_tokenizer, 2, max_length=6)
    long, short = list(range(100, 120)), list(range(115, 120))
    scores = scorer._loglikelihood_tokens([('', long, [7, 8]), ('', short, [7, 8])])
    assert scores[0] == pytest.approx(scores[1])
    assert scorer.n_truncated == 1
    with pytest.raises(ValueError, match='--max-length'):
        scorer._loglikelihood_tokens([('', short, list(range(7, 20)))])


def test_two_ranks_share_the_work_and_both_get_every_score(t5_tokenizer_dir, tmp_path):
    out = tmp_path / 'scores.json'
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    command += ['--nproc_per_node', '2', str(Path(__file__).with_name('scoring_on_ranks.py'))]
    done = subprocess.run(
        [*command, str(out), str(t5_tokenizer_dir)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (first, n_first, alone), (second, n_second, _) = json.loads(out.read_text())
    assert first == second
    assert [score for score, _ in first] == pytest.approx([score for score, _ in alone], abs=1e-4)
    # Under FSDP a forward pass is a collective: the ranks must make as many, and half of all.
    assert n_first == n_second == 3
