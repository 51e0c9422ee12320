# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

from asymloop_foundry.data.builtin_text import docstrings, write_builtin_text


def test_the_quickstart_goes_from_text_to_a_sample(text_run, tmp_path):
    """All five steps, with the language reference alone for text and two training steps."""
    for split in ('train', 'val'):
        text = tmp_path / 'text' / f'{split}.jsonl'
        text.parent.mkdir(exist_ok=True)
        text.write_bytes((text_run / f'{split}.jsonl').read_bytes())
    command = [sys.executable, '-m', 'asymloop_foundry.quickstart', '--out', str(tmp_path)]
    short = ['max_duration=2ba', 'eval_interval=2ba', 'save_interval=2ba']
    run = subprocess.run([*command, *short], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    for step in range(1, 6):
        assert f'==> {step}/5' in run.stdout
    assert 'validation cross-entropy before training: 8.' in run.stdout
    assert 'step 2)' in run.stdout
    assert "sample: 'Return the number of" in run.stdout
    assert (tmp_path / 'checkpoints' / 'latest-rank0.pt').exists()
    assert json.loads((tmp_path / 'results.json').read_text())['finished']


def test_docstrings_are_found_in_source_without_importing_it(tmp_path):
    (tmp_path / 'tests').mkdir()
    long = ('This text is long enough to be prose. ' * 8).strip()
    (tmp_path / 'a.py').write_text(f'raise SystemExit\ndef f():\n    """{long}"""\n')
    (tmp_path / 'broken.py').write_text('def (:\n')
    (tmp_path / 'short.py').write_text('"""Short."""\n')
    (tmp_path / 'tests' / 'b.py').write_text(f'"""{long}"""\n')
    assert list(docstrings(tmp_path)) == [('a.py:f', long)]


def test_builtin_text_is_split_without_overlap(tmp_path, monkeypatch):
    monkeypatch.setattr('asymloop_foundry.data.builtin_text.docstrings', lambda folder: iter(()))
    counts = write_builtin_text(tmp_path / 'train.jsonl', tmp_path / 'val.jsonl')
    rows = {
        split: [json.loads(line) for line in (tmp_path / f'{split}.jsonl').read_text().splitlines()]
        for split in ('train', 'val')
    }
    assert counts == (len(rows['train']), len(rows['val']))
    assert len(rows['train']) > 30 * len(rows['val']) > 0
    assert not {r['text'] for r in rows['train']} & {r['text'] for r in rows['val']}
