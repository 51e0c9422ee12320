# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import pytest
from tiny_runs import ROOT


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['data', 'gsm8k', 'harness', 'training'])
def test_killed_at_random_moments_the_same_call_ends_as_undisturbed(tmp_path, kind):
    report = tmp_path / 'kills.json'
    script = [sys.executable, str(ROOT / 'tests' / 'kill_check.py'), kind]
    run = subprocess.run(
        [*script, '--kills', '2', '--json', str(report)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    counts = json.loads(report.read_text())[kind]
    assert counts['kills'] >= 2
    assert counts['equal'] == counts['rounds']
