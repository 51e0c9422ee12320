# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of data preparation, against LLM-Foundry's converter on the same documents.

Foundry's side is what ``convert_dataset_hf`` runs in one process: the documents streamed by
``datasets``, ``ConcatTokensDataset``, its ``DataLoader`` and ``MDSWriter``, here with the same
compression and hashes as ours. Ours is ``prepare_split`` with one worker and with two, start and end
of the processes included, every time into an empty folder.

A word is encoded once in each process and then remembered, and a few thousand documents are mostly words
never seen before. ``two_workers_over_one_long`` gives them four times over, for what a long run comes
near to.

``--clock cpu`` counts the processor time of all processes, divided by the number of workers: the rate
if each had a core to itself and none ever waited. It is steady on a busy machine, and an upper bound.

    python benchmarks/data_prep.py --json
"""

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

# Nothing heavy up here: every worker process imports this file.
DATA = Path(os.environ.get('ASYMLOOP_DATA', Path(__file__).resolve().parents[2] / 'shared/data'))


def foundry(texts: str, tokenizer_dir: str, seq_len: int, out: str) -> int:
    """Convert as LLM-Foundry does; returns the tokens written."""
    import datasets
    from llmfoundry.command_utils.data_prep.convert_dataset_hf import generate_samples
    from llmfoundry.data import ConcatTokensDataset
    from llmfoundry.utils.builders import build_tokenizer
    from streaming import MDSWriter
    from torch.utils.data import DataLoader

    datasets.disable_progress_bars()
    tokenizer = build_tokenizer(tokenizer_dir, {})
    tokenizer.model_max_length = int(1e30)
    # T5 ends every document in </s> by itself.
    adds_eos = tokenizer('')['input_ids'][-1:] == [tokenizer.eos_token_id]
    documents = datasets.load_dataset(
        'parquet', data_files=texts, split='train', streaming=True
    ).select_columns(['text'])
    dataset = ConcatTokensDataset(
        hf_dataset=documents,
        tokenizer=tokenizer,
        max_length=seq_len,
        bos_text='',
        eos_text='' if adds_eos else tokenizer.eos_token,
        no_wrap=False,
    )
    rows = 0
    with MDSWriter(
        columns={'tokens': 'ndarray:int32'},
        out=out,
        compression='zstd',
        hashes=['sha1', 'xxh64'],
    ) as writer:
        for sample in generate_samples(DataLoader(dataset, batch_size=512, num_workers=0)):
            writer.write(sample)
            rows += 1
    return rows * seq_len


def ours(texts: str, tokenizer_dir: str, seq_len: int, out: str, workers: int) -> int:
    """Prepare with this project; returns the tokens written."""
    from asymloop_foundry.data.encoding import Encoder, describe, load_tokenizer
    from asymloop_foundry.data.manifest import Request
    from asymloop_foundry.data.prepare import prepare_split, rows_per_shard
    from asymloop_foundry.data.sources import find_sources

    tokenizer = load_tokenizer(tokenizer_dir, _pad_token(tokenizer_dir))
    request = Request(
        split='train',
        tokenizer=describe(tokenizer, tokenizer_dir),
        row_format='packed',
        seq_len=seq_len,
        text_column='text',
        sources=find_sources([texts]),
        limit_tokens=None,
        limit_documents=None,
        on_error='raise',
        rows_per_shard=rows_per_shard(seq_len),
    )
    manifest = prepare_split(request, Encoder.of(tokenizer), out, workers, progress=False)
    return manifest.counts.tokens_kept


def _pad_token(tokenizer_dir: str) -> str | None:
    config = json.loads((Path(tokenizer_dir) / 'tokenizer_config.json').read_text())
    return None if config.get('pad_token') else '<empty_output>'


class PeakMemory(threading.Thread):
    """High-water mark of the resident memory of this process's workers."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        """Look at every worker's own record until told to stop."""
        own = Path(f'/proc/{os.getpid()}')
        while not self.done.wait(0.05):
            for task in own.glob('task/*/children'):
                try:
                    for child in task.read_text().split():
                        command = Path(f'/proc/{child}/cmdline').read_text()
                        status = Path(f'/proc/{child}/status').read_text()
                        if 'spawn_main' in command and 'VmHWM' in status:
                            peak = status.split('VmHWM:')[1].split()[0]
                            self.bytes = max(self.bytes, int(peak) * 1024)
                except OSError:
                    continue  # it has ended


def main() -> None:
    import statistics

    import common
    import pyarrow.parquet as pq
    import tokenizers

    parse = common.parser(__doc__)
    parse.add_argument('--documents', type=int, help='documents to convert (4400; 1500 if quick)')
    parse.add_argument('--tokenizer', default=str(DATA / 'tokenizers' / 't5-base'))
    parse.add_argument('--seq-len', type=int, default=1024)
    args = parse.parse_args()
    documents = args.documents or (1500 if args.quick else 4400)
    rounds = args.rounds or (1 if args.quick else 3)
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    clock = time.perf_counter if args.clock == 'wall' else (lambda: sum(os.times()[:4]))

    with tempfile.TemporaryDirectory() as folder:
        texts = f'{folder}/texts.parquet'
        table = pq.read_table(DATA / 'fineweb_edu' / 'train.parquet', columns=['text'])
        pq.write_table(table.slice(0, documents), texts, compression='zstd')
        one = f'{folder}/one.parquet'
        pq.write_table(table.slice(0, 1), one)
        common.print_environment(
            documents=documents,
            tokenizer=args.tokenizer,
            tokenizers=tokenizers.__version__,
            seq_len=args.seq_len,
            rounds=rounds,
            clock=args.clock,
        )
        out = f'{folder}/out'
        candidates = {
            'foundry, 1 process': lambda source: foundry(source, args.tokenizer, args.seq_len, out),
            'ours, 1 worker': lambda source: ours(source, args.tokenizer, args.seq_len, out, 1),
            'ours, 2 workers': lambda source: ours(source, args.tokenizer, args.seq_len, out, 2),
        }
        # Imports and the reading of the tokenizer's files are not what is compared.
        foundry(one, args.tokenizer, 8, out)
        shutil.rmtree(out)
        rates: dict[str, list[float]] = {name: [] for name in candidates}
        order = list(candidates)
        copies = Path(folder, 'copies')
        copies.mkdir()
        for number in range(4):
            shutil.copy(texts, copies / f'{number}.parquet')
        memory = PeakMemory()
        memory.start()
        for _ in range(rounds):
            for name in order:
                start = clock()
                tokens = candidates[name](texts)
                spent = clock() - start
                if args.clock == 'cpu' and name == 'ours, 2 workers':
                    spent /= 2
                rates[name].append(tokens / spent)
                shutil.rmtree(out)
            order.reverse()
        for name in ('ours, 1 worker', 'ours, 2 workers'):
            start = clock()
            tokens = candidates[name](str(copies))
            spent = (clock() - start) / (2 if args.clock == 'cpu' and '2' in name else 1)
            rates[f'{name}, long'] = [tokens / spent]
            shutil.rmtree(out)
        memory.done.set()
        worker_bytes = memory.bytes

    for name, values in rates.items():
        print(f'  {name:<22} {statistics.median(values):12,.0f} tokens/s   {len(values)} rounds')
    print(f'  peak memory of a worker process: {worker_bytes / 2**20:.0f} MiB')

    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True))

    ratios = {
        'two_workers_over_foundry': ratio('ours, 2 workers', 'foundry, 1 process'),
        'one_worker_over_foundry': ratio('ours, 1 worker', 'foundry, 1 process'),
        'two_workers_over_one': ratio('ours, 2 workers', 'ours, 1 worker'),
        'two_workers_over_one_long': ratio('ours, 2 workers, long', 'ours, 1 worker, long'),
        'worker_peak_gib': worker_bytes / 2**30,
    }
    common.print_ratios(ratios, args.json)


if __name__ == '__main__':
    main()
