# SPDX-License-Identifier: Apache-2.0
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from composer import Trainer
from family import FAMILY, SMALL, build
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from asymloop_foundry.callbacks.hf_export import HFExport
from asymloop_foundry.export import export, main, save
from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM
from asymloop_foundry.sharded import merge

ROOT = Path(__file__).resolve().parents[1]
IDS = torch.arange(3, 23).view(2, 10)
# Other environments, each with torch and a transformers of its own: paths joined by ':'.
PYTHONS = [sys.executable, *filter(None, os.environ.get('ASYMLOOP_PYTHONS', '').split(':'))]


@pytest.fixture(scope='module')
def tokenizer(text_run):
    return AutoTokenizer.from_pretrained(text_run / 'tokenizer')


@pytest.fixture(scope='module')
def members(tokenizer, tmp_path_factory):
    """A folder of each member, and the logits that it must give."""
    root = tmp_path_factory.mktemp('exports')
    expected = {}
    for name in FAMILY:
        model = build(name, vocab_size=1024, attn_backend='reference', eos_token_id=1)
        save(model, tokenizer if not expected else None, root / name)
        expected[str(root / name)] = model(IDS).logits.detach()
    return root, expected


@pytest.fixture(scope='module', params=PYTHONS, ids=lambda path: Path(path).parts[-3])
def loaded(request, members, tmp_path_factory):
    """What a process without this package finds in those folders."""
    _, expected = members
    scratch = tmp_path_factory.mktemp('elsewhere')
    folders = [str(shutil.copytree(path, scratch / Path(path).name)) for path in expected]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith('PYTHON')},
        'HF_HOME': str(scratch / 'home'),
        'HF_MODULES_CACHE': str(scratch / 'modules'),
    }
    command = [request.param, str(ROOT / 'tests' / 'load_exports.py'), str(scratch / 'report.pt')]
    run = subprocess.run(
        [*command, *folders], cwd=scratch, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = torch.load(scratch / 'report.pt')
    return {Path(key).name: value for key, value in report.items()}


@pytest.mark.parametrize('name', FAMILY)
def test_an_export_gives_the_same_logits_where_the_package_is_missing(loaded, members, name):
    root, expected = members
    torch.testing.assert_close(
        loaded[name]['logits'], expected[str(root / name)], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize('name', FAMILY)
def test_an_export_generates_the_same_with_and_without_its_cache(loaded, name):
    for case, (cached, recomputed) in loaded[name].items():
        if case != 'logits':
            assert torch.equal(cached, recomputed), case


def test_the_tokenizer_gives_generate_what_the_model_takes(loaded):
    assert set(loaded['encoded']) == {'input_ids', 'attention_mask'}
    assert loaded['generated'].shape[1] == loaded['encoded']['input_ids'].shape[1] + 4


def test_a_loaded_export_can_be_saved_again_with_its_code(loaded):
    torch.testing.assert_close(loaded['again'], loaded[next(iter(FAMILY))]['logits'])


def test_an_export_holds_its_code_and_nothing_of_the_training_machine(members):
    folder = members[0] / 'asymloop'
    config = json.loads((folder / 'config.json').read_text())
    assert config['auto_map'] == {
        'AutoConfig': 'configuration_asymloop.AsymLoopConfig',
        'AutoModelForCausalLM': 'modeling_asymloop.AsymLoopForCausalLM',
    }
    assert (config['attn_backend'], config['activation_checkpointing']) == ('auto', False)
    code = {path.name for path in folder.glob('*.py')}
    source = ROOT / 'asymloop_foundry' / 'models'
    for name in code:
        assert (folder / name).read_text() == (source / name).read_text()
    assert 'modeling_asymloop.py' in code
    assert 'composer_asymloop.py' not in code
    generation = json.loads((folder / 'generation_config.json').read_text())
    assert generation['eos_token_id'] == 1


@pytest.fixture(scope='module')
def trained(tokenizer, tmp_path_factory):
    """Two steps of training: Composer's checkpoint and what the callback exported."""
    folder = tmp_path_factory.mktemp('trained')
    torch.manual_seed(0)
    model = ComposerAsymLoopCausalLM(
        tokenizer,
        **{**SMALL, **FAMILY['asymloop'], 'vocab_size': 1024, 'activation_checkpointing': True},
    )
    rows = [{'input_ids': ids, 'labels': ids} for ids in torch.randint(5, 500, (8, 12))]
    Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration='2ba',
        callbacks=[HFExport(save_folder=str(folder), save_interval='2ba')],
        save_folder=str(folder),
        save_interval='2ba',
        progress_bar=False,
        precision='fp32',
        device='cpu',
    ).fit()
    return folder


def same_export(one: Path, other: Path) -> None:
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names - {'generation_config.json'}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_the_command_and_the_callback_write_the_same_folder(trained, tmp_path, capsys):
    main([str(trained / 'latest-rank0.pt'), str(tmp_path / 'out')])
    assert 'AutoModelForCausalLM' in capsys.readouterr().out
    same_export(tmp_path / 'out', trained / 'huggingface' / 'ba2')


def test_dtype_and_k_go_into_the_export(trained, tmp_path):
    out = tmp_path / 'out'
    main([str(trained / 'latest-rank0.pt'), str(out), '--dtype', 'bf16', '--num-iterations', '5'])
    config = json.loads((out / 'config.json').read_text())
    assert (config['torch_dtype'], config['num_iterations']) == ('bfloat16', 5)
    again = export(str(out), tmp_path / 'again', num_iterations=2)
    assert json.loads((again / 'config.json').read_text())['num_iterations'] == 2


def test_an_existing_folder_is_never_written_over(trained, tmp_path):
    (tmp_path / 'out').mkdir()
    with pytest.raises(FileExistsError, match='give a new folder'):
        export(str(trained / 'latest-rank0.pt'), tmp_path / 'out')


def test_a_failed_export_leaves_nothing_behind(tmp_path, monkeypatch):
    model = build('asymloop')
    monkeypatch.setattr(model, 'save_pretrained', lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(model, None, tmp_path / 'out')
    assert list(tmp_path.iterdir()) == []
    assert model.config.attn_backend == 'auto'


@pytest.fixture(scope='module')
def sharded(text_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp('sharded')
    script = ROOT / 'tests' / 'distributed' / 'checkpoints_to_export.py'
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    run = subprocess.run(
        [*command, script, folder, text_run / 'tokenizer'], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.mark.parametrize('strategy', ['fsdp1', 'fsdp2'])
def test_a_sharded_checkpoint_gives_the_folder_that_the_callback_gathers(
    sharded, tmp_path, strategy
):
    main([str(sharded / strategy / 'latest-rank0.pt'), str(tmp_path / 'out')])
    same_export(tmp_path / 'out', sharded / strategy / 'huggingface' / 'ba2')


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_index_of_a_sharded_checkpoint_cannot_run_code(tmp_path):
    (tmp_path / '.metadata').write_bytes(pickle.dumps(Malicious(tmp_path / 'ran')))
    with pytest.raises(ValueError, match='no index holds'):
        merge(tmp_path, tmp_path / 'merged.pt')
    assert not (tmp_path / 'ran').exists()


def test_plain_values_of_a_sharded_checkpoint_cannot_run_code(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = {'state': {'model': {'w': torch.ones(2)}, 'timestamp': Malicious(tmp_path / 'ran')}}
    dcp.save(state, checkpoint_id=tmp_path / 'sharded', no_dist=True)
    with pytest.raises(ValueError, match='Weights only load failed'):
        merge(tmp_path / 'sharded', tmp_path / 'merged.pt')
    assert not (tmp_path / 'ran').exists()
