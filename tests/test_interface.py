# SPDX-License-Identifier: Apache-2.0
"""What users and other code build on, frozen: a change here is a change of the interface.

Names, keys and options may be added on purpose, with this file; one that goes breaks somebody's run.
"""

import ast
import importlib
import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tiny_runs import ROOT

import asymloop_foundry
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig

PACKAGE = ROOT / 'asymloop_foundry'
REGISTERED = {
    'llmfoundry_models': {'asymloop_causal_lm'},
    'llmfoundry_algorithms': {'alrs'},
    'llmfoundry_optimizers': {'adamw'},
    'llmfoundry_callbacks': {'harness', 'hf_export', 'iteration_losses', 'spectrum_monitor'},
    'llmfoundry_callbacks_with_config': {'results_writer'},
    'llmfoundry_icl_datasets': {'asymloop_multiple_choice', 'asymloop_schema'},
    'llmfoundry_config_transforms': {'asymloop_preflight'},
}
MODEL_KEYS = {
    *('vocab_size', 'd_model', 'n_heads', 'n_kv_heads', 'd_ff', 'n_encoder_layers'),
    *('n_decoder_layers', 'num_iterations', 'global_kv', 'local_kv', 'qk_norm', 'input_injection'),
    *('max_seq_len', 'rope_theta', 'norm_eps', 'init_std', 'init_cutoff', 'n_experts'),
    *('expert_top_k', 'normalize_expert_weights', 'load_balancing_coef', 'router_z_coef'),
    *('attn_backend', 'activation_checkpointing', 'use_cache', 'pad_token_id', 'eos_token_id'),
}
# Imports that may go from one part of the package to another.
ALLOWED = {
    '__init__': set(),
    'models': set(),
    'files': set(),
    'spectra': set(),
    'adaptive_exit': set(),
    'sharded': set(),
    'algorithms': {'spectra'},
    'data': {'files'},
    'evaluation': {'data', 'experiments', 'files', 'models', 'sharded'},
    'callbacks': {'algorithms', 'evaluation', 'export', 'files', 'spectra'},
    'export': {'evaluation', 'models'},
    'experiments': {'algorithms', 'callbacks', 'data', 'files', 'models', 'quickstart'},
    'quickstart': {'data'},
    'resume': {'sharded'},
    'run_checks': {'models'},
    'preflight': {'data', 'models', 'resume', 'run_checks'},
    'registry': {'algorithms', 'callbacks', 'models', 'preflight'},
}


def all_entry_points():
    return [e for distribution in distributions() for e in distribution.entry_points]


def imports_of(path):
    """Modules of this package that a file imports, by dotted name."""
    inside = ('asymloop_foundry', *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else ()
            module = '.'.join([*base, *([node.module] if node.module else [])])
            if module.split('.')[0] == 'asymloop_foundry':
                for alias in node.names:
                    found = f'{module}.{alias.name}'
                    is_module = (ROOT / Path(*found.split('.'))).with_suffix('.py').is_file()
                    yield found if is_module else module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split('.')[0] == 'asymloop_foundry':
                    yield alias.name


def part(module):
    names = module.split('.')
    return names[1] if len(names) > 1 else '__init__'


def name_of(path):
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts)


FILES = sorted(PACKAGE.rglob('*.py'))


@pytest.mark.parametrize('path', FILES, ids=name_of)
def test_imports_go_in_the_directions_that_the_design_allows(path):
    mine = part(name_of(path))
    assert {part(m) for m in imports_of(path)} - {mine} <= ALLOWED[mine]


def test_no_modules_import_each_other_in_a_circle():
    graph = {name_of(path): set(imports_of(path)) for path in FILES}
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, ' -> '.join([*path, module])
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_the_package_itself_exports_its_version_alone():
    tree = ast.parse((PACKAGE / '__init__.py').read_text())
    names = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    assert names == ['__version__']
    assert re.fullmatch(r'\d+\.\d+\.\d+', asymloop_foundry.__version__)


def test_registered_names_stay():
    ours = [e for e in all_entry_points() if e.value.startswith('asymloop_foundry.')]
    found = {kind: {e.name for e in ours if e.group == kind} for kind in REGISTERED}
    assert found == REGISTERED
    assert {e.group for e in ours} == REGISTERED.keys()


def test_model_keys_stay():
    assert AsymLoopConfig.field_names() == MODEL_KEYS


COMMANDS = {
    'asymloop_foundry/data/command.py': {
        *('--out', '--train', '--val', '--tokenizer', '--seq-len', '--row-format', '--workers'),
        *('--text-column', '--limit-tokens', '--limit-documents', '--on-error', '--verify'),
        *('--staging', '--pad-token'),
    },
    'data_prep/convert_gsm8k.py': {
        *('--out', '--source', '--tokenizer', '--pad-token', '--max-seq-len'),
    },
    'asymloop_foundry/evaluation/cli.py': {
        *('--shots', '--tasks', '--data', '--limit', '--samples', '--paper-row', '--max-length'),
        *('--num-iterations', '--batch-size', '--device', '--dtype', '--tokenizer', '--out'),
        '--split',
    },
    'asymloop_foundry/export.py': {'--dtype', '--num-iterations', '--tokenizer'},
    'asymloop_foundry/quickstart.py': {'--out'},
}


@pytest.mark.parametrize('command', COMMANDS)
def test_options_of_the_command_lines_stay(command):
    tree = ast.parse((ROOT / command).read_text())
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert COMMANDS[command] - texts == set()


def test_every_symbol_file_and_test_of_the_papers_map_exists():
    text = (ROOT / 'docs' / 'paper_map.md').read_text()
    named = set(re.findall(r'`([^`]+)`', text))
    assert len(re.findall(r'^\| \d+, ', text, re.M)) == 14 + 6
    for name in named:
        if name.startswith('asymloop_foundry.'):
            resolve(name)
        elif '::' in name:
            path, test = name.split('::')
            assert f'def {test}(' in (ROOT / path).read_text(), name
        elif re.fullmatch(r'(yamls|data_prep|tests|docs)/\S+', name):
            assert (ROOT / name).is_file(), name


def resolve(name):
    """The module, or the attribute of one, of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, attribute = name.rsplit('.', 1)
        return getattr(importlib.import_module(module), attribute)
