# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from asymloop_foundry.data.gsm8k import Gsm8kEncoder
from asymloop_foundry.evaluation.gsm8k import (
    answers_path,
    generate_greedily,
    read_test,
    report,
    score_gsm8k,
)
from asymloop_foundry.evaluation.tokenizers import without_special_tokens

NEW_TOKENS = 2


@pytest.fixture(scope='module')
def tokenizer(t5_tokenizer):
    return without_special_tokens(t5_tokenizer)


@pytest.fixture(scope='module')
def score(t5_model, tokenizer, data_dir):
    def run(out, model=t5_model):
        return score_gsm8k(
            model, tokenizer, out, data_dir / 'gsm8k', 128, NEW_TOKENS, progress=False
        )

    return run


@pytest.fixture(scope='module')
def finished(score, tmp_path_factory):
    out = tmp_path_factory.mktemp('gsm8k')
    return score(out), out


def by_question(out):
    answers = [json.loads(line) for line in answers_path(out).open(encoding='utf-8')]
    return sorted(answers, key=lambda answer: answer['question'])


def test_every_question_is_answered_once(finished):
    results, out = finished
    answers = by_question(out)
    assert [answer['question'] for answer in answers] == list(range(1319))
    assert results['n'] == 1319
    assert json.loads((out / 'gsm8k.json').read_text()) == results


def test_an_interrupted_run_ends_as_an_undisturbed_one(finished, score, tmp_path):
    results, out = finished
    lines = answers_path(out).read_bytes().splitlines(keepends=True)
    for name in ('gsm8k-settings.json',):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    # What a kill leaves: whole lines, and one that was being written.
    answers_path(tmp_path).write_bytes(b''.join(lines[:900]) + lines[900][:25])
    assert score(tmp_path) == results
    assert by_question(tmp_path) == by_question(out)


def test_answers_of_other_weights_are_not_taken_up(finished, score, t5_model, tmp_path):
    _, out = finished
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    other = type(t5_model)(t5_model.config).eval()
    with pytest.raises(ValueError, match='other weights'):
        score(tmp_path, other)


def test_accuracy_counts_right_answers_over_all_questions(finished, score, tmp_path):
    _, out = finished
    answers = by_question(out)
    for answer in answers[:3]:
        answer |= {'completion': answer['reference'], 'strict': True, 'flexible': True}
    answers[3] |= {'strict': False, 'flexible': True}
    (tmp_path / 'gsm8k-settings.json').write_bytes((out / 'gsm8k-settings.json').read_bytes())
    answers_path(tmp_path).write_text(''.join(json.dumps(answer) + '\n' for answer in answers))
    results = score(tmp_path)
    flexible = sum(answer['flexible'] for answer in answers[4:])
    assert results['strict_accuracy'] == 3 / 1319
    assert results['flexible_accuracy'] == (4 + flexible) / 1319
    assert '0.23' in report(results)


def test_batched_answers_are_those_of_one_question_at_a_time(t5_model, tokenizer, data_dir):
    encoder = Gsm8kEncoder(tokenizer)
    rows = read_test(data_dir / 'gsm8k')[:5]
    prompts = [encoder.prompt_ids(row['question']) for row in rows]
    assert len({len(prompt) for prompt in prompts}) > 1
    batched = generate_greedily(t5_model, tokenizer, prompts, 6)
    for prompt, answer in zip(prompts, batched, strict=True):
        ids = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(t5_model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        assert answer == ids[len(prompt) :]


def test_an_answer_ends_at_its_first_eos(tokenizer):
    class Ends:
        """Writes one piece, EOS, and then more."""

        device = torch.device('cpu')

        def generate(self, input_ids, **_):
            tail = torch.tensor([[9, 1, 9]]).expand(len(input_ids), 3)
            return torch.cat([input_ids, tail], dim=1)

    assert generate_greedily(Ends(), tokenizer, [[5, 6], [7]], 3) == [[9, 1], [9, 1]]


def test_a_file_that_is_not_the_whole_test_split_is_refused(data_dir, tmp_path):
    lines = (data_dir / 'gsm8k/test.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'test.jsonl').write_text(''.join(lines[:10]))
    with pytest.raises(ValueError, match='10 questions'):
        read_test(tmp_path)
