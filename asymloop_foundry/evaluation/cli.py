# SPDX-License-Identifier: Apache-2.0
"""The command line of ``eval.py``."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ..experiments.paper import ACCURACY_BY_SCALE
from .loading import Loaded, load, local_copy

__all__ = ['main']

YAMLS = Path(__file__).resolve().parents[2] / 'yamls' / 'eval'
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; errors that a user can mend go to stderr without a traceback."""
    args = _parser().parse_args(argv)
    try:
        with local_copy(args.checkpoint) as path:
            args.run(args, path)
    except (ValueError, FileNotFoundError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='eval.py', description='Scores a trained model.')
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    harness = _command(commands, 'harness', _harness, "lm-eval's seven tasks: Tables 1 and 2")
    harness.add_argument('--shots', type=int, nargs='+', default=[0, 5], help='default: 0 5')
    harness.add_argument('--tasks', nargs='+', help="lm-eval's names; default: all seven")
    harness.add_argument('--data', help="parquet in the hub's layout, to run without a network")
    harness.add_argument('--limit', type=int, help='only the first rows of each task')
    harness.add_argument('--samples', action='store_true', help="keep every row's log-likelihoods")
    harness.add_argument(
        '--paper-row',
        choices=[f'{scale}/{system}' for scale, system in ACCURACY_BY_SCALE[0]],
        help='the row to print beside; by default what the configuration says',
    )

    icl = _command(commands, 'icl', _icl, "Foundry's gauntlet on the same seven tasks")
    icl.add_argument('--data', default='./data/icl', help='what data_prep/convert_icl.py wrote')
    icl.add_argument('--shots', type=int, nargs='+', default=[0], help='default: 0')
    icl.add_argument('--batches', type=int, default=-1, help='only so many batches of each task')

    gsm8k = _command(commands, 'gsm8k', _gsm8k, 'GSM8K, greedy: Table 13')
    gsm8k.add_argument('--data', help='a test.jsonl of GSM8K, or its folder; default: the hub')
    gsm8k.add_argument('--max-new-tokens', type=int, default=512, help='default: 512')

    loss = _command(
        commands, 'loss', _loss, 'validation cross-entropy at several K', several_k=True
    )
    loss.add_argument('--data', required=True, help='what data_prep/convert_fineweb.py wrote')
    loss.add_argument('--split', default='val', help='default: val')
    return parser


def _command(  # type: ignore[no-untyped-def]
    commands: argparse._SubParsersAction, name: str, run, text: str, several_k: bool = False
):
    parser = commands.add_parser(name, help=text, description=text)
    add = parser.add_argument
    add('checkpoint', help='a Composer checkpoint (.pt) or an exported folder')
    add('--out', help='folder for results; default: evaluation/ beside the checkpoint')
    add('--tokenizer', help='folder or hub name, where the checkpoint has none')
    nargs = {'nargs': '+'} if several_k else {}
    add('--num-iterations', type=int, metavar='K', help="default: the configuration's", **nargs)
    add('--batch-size', type=int, default=16, help='default: 16')
    add('--max-length', type=int, help="positions; default: the model's")
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    add('--dtype', choices=DTYPES, default='fp32', help='default: fp32')
    parser.set_defaults(run=run)
    return parser


def _load(args: argparse.Namespace, path: Path) -> Loaded:
    return load(path, args.tokenizer, args.num_iterations, args.device, DTYPES[args.dtype])


def _out(args: argparse.Namespace) -> Path:
    if args.out is None and '://' in args.checkpoint:
        return Path('evaluation')
    return Path(args.out or Path(args.checkpoint).resolve().parent / 'evaluation')


def _harness(args: argparse.Namespace, path: Path) -> None:
    from .harness import accuracy_table, evaluate, paper_row, result_path, write
    from .scorer import ContinuationScorer
    from .tasks import TASKS

    loaded = _load(args, path)
    scorer = ContinuationScorer(
        loaded.model, loaded.tokenizer, args.batch_size, max_length=args.max_length
    )
    row = tuple(args.paper_row.split('/')) if args.paper_row else paper_row(loaded.model.config)
    facts = {
        'checkpoint': str(args.checkpoint),
        'num_iterations': loaded.model.config.num_iterations,
        'dtype': args.dtype,
    }
    if loaded.step is not None:
        facts['step'] = loaded.step
    for shots in args.shots:
        results = evaluate(
            scorer,
            args.tasks or tuple(TASKS),
            shots,
            args.data,
            args.limit,
            _out(args) if args.samples else None,
        )
        written = result_path(_out(args), shots)
        write(written, results, **facts)
        print(f'{accuracy_table(results, shots, row)}\nwritten to {written}\n', flush=True)


def _icl(args: argparse.Namespace, path: Path) -> None:
    from .gauntlet import gauntlet_config, run_gauntlet

    with tempfile.TemporaryDirectory() as folder:
        config = gauntlet_config(
            path,
            args.data,
            YAMLS,
            folder,
            args.tokenizer,
            args.shots,
            args.num_iterations,
            args.batch_size,
            {'fp32': 'fp32', 'bf16': 'amp_bf16'}[args.dtype],
            args.batches,
            args.max_length,
        )
        out = _out(args)
        run_gauntlet(config, out)
    print(f'written to {out / "gauntlet.json"}')


def _gsm8k(args: argparse.Namespace, path: Path) -> None:
    from .gsm8k import report, score_gsm8k

    loaded = _load(args, path)
    results = score_gsm8k(
        loaded.model,
        loaded.tokenizer,
        _out(args),
        args.data,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        checkpoint=str(args.checkpoint),
    )
    print(report(results))


def _loss(args: argparse.Namespace, path: Path) -> None:
    from ..files import write_json
    from .iterations import loss_table, score_validation, validation_batches

    loaded = load(path, args.tokenizer, None, args.device, DTYPES[args.dtype])
    config = loaded.model.config
    batches = validation_batches(
        args.data,
        args.split,
        loaded.tokenizer,
        args.max_length or config.max_seq_len,
        args.batch_size,
    )
    results = score_validation(
        loaded.model, batches, args.num_iterations or [config.num_iterations]
    )
    facts = {'checkpoint': str(args.checkpoint), 'data': f'{args.data}/{args.split}'}
    written = _out(args) / 'loss.json'
    write_json(written, {**facts, 'step': loaded.step, 'dtype': args.dtype, **results})
    print(f'{loss_table(results)}\n{results["n_targets"]:,} targets; written to {written}')
