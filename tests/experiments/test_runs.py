# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from omegaconf import OmegaConf

from asymloop_foundry.experiments.launch import Launch, merged_config
from asymloop_foundry.experiments.runs import RUNS
from asymloop_foundry.experiments.tables import ROWS, TABLES, find_runs
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

# Table 10's printed millions, and what the component ablations add or take.
PARAMETERS = {
    '60m-dense': 91_825_920,
    '60m-full-loop-k2': 91_825_920,
    '60m-asymloop-k3': 95_366_016,
    '60m-asymloop-k5-uniform': 95_366_016,
    '60m-asymloop-k3-no-qk-norm': 95_364_864,
    '60m-param-matched-k3': 95_366_016 - 384,  # no key norm for the Global keys that are not there
    '60m-full-loop-wide-k2': 100_230_912,
    '135m-full-loop-wide-k2': 151_112_448,
    '135m-asymloop-k3': 141_381_504,
    '350m-35b-asymloop-k3': 393_399_552,
    '1b-asymloop-k3': 1_440_272_640,
    '1b-gsm8k-asymloop-k3': 1_440_272_640,
    '1b-gsm8k-dense': 1_339_607_040,
}
STEPS = {
    '60m-asymloop-k3': 3200,
    '135m-asymloop-k3': 5722,
    '350m-asymloop-k3': 13351,
    '350m-35b-asymloop-k3': 66757,
    '1b-asymloop-k3': 38147,
    'olmo-dense': 3200,
    '60m-moe-dense': 3052,
}
PRETRAINED = [name for name, run in RUNS.items() if not run.is_fine_tuning]


def trained_config(name: str, scale: str) -> AsymLoopConfig:
    """The model that the command of a run trains."""
    config = merged_config(Launch(RUNS[name], scale))
    model = OmegaConf.to_container(config.model, resolve=True)
    assert model.pop('name') == 'asymloop_causal_lm'
    return AsymLoopConfig(**model)


@pytest.mark.parametrize('name', PARAMETERS)
def test_the_command_of_a_run_trains_the_papers_model(name):
    with torch.device('meta'):
        model = AsymLoopForCausalLM(trained_config(name, 'paper'))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize('scale', ['paper', 'tiny'])
def test_every_command_sets_what_its_run_says(scale):
    for name, run in RUNS.items():
        config = merged_config(Launch(run, scale))
        model = trained_config(name, scale)
        for key, value in run.model(scale).items():
            assert getattr(model, key) == value, (name, key)
        for key, value in run.settings(scale).items():
            if key.startswith('model.') or value in ('uniform', 'alrs'):
                continue
            found = OmegaConf.select(config, key)
            if OmegaConf.is_config(found):
                found = OmegaConf.to_container(found)
            assert found == value, (name, key)


@pytest.mark.parametrize('scale', ['paper', 'tiny'])
@pytest.mark.parametrize('name', PRETRAINED)
def test_learning_rates_are_uniform_unless_the_run_says_otherwise(name, scale):
    alrs = OmegaConf.select(merged_config(Launch(RUNS[name], scale)), 'algorithms.alrs')
    mode = 'uniform' if alrs is None else alrs.get('mode', 'alrs')
    assert mode == RUNS[name].rates


@pytest.mark.parametrize('name', STEPS)
def test_budgets_are_those_of_the_paper(name):
    config = merged_config(Launch(RUNS[name]))
    assert config.max_duration == f'{STEPS[name]}ba'
    assert config.global_train_batch_size == 512
    assert config.max_seq_len == 1024
    assert config.seed == 6198


def test_learning_rate_factors_multiply_the_scales_rate():
    rates = {
        factor: merged_config(Launch(RUNS[f'60m-asymloop-k3-lr-x{factor}'])).optimizer.lr
        for factor in (0.5, 2, 4)
    }
    assert rates == {0.5: 5e-4, 2: 2e-3, 4: 4e-3}
    assert merged_config(Launch(RUNS['1b-dense'])).optimizer.lr == 5e-4


def test_systems_of_one_comparison_have_one_effective_depth():
    for scale in ('paper', 'tiny'):
        depths = {
            name: trained_config(f'60m-{name}', scale).effective_depth
            for name in ('full-loop-k2', 'asymloop-k3', 'no-global-kv-k3', 'full-loop-wide-k2')
        }
        assert len(set(depths.values())) == 1, depths


def test_tiny_runs_keep_ratio_and_ablation():
    for name, run in RUNS.items():
        paper, tiny = run.model('paper'), run.model('tiny')
        for key in ('num_iterations', 'global_kv', 'local_kv', 'qk_norm', 'input_injection'):
            assert paper[key] == tiny[key], (name, key)
        total = paper['n_encoder_layers'] + paper['n_decoder_layers']
        tiny_total = tiny['n_encoder_layers'] + tiny['n_decoder_layers']
        assert paper['n_encoder_layers'] / total == tiny['n_encoder_layers'] / tiny_total, name
        assert run.parameters('tiny') < 5_000_000


def test_experts_keep_the_active_parameters_of_the_dense_ffn():
    run = RUNS['60m-moe-asymloop-k3']
    model = run.model()
    assert (model['n_experts'], model['expert_top_k'], model['d_ff']) == (8, 2, 1024)
    dense = RUNS['60m-asymloop-k3-uniform'].parameters()
    routers = 6 * 8 * 768
    assert run.parameters() == dense + 6 * (8 - 2) * 3 * 768 * 1024 + routers


def test_every_result_table_has_its_rows():
    counts = {t: sum(row.table == t for row in ROWS.values()) for t in TABLES}
    assert counts == {
        '1': 12, '2': 3, '3': 20, '4a': 12, '4b': 12, '4c': 2, '6': 6, '7': 4, '8': 6,
        '10': 6, '12': 3, '13': 3, '14': 6,
    }  # fmt: skip
    assert {row.run for row in ROWS.values()} == set(RUNS)


def test_tables_that_print_ce_and_ppl_agree_with_themselves():
    for row in ROWS.values():
        cells = {cell.metric: cell for cell in row.cells}
        if {'ce', 'ppl'} <= set(cells):
            ppl = torch.tensor(cells['ce'].paper, dtype=torch.float64).exp().item()
            assert ppl == pytest.approx(cells['ppl'].paper, rel=6e-5), row.id


def test_names_of_tables_rows_and_runs_find_runs_with_their_seeds():
    assert [(run.name, seeds) for run, seeds in find_runs(['4c'])] == [
        ('60m-full-loop-k2', (6198,)),
        ('60m-full-loop-k2-alrs', (6198,)),
    ]
    assert len(find_runs(['4'])) == len(find_runs(['4a', '4b', '4c']))
    ((_, seeds),) = find_runs(['10/135m-asymloop-k3', '135m-asymloop-k3'])
    assert seeds == (6198, 6199, 6200)
    with pytest.raises(ValueError, match="'4d' is no run, row or table"):
        find_runs(['4d'])
