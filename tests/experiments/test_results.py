# SPDX-License-Identifier: Apache-2.0
import csv
import json
import math

import pytest

from asymloop_foundry.experiments.__main__ import main
from asymloop_foundry.experiments.differences import difference_points
from asymloop_foundry.experiments.report import table_text
from asymloop_foundry.experiments.results import TASKS, collect, values
from asymloop_foundry.experiments.runs import RUNS
from asymloop_foundry.experiments.tables import ROWS, TABLES


def leave_results(folder, experiment, ce, seed=6198, finished=True, **changes):
    """What a run's callback writes."""
    folder.mkdir(parents=True)
    content = {
        'experiment': experiment,
        'run_name': folder.name,
        'seed': seed,
        'finished': finished,
        'steps': 2000,
        'samples': 64000,
        'tokens': 8192000,
        'metrics': {'eval': {'LanguageCrossEntropy': ce}, 'piqa': {'Accuracy': 0.5}},
        'trajectory': [
            {
                'step': step,
                'tokens': step * 4096,
                'evaluator': 'eval',
                'metrics': {'LanguageCrossEntropy': ce + 1 - step / 2000},
            }
            for step in (1000, 2000)
        ],
        'parameters': 722496,
        'seconds': 100.0,
        'seconds_per_step': 0.05,
        'peak_gib': 1.5,
        'device': 'x86_64',
        'world_size': 1,
        'versions': {},
        'config_sha256': '0' * 64,
        'config': {},
        **changes,
    }
    (folder / 'results.json').write_text(json.dumps(content))


def leave_harness(path, shots, accuracy, **facts):
    """What lm-eval's evaluation writes; accuracies grow by one point from task to task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        'results': {
            task: {'acc,none': accuracy + i / 100, 'acc_norm,none': 0.99}
            for i, task in enumerate(TASKS.values())
        },
        'n-shot': dict.fromkeys(TASKS.values(), shots),
        'n-samples': {task: {'original': 500, 'effective': 500} for task in TASKS.values()},
        **facts,
    }
    path.write_text(json.dumps(content))


def test_collected_runs_have_their_losses_and_costs(tmp_path):
    leave_results(tmp_path / 'b', 'tiny/60m-dense', 4.5)
    leave_results(tmp_path / 'a', 'tiny/60m-asymloop-k3', 4.25)
    leave_results(tmp_path / 'c', None, 1.0)
    dense, asymloop = collect([tmp_path])
    assert (dense['run'], asymloop['run']) == ('60m-dense', '60m-asymloop-k3')
    assert asymloop['ce'] == 4.25
    assert asymloop['trajectory'][0] == {'step': 1000, 'tokens': 4096000, 'ce': 4.75}
    assert dense['parameters_millions'] == 0.722496
    assert dense['source'] == str(tmp_path / 'b' / 'results.json')


def test_two_folders_for_one_run_and_seed_are_refused(tmp_path):
    leave_results(tmp_path / 'a', 'tiny/60m-dense', 4.5)
    leave_results(tmp_path / 'b', 'tiny/60m-dense', 4.6)
    with pytest.raises(ValueError, match='both hold tiny/60m-dense with seed 6198'):
        collect([tmp_path])


def test_folders_without_runs_are_refused(tmp_path, capsys):
    assert main(['collect', str(tmp_path)]) == 1
    assert 'no results.json of a known run below' in capsys.readouterr().err
    assert main(['collect', str(tmp_path / 'absent')]) == 1
    assert 'is no folder' in capsys.readouterr().err


def test_a_file_that_is_no_results_file_is_named(tmp_path):
    (tmp_path / 'results.json').write_text('{}')
    with pytest.raises(ValueError, match='was not written by the results_writer'):
        collect([tmp_path])
    (tmp_path / 'results.json').write_text('{')
    with pytest.raises(ValueError, match='is no JSON'):
        collect([tmp_path])


def test_accuracies_are_raw_and_those_of_the_last_step(tmp_path):
    run = tmp_path / 'run'
    leave_results(run, 'paper/1b-asymloop-k3', 2.2)
    leave_harness(run / 'harness-ba1000-0shot.json', 0, 0.20, step=1000)
    leave_harness(run / 'checkpoints' / 'evaluation' / 'harness-0shot.json', 0, 0.30)
    leave_harness(run / 'harness-5shot.json', 5, 0.40, step=2000)
    (record,) = collect([tmp_path])
    assert record['accuracy']['0']['obqa'] == pytest.approx(30)
    assert record['accuracy']['5']['piqa'] == pytest.approx(46)
    average = values([record], '1b-asymloop-k3', 'acc/avg/0')
    assert average == {6198: pytest.approx(33)}
    assert [entry['step'] for entry in record['accuracy_along']] == [1000, 2000]


def test_scores_of_another_k_and_of_a_part_of_a_task_are_left_out(tmp_path):
    run = tmp_path / 'run'
    leave_results(run, 'paper/1b-asymloop-k3', 2.2)
    leave_harness(run / 'k5.json', 0, 0.30, num_iterations=5)
    part = {task: {'original': 500, 'effective': 10} for task in TASKS.values()}
    leave_harness(run / 'part.json', 0, 0.30, **{'n-samples': part})
    (record,) = collect([tmp_path])
    assert 'accuracy' not in record


def test_gsm8k_accuracy_is_the_strict_one(tmp_path):
    leave_results(tmp_path / 'run', 'paper/1b-gsm8k-dense', 1.0)
    scores = {'task': 'gsm8k', 'strict_accuracy': 0.09, 'flexible_accuracy': 0.1}
    (tmp_path / 'run' / 'gsm8k.json').write_text(json.dumps(scores))
    (record,) = collect([tmp_path])
    assert values([record], '1b-gsm8k-dense', 'gsm8k') == {6198: pytest.approx(9)}


def test_unfinished_runs_are_collected_and_do_not_count(tmp_path):
    leave_results(tmp_path / 'run', 'tiny/60m-dense', 4.5, finished=False)
    records = collect([tmp_path])
    assert len(records) == 1
    assert values(records, '60m-dense', 'ce', 'tiny') == {}


def test_a_table_shows_printed_ours_difference_and_what_is_missing(tmp_path, capsys):
    leave_results(tmp_path / 'a', 'paper/60m-full-loop-k2', math.log(25.6))
    output = tmp_path / 'collected.json'
    assert main(['collect', str(tmp_path), '-o', str(output)]) == 0
    assert main(['table', '4c', '--results', str(output)]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith('Full Loop K=2, uniform')]
    assert line.split()[4:] == ['PPL', '25.571', '25.600', '+0.029', '+0.0000', '+0.0000']
    assert 'Missing runs: 60m-full-loop-k2-alrs.' in text


def test_table_3_is_shown_on_its_own_scale_and_on_the_true_one(tmp_path):
    leave_results(tmp_path / 'a', 'paper/60m-dense', 3.27182)
    text = table_text('3', collect([tmp_path]))
    own, true = [line.split() for line in text.splitlines() if line.startswith('60M Dense')]
    assert own[-5:-2] == ['23.72', '23.72', '-0.00']
    assert true[-5:-2] == ['26.36', '26.36', '-0.00']


def test_seeds_are_averaged_as_ce_and_their_spread_is_shown(tmp_path):
    for seed, ce in ((6198, 2.8), (6199, 2.9), (6200, 3.0)):
        leave_results(tmp_path / str(seed), 'paper/135m-full-loop-k2', ce, seed)
    text = table_text('10', collect([tmp_path]), markdown=True)
    (line,) = [li for li in text.splitlines() if '135M Full Loop ' in li and '| CE' in li]
    cells = [cell.strip() for cell in line.strip('|').split('|')]
    assert cells[2:5] == ['2.81550 ± 0.00221', '2.90000 ± 0.10000', '+0.08450']
    assert cells[-1] == '3'


def test_a_tiny_table_counts_the_pairs_in_the_papers_order(tmp_path):
    for name, ce in (('asymloop', 4.5), ('no-global-kv', 4.7), ('additive-injection', 4.6)):
        run = '60m-asymloop-k3-uniform' if name == 'asymloop' else f'60m-{name}-k3'
        leave_results(tmp_path / name, f'tiny/{run}', ce)
    leave_results(tmp_path / 'full-loop', 'tiny/60m-full-loop-k2-qk-norm', 4.65)
    text = table_text('7', collect([tmp_path]), 'tiny')
    # The paper: AsymLoop < Full Loop < additive < without Global KV; here additive < Full Loop.
    assert "Of 6 pairs of rows of one scale with results, 5 come in the paper's order." in text
    assert 'Ours: the CPU-sized analogue' in text
    assert '+0.2000' in text
    assert 'Missing' not in text


@pytest.mark.parametrize('name', TABLES)
def test_every_table_prints_every_number_of_the_paper_without_results(name):
    text = table_text(name, [])
    for row in ROWS.values():
        if row.table == name:
            assert RUNS[row.run].name in text
            for cell in row.cells:
                assert f'{cell.paper:.{cell.digits}f}' in text


def test_unknown_tables_and_missing_files_are_named(tmp_path, capsys):
    assert main(['table', '15']) == 1
    assert "table '15': the result tables are 1, 2" in capsys.readouterr().err
    assert main(['table', '4a', '--results', str(tmp_path / 'absent.json')]) == 1
    assert 'experiments collect' in capsys.readouterr().err


def test_list_and_show_name_rows_runs_and_printed_values(capsys):
    assert main(['list', '7']) == 0
    assert '7/additive-injection' in capsys.readouterr().out
    assert main(['show', '7/additive-injection']) == 0
    text = capsys.readouterr().out
    assert 'yamls/asymloop-60m.yaml' in text
    assert '91,826,688' in text
    assert 'PPL 25.116' in text


def test_figures_are_drawn_with_their_numbers(tmp_path, capsys):
    pytest.importorskip('matplotlib')
    for name, ce in (('dense', 3.2), ('full-loop-k2', 3.1), ('asymloop-k3', 3.0)):
        run = tmp_path / name
        leave_results(run, f'paper/1b-{name}', ce)
        leave_harness(run / 'first.json', 0, 0.20, step=1000)
        leave_harness(run / 'last.json', 0, 0.30)
    output = tmp_path / 'collected.json'
    assert main(['collect', str(tmp_path), '-o', str(output)]) == 0
    out = tmp_path / 'figures'
    assert main(['result-figures', str(output), '--out', str(out)]) == 0
    for number in (2, 5, 6):
        assert (out / f'figure{number}.png').read_bytes().startswith(b'\x89PNG')
    rows = list(csv.DictReader((out / 'figure2.csv').open()))
    (row,) = [r for r in rows if (r['scale'], r['system']) == ('1b', 'asymloop')]
    assert (row['parameters'], row['tokens']) == ('1440272640', str(38147 * 512 * 1024))
    assert float(row['ce']) == 3.0
    assert math.exp(float(row['paper_ce']) * 30 / 31) == pytest.approx(8.86)
    rows = list(csv.DictReader((out / 'figure5.csv').open()))
    (row,) = [r for r in rows if (r['scale'], r['system'], r['k']) == ('1b', 'asymloop', '3')]
    assert float(row['training_flops']) / (38147 * 512 * 1024) == pytest.approx(17.959944e9)
    assert float(row['accuracy']) == pytest.approx(33)
    assert float(row['paper_accuracy']) == 50.85
    rows = list(csv.DictReader((out / 'figure6.csv').open()))
    assert {r['system'] for r in rows} == {'full-loop', 'asymloop'}
    assert len(rows) == 2 * 2 * 8


def test_differences_are_taken_within_seeds_and_from_true_cross_entropies(tmp_path):
    for seed, ce in ((1, 3.0), (2, 4.0)):
        leave_results(tmp_path / f'dense{seed}', 'tiny/60m-dense', ce, seed)
    for seed, ce in ((1, 2.9), (2, 3.7), (3, 9.0)):
        leave_results(tmp_path / f'looped{seed}', 'tiny/60m-asymloop-k5', ce, seed)
    points = {p['run']: p for p in difference_points(collect([tmp_path]), 'tiny')}
    point = points['60m-asymloop-k5']
    assert point['seeds'] == 2
    assert point['difference'] == pytest.approx(-0.2)
    assert point['spread'] == pytest.approx(0.2 / 2**0.5)
    # Table 3 prints 21.30 and 23.72 on its own scale, 30/31 of the CE.
    assert point['paper_difference'] == pytest.approx(math.log(21.30 / 23.72) * 31 / 30)
    assert points['60m-full-loop-k3']['difference'] is None


def test_figures_without_results_say_what_is_lacking(tmp_path, capsys):
    leave_results(tmp_path / 'a', 'tiny/60m-dense-alrs', 4.5)
    output = tmp_path / 'collected.json'
    main(['collect', str(tmp_path), '-o', str(output)])
    assert main(['result-figures', str(output), '--out', str(tmp_path / 'figures')]) == 1
    captured = capsys.readouterr()
    assert 'figure5: no run in' in captured.out
    assert 'has nothing to draw' in captured.err
    assert not (tmp_path / 'figures').exists()
