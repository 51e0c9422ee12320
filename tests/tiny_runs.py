# SPDX-License-Identifier: Apache-2.0
"""Training runs of a size that tests can afford, through the repository's own YAML and commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / 'yamls' / 'asymloop-tiny.yaml')
LAUNCHERS = {
    'composer': [
        str(Path(sys.executable).with_name('composer')),
        '-n',
        '2',
        str(ROOT / 'train.py'),
    ],
    'llmfoundry': [str(Path(sys.executable).with_name('llmfoundry')), 'train'],
    'train.py': [sys.executable, str(ROOT / 'train.py')],
}


def overrides(text_run: Path, work_dir: Path, **changes: Any) -> list[str]:
    """Command-line overrides of the tiny YAML: a smaller model, eight steps, evaluation at each."""
    values = {
        'variables.work_dir': work_dir,
        'tokenizer.name': text_run / 'tokenizer',
        'train_loader.dataset.local': text_run / 'data',
        'eval_loader.dataset.local': text_run / 'data',
        'max_seq_len': 32,
        'model.vocab_size': 1024,
        'model.d_model': 32,
        'model.d_ff': 48,
        'max_duration': '8ba',
        'eval_interval': '1ba',
        'save_interval': '2ba',
        'save_num_checkpoints_to_keep': -1,
        'global_train_batch_size': 8,
        'device_train_microbatch_size': 4,
        'progress_bar': 'false',
        **changes,
    }
    return [f'{key}={value}' for key, value in values.items()]


def launch(launcher: str, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the tiny YAML in a process of its own and returns it when it has succeeded."""
    run = subprocess.run(
        [*LAUNCHERS[launcher], TINY, *arguments], capture_output=True, text=True, **options
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]
    return run


def validation(work_dir: Path) -> dict[int, float]:
    """Validation cross-entropy by step, as the run recorded it."""
    trajectory = json.loads((work_dir / 'results.json').read_text())['trajectory']
    return {entry['step']: entry['metrics']['LanguageCrossEntropy'] for entry in trajectory}
