# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

SYSTEMS = ('dense', 'full_loop', 'asymloop', 'no_local_kv', 'asymloop_moe')
STRATEGIES = ('ddp', 'fsdp1_full_shard', 'fsdp1_shard_grad_op', 'fsdp2', 'fsdp2_keep_gathered')


@pytest.fixture(scope='module')
def errors(tmp_path_factory):
    result = tmp_path_factory.mktemp('gradients') / 'errors.json'
    script = Path(__file__).with_name('gradients.py')
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    run = subprocess.run(
        [*launcher, str(script), str(result)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize('recompute', ['plain', 'recompute'])
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('system', SYSTEMS)
def test_two_processes_give_one_processs_gradients(errors, system, strategy, recompute):
    assert errors[f'{system}-{strategy}-{recompute}'] < 1e-5
