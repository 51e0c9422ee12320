# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random moments; then the same call continues, and its result equals the undisturbed one.

    python tests/kill_check.py --kills 30 data gsm8k harness training --json kills.json

Not part of the test suite, which kills a few times at chosen moments. Everything works on text made
here, in a temporary folder, without a network. Each attempt is a fork of this process in a session of its
own, so that an attempt costs the work and not the imports; the kill goes to the whole session, loader
workers and preparation workers included. Moments are drawn from a seed, uniformly over the time that the
undisturbed call takes; in training every other kill waits for a checkpoint file to appear and comes
while it is written. A round kills three to five times in the same folder before it lets the call end.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_runs import TINY, overrides, validation

ALRS = {
    'algorithms.alrs.update_interval': '3ba',
    'algorithms.alrs.transition': '2ba',
    'algorithms.alrs.window': '0.6dur',
}


class Work:
    """One kind of call: how it is made in a folder, and what of the folder must come out the same."""

    def __init__(self, call: Callable[[Path], Any], result: Callable[[Path], Any]):
        self.call = call
        self.result = result


def make_inputs(folder: Path) -> None:
    """Text, tokenizer, shards, 1,319 questions and a task, none of them from outside."""
    from pydoc_data.topics import topics

    from asymloop_foundry.data.command import main as prepare_data
    from asymloop_foundry.quickstart import train_tokenizer

    texts = sorted(topics.items())
    for split, rows in (('train', texts[::2]), ('val', texts[1:40:2])):
        lines = [json.dumps({'id': name, 'text': text}) for name, text in rows]
        (folder / f'{split}.jsonl').write_text('\n'.join(lines) + '\n')
    train_tokenizer(folder / 'train.jsonl', folder / 'tokenizer', 1024)
    prepare_data([*_preparation(folder), '--out', str(folder / 'data')])
    questions = [
        {
            'question': f'What is {i} and {i % 7}?',
            'answer': f'{i} + {i % 7} = {i + i % 7}\n#### {i + i % 7}',
        }
        for i in range(1319)
    ]
    (folder / 'test.jsonl').write_text('\n'.join(map(json.dumps, questions)) + '\n')

    import pyarrow as pa
    import pyarrow.parquet as pq

    task = folder / 'hub' / 'piqa' / 'plain_text'
    task.mkdir(parents=True)
    rows = [
        {'goal': f'count to {i}', 'sol1': f'say {i}', 'sol2': f'write {i + 1}', 'label': i % 2}
        for i in range(400)
    ]
    pq.write_table(pa.Table.from_pylist(rows), task / 'validation.parquet')


def _preparation(inputs: Path) -> list[str]:
    return [
        *('--train', str(inputs / 'train.jsonl'), '--val', str(inputs / 'val.jsonl')),
        *('--tokenizer', str(inputs / 'tokenizer'), '--seq-len', '32', '--row-format', 'packed'),
    ]


def kinds(inputs: Path) -> dict[str, Work]:
    """Every kind of call that is killed.

    Imported here and not above: preparation's own workers import this module anew.
    """
    import torch
    from llmfoundry.command_utils import train_from_yaml
    from transformers import AutoTokenizer

    from asymloop_foundry.data.command import main as prepare_data
    from asymloop_foundry.evaluation.gsm8k import answers_path, score_gsm8k
    from asymloop_foundry.evaluation.harness import evaluate, result_path, write
    from asymloop_foundry.evaluation.scorer import ContinuationScorer
    from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
    from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

    torch.set_num_threads(1)

    def prepare(out: Path) -> None:
        if prepare_data([*_preparation(inputs), '--workers', '2', '--out', str(out / 'data')]):
            raise SystemExit('data preparation failed')

    def model() -> Any:
        torch.manual_seed(0)
        config = AsymLoopConfig(
            vocab_size=1024,
            d_model=32,
            n_heads=2,
            d_ff=48,
            n_encoder_layers=1,
            n_decoder_layers=1,
            num_iterations=2,
            init_std=0.2,
            pad_token_id=0,
            eos_token_id=1,
        )
        return AsymLoopForCausalLM(config).eval()

    def gsm8k(out: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(inputs / 'tokenizer')
        score_gsm8k(model(), tokenizer, out, inputs / 'test.jsonl', 32, 4, progress=False)

    def answers(out: Path) -> Any:
        lines = answers_path(out).read_text(encoding='utf-8').splitlines()
        found = sorted((json.loads(line) for line in lines), key=lambda a: a['question'])
        return found, json.loads((out / 'gsm8k.json').read_text())

    def harness(out: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(inputs / 'tokenizer')
        scorer = ContinuationScorer(model(), tokenizer, 8)
        write(result_path(out, 0), evaluate(scorer, ['piqa'], 0, inputs / 'hub'))

    def accuracies(out: Path) -> Any:
        # A killed call leaves no half of a file behind under a result's name.
        return {path.name: json.loads(path.read_text())['results'] for path in out.glob('*.json')}

    def train(out: Path) -> None:
        train_from_yaml(TINY, overrides(inputs, out, **ALRS)).close()

    def trained(out: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            state = torch.load(out / 'checkpoints' / 'latest-rank0.pt', weights_only=False)['state']
        weights = {name: tensor.tolist() for name, tensor in state['model'].items()}
        return validation(out), weights, int(state['timestamp']['Timestamp']['batch'])

    return {
        'data': Work(prepare, lambda out: _bytes(out / 'data')),
        'gsm8k': Work(gsm8k, answers),
        'harness': Work(harness, accuracies),
        'training': Work(train, trained),
    }


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()
    }


def begin(work: Work, out: Path) -> int:
    """Forks an attempt and returns its process id."""
    out.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        log = os.open(out.with_suffix('.log'), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ['MASTER_PORT'] = str(random.randrange(20000, 60000))
        work.call(out)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def finished(child: int) -> int | None:
    """The exit status of an attempt that has ended by itself; None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def complete(work: Work, out: Path) -> float:
    """Lets a call end, and returns its seconds."""
    began = time.monotonic()
    child = begin(work, out)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f'an attempt failed: {out.with_suffix(".log").read_text()[-3000:]}')
    return time.monotonic() - began


def kill_once(work: Work, out: Path, seconds: float, in_a_write: bool) -> str:
    """Starts an attempt and kills it; says where."""
    before = set(out.glob('checkpoints/ep*'))
    deadline = time.monotonic() + random.uniform(0.02, 1.0) * seconds
    child = begin(work, out)
    where = 'moment'
    while time.monotonic() < deadline or in_a_write:
        status = finished(child)
        if status is not None:
            if status:
                raise SystemExit(
                    f'an attempt failed: {out.with_suffix(".log").read_text()[-3000:]}'
                )
            return 'ended before'
        if in_a_write and set(out.glob('checkpoints/ep*')) - before:
            time.sleep(random.uniform(0, 0.004))
            where = 'checkpoint write'
            break
        time.sleep(0.0005 if in_a_write else 0.005)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # so young that it has no session of its own yet
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return where


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('kinds', nargs='+', choices=['data', 'gsm8k', 'harness', 'training'])
    parser.add_argument('--kills', type=int, default=30, help='of each kind')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', type=Path, help='where the counts go')
    args = parser.parse_args()
    random.seed(args.seed)
    report = {}
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch) / 'inputs'
        inputs.mkdir()
        make_inputs(inputs)
        for kind in args.kinds:
            work = kinds(inputs)[kind]
            whole = Path(scratch) / f'{kind}-whole'
            seconds = complete(work, whole)
            expected = work.result(whole)
            counts = {
                'kills': 0,
                'in a checkpoint write': 0,
                'rounds': 0,
                'equal': 0,
                'set aside': 0,
            }
            while counts['kills'] < args.kills:
                out = Path(scratch) / f'{kind}-{counts["rounds"]}'
                for number in range(random.randint(3, 5)):
                    where = kill_once(work, out, seconds, kind == 'training' and number % 2 == 1)
                    if where == 'ended before':
                        break
                    counts['kills'] += 1
                    counts['in a checkpoint write'] += where == 'checkpoint write'
                complete(work, out)
                counts['rounds'] += 1
                counts['equal'] += work.result(out) == expected
                counts['set aside'] += len(list(out.glob('checkpoints/unfinished-*')))
                print(kind, f'{seconds:.1f} s undisturbed', counts, flush=True)
                if args.json:
                    report[kind] = {**counts, 'seconds': round(seconds, 2), 'seed': args.seed}
                    args.json.write_text(json.dumps(report, indent=1) + '\n')
            if counts['equal'] != counts['rounds']:
                raise SystemExit(f'{kind}: {counts}: a killed and continued call ended otherwise')


if __name__ == '__main__':
    main()
