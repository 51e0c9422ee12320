# SPDX-License-Identifier: Apache-2.0
"""GSM8K as the paper scores it (Table 13): greedy, no examples, the final number of 1,319 answers.

Each answer is appended to a jsonl as soon as its batch is done, so that the same command goes on after
an interruption, whatever ended it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.gsm8k import HUB_NAME, HUB_REVISION, Gsm8kEncoder, read_questions
from ..experiments.paper import GSM8K_ACCURACY
from ..files import write_json, write_text
from .gsm8k_answers import score

__all__ = ['QUESTIONS', 'answers_path', 'read_test', 'report', 'score_gsm8k', 'weights_fingerprint']

QUESTIONS = 1319


def score_gsm8k(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    data: str | Path | None = None,
    batch_size: int = 16,
    max_new_tokens: int = 512,
    checkpoint: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Answers every question and scores the final numbers.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        out: folder for ``gsm8k-answers.jsonl``, one line a question, and ``gsm8k.json``, the result.
        data: a ``test.jsonl`` or its folder; without it the hub is asked.
        batch_size: questions per batch; it changes the speed, and nothing else.
        max_new_tokens: most tokens of an answer.
        checkpoint: a name for the record.
        progress: show a bar.

    Returns:
        ``strict_accuracy`` and ``flexible_accuracy``, shares of all questions; an answer without a
        number is wrong.

    Raises:
        ValueError: the folder holds answers of other weights or settings, or the data is no GSM8K test.
    """
    rows = read_test(data)
    settings = {
        'weights': weights_fingerprint(model),
        'num_iterations': model.config.num_iterations,
        'max_new_tokens': max_new_tokens,
    }
    answers = _take_up(Path(out), settings, rows)
    encoder = Gsm8kEncoder(tokenizer)
    prompts = {i: encoder.prompt_ids(row['question']) for i, row in enumerate(rows)}
    # Prompts of one length in a batch leave little to pad.
    left = sorted(set(prompts) - set(answers), key=lambda i: (len(prompts[i]), i))
    bar = tqdm(total=len(rows), initial=len(answers), desc='questions', disable=not progress)
    with answers_path(out).open('a', encoding='utf-8') as stream:
        for start in range(0, len(left), batch_size):
            batch = left[start : start + batch_size]
            ids = generate_greedily(model, tokenizer, [prompts[i] for i in batch], max_new_tokens)
            for i, answer_ids in zip(batch, ids, strict=True):
                answers[i] = _record(i, rows[i], answer_ids, tokenizer)
                stream.write(json.dumps(answers[i], ensure_ascii=False) + '\n')
            stream.flush()
            os.fsync(stream.fileno())
            bar.update(len(batch))
    bar.close()
    results = {
        'task': 'gsm8k',
        'strict_accuracy': sum(answer['strict'] for answer in answers.values()) / len(rows),
        'flexible_accuracy': sum(answer['flexible'] for answer in answers.values()) / len(rows),
        'n': len(rows),
        'n_unfinished': sum(not answer['finished'] for answer in answers.values()),
        'checkpoint': checkpoint,
        **settings,
    }
    write_json(Path(out) / 'gsm8k.json', results)
    return results


def generate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """Greedy continuations of encoded prompts, each up to and with its EOS token.

    Args:
        model: a causal language model; its cache is used.
        tokenizer: names EOS and padding.
        prompts: token ids.
        max_new_tokens: where a continuation is cut off.
    """
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if eos is None:
        raise ValueError(
            f'the tokenizer {tokenizer.name_or_path!r} has no EOS token, so no answer could end; '
            'set its eos_token.'
        )
    pad = eos if pad is None else pad
    n = max(map(len, prompts))
    input_BN = torch.full((len(prompts), n), pad)
    mask_BN = torch.zeros_like(input_BN)
    for b, prompt in enumerate(prompts):
        input_BN[b, n - len(prompt) :] = torch.tensor(prompt)
        mask_BN[b, n - len(prompt) :] = 1
    with torch.no_grad():
        output_BN = model.generate(
            input_ids=input_BN.to(model.device),
            attention_mask=mask_BN.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=eos,
            pad_token_id=pad,
        )
    return [_until(row.tolist(), eos) for row in output_BN[:, n:]]


def answers_path(out: str | Path) -> Path:
    """Where the answers are kept, question by question."""
    return Path(out) / 'gsm8k-answers.jsonl'


def read_test(data: str | Path | None) -> list[dict[str, str]]:
    """The test questions.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no question, or there are not 1,319 of them.
    """
    if data is None:
        from datasets import load_dataset

        hub = load_dataset(HUB_NAME, 'main', split='test', revision=HUB_REVISION)
        rows = [dict(row) for row in hub]
    else:
        path = Path(data)
        path = path / 'test.jsonl' if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f'--data {data}: no test.jsonl of GSM8K is there.')
        rows = [dict(row) for row in read_questions(path)]
    if len(rows) != QUESTIONS:
        raise ValueError(
            f'{data or HUB_NAME} has {len(rows)} questions, but the accuracy is over all {QUESTIONS} of '
            "GSM8K's test split; give that file."
        )
    return rows


def weights_fingerprint(model: nn.Module) -> str:
    """What tells one model's weights from another's: a sum over each matrix, in hexadecimal."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (_, weight) in enumerate(sorted(model.state_dict().items())):
        total += (i + 1) * _mean_square(weight)
    return float(total).hex()


def report(results: Mapping[str, Any]) -> str:
    """Accuracies in per cent beside the paper's at 1B."""
    paper = ', '.join(f'{system} {value:.2f}' for system, value in GSM8K_ACCURACY.items())
    return (
        f'GSM8K, greedy, {results["n"]} questions: strict {100 * results["strict_accuracy"]:.2f}, '
        f'flexible {100 * results["flexible_accuracy"]:.2f} '
        f'({results["n_unfinished"]} answers cut off at {results["max_new_tokens"]} tokens)\n'
        f'paper, 1B: {paper}'
    )


def _record(
    i: int, row: Mapping[str, str], ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    completion = tokenizer.decode(ids, skip_special_tokens=True)
    found = score(completion, row['answer'])
    return {
        'question': i,
        'completion': completion,
        'reference': row['answer'],
        'strict': found.strict,
        'flexible': found.flexible,
        'finished': bool(ids) and ids[-1] == tokenizer.eos_token_id,
        'tokens': len(ids),
    }


def _take_up(
    out: Path, settings: Mapping[str, Any], rows: Sequence[Mapping[str, str]]
) -> dict[int, dict[str, Any]]:
    """Answers of an interrupted run, by question; a line that was cut off is answered again."""
    path, settings_path = answers_path(out), out / 'gsm8k-settings.json'
    if not path.is_file():
        write_json(settings_path, dict(settings))
        return {}
    before = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
    differing = [key for key, value in settings.items() if before.get(key) != value]
    if differing:
        raise ValueError(
            f'{path} holds answers with other {", ".join(differing)}; give another --out, or delete '
            'the file.'
        )
    answers = {}
    whole = []
    for answer, line in _lines(path):
        i = answer['question']
        if i < len(rows) and answer['reference'] == rows[i]['answer']:
            answers[i] = answer
            whole.append(line)
    write_text(path, ''.join(whole))
    return answers


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines(keepends=True):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if line.endswith('\n'):
            yield answer, line


def _until(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def _mean_square(weight: Tensor) -> Tensor:
    return weight.detach().double().square().mean().cpu()
