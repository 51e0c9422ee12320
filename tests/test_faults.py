# SPDX-License-Identifier: Apache-2.0
"""Kinds of fault of docs/faults.md that have no other home, and that its table names tests that exist."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from family import build, token_ids
from tiny_runs import ROOT
from transformers import AutoTokenizer

from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

NAMED = re.compile(r'`(tests/[\w/]+\.py)::(test_\w+)`')


def functions_of(path):
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}


def test_every_test_that_the_table_names_exists():
    rows = (ROOT / 'docs' / 'faults.md').read_text().splitlines()
    for row in rows:
        if row.startswith('| ') and not row.startswith('| fault'):
            named = NAMED.findall(row)
            assert named, row
            for path, name in named:
                assert name in functions_of(ROOT / path), (path, name)


def test_nothing_here_clears_shared_memory_of_other_processes():
    files = [*(ROOT / 'asymloop_foundry').rglob('*.py'), ROOT / 'train.py', ROOT / 'eval.py']
    assert not [path for path in files if 'clean_stale_shared_memory' in path.read_text()]


def test_an_id_that_only_padding_of_the_vocabulary_adds_decodes_to_nothing(t5_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(t5_tokenizer_dir)
    assert len(tokenizer) == 32100
    assert tokenizer.decode([32100, 32127], skip_special_tokens=True) == ''


def test_an_untied_head_survives_saving_and_loading(tmp_path):
    model = build('asymloop')
    assert not getattr(model, '_tied_weights_keys', None)
    model.save_pretrained(tmp_path)
    again = AsymLoopForCausalLM.from_pretrained(tmp_path).eval()
    ids = token_ids()
    assert not torch.equal(again.lm_head.weight, again.get_input_embeddings().weight)
    assert torch.equal(again(ids).logits, model(ids).logits)


READ = """
import sys
from streaming import StreamingDataset
from torch.utils.data import DataLoader
if __name__ == '__main__':
    data = StreamingDataset(local=sys.argv[1], split='train', shuffle=True, batch_size=4)
    rows = 0
    for batch in DataLoader(data, batch_size=4, num_workers=2):
        rows += len(batch['tokens'])
        print(rows, flush=True)
"""


def test_a_run_killed_with_loader_workers_leaves_nothing_that_stops_the_next(text_run, tmp_path):
    script = tmp_path / 'read.py'
    script.write_text(READ)
    command = [sys.executable, str(script), str(text_run / 'data')]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
    for _ in range(5):
        assert run.stdout.readline()
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    began = time.monotonic()
    again = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr[-2000:]
    assert int(again.stdout.split()[-1]) > 100
    assert time.monotonic() - began < 240


def test_parameters_that_begin_on_the_meta_device_are_initialised():
    script = Path(__file__).with_name('distributed') / 'meta_initialisation.py'
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    run = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert 'initialised' in run.stdout
