# SPDX-License-Identifier: Apache-2.0
import json
import math
import re
import warnings

import pytest
import torch
from algorithms.schedule_simulation import cosine, simulate, tail_exponent
from composer.core import Time
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
)
from distributed.alrs_training import BATCH, LENGTH, SHORT, History, Toy, build_trainer, train
from llmfoundry.optim.scheduler import InverseSquareRootWithWarmupScheduler

from asymloop_foundry.algorithms.alrs import ALRS, GROUP_KEY
from asymloop_foundry.algorithms.records import read_records
from asymloop_foundry.spectra import SpectrumError

POOL = re.compile(r'(attn|ffn|global_kv)\b.*_proj\.weight$')
TOP = ('model.embed_tokens.weight', 'model.lm_head.weight')


def assert_follows_simulation(history, base, steps, *, legacy_cut=False, **timing):
    """Every group at every step, exponents recomputed from the weights that ALRS saw."""

    def exponents(t):
        weights = history.weights[t]
        return {n: tail_exponent(w.numpy()) for n, w in weights.items() if POOL.search(n)}

    simulated = simulate(base, steps, exponents, top=5.0, legacy_cut=legacy_cut, **timing)
    highest = dict.fromkeys(TOP, 0.0)
    for t, expected in enumerate(simulated):
        found = dict(history.rates[t])
        assert found.pop('') == pytest.approx(base[t], rel=1e-12, abs=1e-18)
        for name in TOP:
            highest[name] = max(highest[name], found.pop(name))
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-18), t
    return highest


@pytest.mark.parametrize(
    ('steps', 'interval', 'transition', 'window'),
    [
        (60, 5, 3, 0.2),  # the last transition, 10 to 13, crosses the window's end at 12
        (57, 5, 3, 0.2),  # the window ends between two steps
        (40, 4, 4, 0.5),  # each transition ends where the next refresh begins
        (30, 3, 7, 0.4),  # refreshes in the middle of transitions
        (12, 5, 50, 1.0),  # a transition that outlasts training
    ],
)
def test_every_rate_at_every_step_follows_the_specification(steps, interval, transition, window):
    refreshes = tuple(range(0, steps, interval))
    history = train(
        max_duration=f'{steps}ba',
        weights_at=refreshes,
        algorithm=ALRS(
            update_interval=f'{interval}ba',
            transition=f'{transition}ba',
            window=f'{window}dur',
            estimator='float64',
        ),
    )
    assert len(history.rates) == steps
    assert_follows_simulation(
        history,
        cosine(1e-2, steps, 4) + [1e-3] * 100,
        steps,
        interval=interval,
        transition=transition,
        window=window * steps,
    )


@pytest.mark.parametrize('legacy_cut', [False, True])
def test_the_papers_60m_schedule_and_what_the_reference_code_makes_of_its_end(legacy_cut):
    history = train(
        max_duration='3200ba',
        stop_at=720,
        weights_at=tuple(range(0, 641, 100)),
        scheduler=CosineAnnealingWithWarmupScheduler('320ba', alpha_f=0.1),
        algorithm=ALRS(estimator='float64', legacy_window_cut=legacy_cut),
    )
    base = cosine(1e-2, 3200, 320)
    assert_follows_simulation(
        history, base, 720, legacy_cut=legacy_cut, interval=100, transition=50, window=640
    )
    after = {name: rate / base[700] for name, rate in history.rates[700].items()}
    before = {name: rate / base[599] for name, rate in history.rates[599].items()}
    assert (after == pytest.approx(before, rel=1e-9)) is legacy_cut


def test_embedding_and_head_move_to_the_largest_multiplier():
    history = train()
    base = cosine(1e-2, 40, 4)
    for t in (3, 4, 30):
        for name in TOP:
            assert history.rates[t][name] == pytest.approx(5 * base[t], rel=1e-12)


@pytest.mark.parametrize(
    'duration', [f'{40 * BATCH}sp', '4ep', f'{40 * BATCH * LENGTH}tok'], ids=['sp', 'ep', 'tok']
)
def test_every_unit_of_duration_gives_the_rates_of_batches(duration):
    def run(max_duration, warmup):
        return train(
            max_duration=max_duration,
            scheduler=CosineAnnealingWithWarmupScheduler(warmup, alpha_f=0.1),
        )

    unit = Time.from_timestring(duration).unit.value
    warmup = {'sp': f'{4 * BATCH}sp', 'ep': '0.1dur', 'tok': f'{4 * BATCH * LENGTH}tok'}[unit]
    assert run(duration, warmup).rates == run('40ba', '4ba').rates


@pytest.mark.parametrize(
    'scheduler',
    [
        ConstantWithWarmupScheduler('3ba'),
        LinearWithWarmupScheduler('3ba', alpha_f=0.2),
        MultiStepScheduler(['7ba', '12ba']),
        InverseSquareRootWithWarmupScheduler('3ba', '4ba', '10ba'),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_targets_lie_on_the_schedule_itself_for_any_scheduler(scheduler):
    plain = train(algorithm=ALRS(**{**SHORT, 'mode': 'uniform'}), scheduler=scheduler)
    guided = train(scheduler=scheduler)
    name = 'model.decoder.0.ffn.up_proj.weight'
    for t in (0, 5, 10, 15, 20):
        end = t + 3
        multiplier = guided.rates[end][name] / plain.rates[end][name]
        start, target = guided.rates[t][name], multiplier * plain.rates[end][name]
        for step in range(t, end + 1):
            expected = start + (target - start) * (step - t) / 3
            assert guided.rates[step][name] == pytest.approx(expected, rel=1e-12)
    assert [r[''] for r in guided.rates] == [r[''] for r in plain.rates]


def test_uniform_is_stock_composer():
    stock = train(algorithm=False)
    uniform = train(algorithm=ALRS(**{**SHORT, 'mode': 'uniform'}))
    assert uniform.losses == stock.losses
    for ours, theirs in zip(uniform.rates, stock.rates, strict=True):
        assert set(ours.values()) == set(theirs.values())


def test_static_boost_multiplies_the_decoder_alone_from_the_first_step():
    history = train(algorithm=ALRS(mode='static_decoder_boost', decoder_boost=2.5))
    base = cosine(1e-2, 40, 4)
    for t, rates in enumerate(history.rates):
        for name, rate in rates.items():
            boosted = re.search(r'decoder.*_proj|global_kv', name)
            assert rate == pytest.approx((2.5 if boosted else 1) * base[t], rel=1e-12)


def test_excluded_names_follow_the_base_schedule_and_leave_the_pool():
    algorithm = ALRS(**SHORT, exclude=['lm_head', r'encoder\.0\.ffn'])
    history = train(algorithm=algorithm)
    base = cosine(1e-2, 40, 4)
    for t, rates in enumerate(history.rates):
        assert rates['model.lm_head.weight'] == base[t]
        assert rates['model.encoder.0.ffn.up_proj.weight'] == base[t]
    assert not any('encoder.0.ffn' in name for name in algorithm.latest[1])


def test_kinds_outside_the_pool_follow_the_base_schedule():
    history = train(algorithm=ALRS(**SHORT, pool=['attention', 'ffn']))
    base = cosine(1e-2, 40, 4)
    assert [r['model.global_kv.0.k_proj.weight'] for r in history.rates] == pytest.approx(base[:40])


def test_groups_of_the_configuration_keep_their_own_options():
    model = Toy()
    norms = [p for n, p in model.named_parameters() if 'norm' in n]
    rest = [p for n, p in model.named_parameters() if 'norm' not in n]

    def optimizer(_, lr):
        return torch.optim.AdamW(
            [{'params': rest, 'weight_decay': 0.3}, {'params': norms, 'lr': lr / 2}], lr=lr
        )

    trainer = build_trainer(model=model, optimizer=optimizer)
    groups = trainer.state.optimizers[0].param_groups
    held = [id(p) for group in groups for p in group['params']]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    for group in groups:
        assert group['weight_decay'] == (0.3 if group[GROUP_KEY] else 0.01)
        assert group['initial_lr'] == (1e-2 if group[GROUP_KEY] else 5e-3)
    trainer.close()


def test_decoupled_adamw_gets_the_same_rates():
    assert train(optimizer=DecoupledAdamW).rates[:5] == train().rates[:5]


# --- exact resume ---


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    history = train(max_duration='260ba', save_folder=str(folder), save_interval='1ba')
    return history, folder


@pytest.mark.parametrize('stop', [1, 5, 7, 57])
def test_resuming_at_any_step_is_exact_for_two_hundred_steps(whole_run, stop):
    whole, folder = whole_run
    resumed = train(
        max_duration='260ba',
        model=Toy(seed=9),
        stop_at=stop + 200,
        load_path=str(folder / f'ep{stop // 10}-ba{stop}-rank0.pt'),
    )
    assert resumed.rates == whole.rates[stop : stop + 200]
    assert resumed.losses == whole.losses[stop : stop + 200]


def test_a_changed_key_warns_and_the_checkpoint_wins(whole_run):
    whole, folder = whole_run
    with pytest.warns(UserWarning, match='checkpoint') as caught:
        resumed = train(
            max_duration='260ba',
            stop_at=60,
            lr=3e-2,
            algorithm=ALRS(**{**SHORT, 'transition': '2ba', 'multiplier_range': [1, 3]}),
            load_path=str(folder / 'ep0-ba7-rank0.pt'),
        )
    messages = [str(w.message) for w in caught]
    for key, old, new in [
        ('alrs.transition', '3', '2'),
        ('alrs.multiplier_range', '[1.0, 5.0]', '[1.0, 3.0]'),
        ('optimizer.lr', '0.01', '0.03'),
    ]:
        [message] = [m for m in messages if m.startswith(f'{key}:')]
        assert f'written with {old},' in message
        assert f'says {new}' in message
        assert "checkpoint's value wins" in message
    assert resumed.rates == whole.rates[7:60]


def test_an_unchanged_configuration_resumes_without_a_warning(whole_run):
    _, folder = whole_run
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        train(max_duration='260ba', stop_at=10, load_path=str(folder / 'ep0-ba7-rank0.pt'))
    assert not [w for w in caught if 'checkpoint' in str(w.message) and 'alrs' in str(w.message)]


def test_a_checkpoint_with_other_groups_is_refused(whole_run):
    _, folder = whole_run
    model = Toy()
    weights = [p for n, p in model.named_parameters() if 'norm' not in n]
    norms = [p for n, p in model.named_parameters() if 'norm' in n]
    with pytest.raises(ValueError, match=r'other parameter groups.*param_groups of the first run'):
        train(
            model=model,
            optimizer=lambda _, lr: torch.optim.AdamW([{'params': weights}, {'params': norms}], lr),
            load_path=str(folder / 'ep0-ba7-rank0.pt'),
        )


def test_a_checkpoint_of_a_run_without_alrs_is_refused_or_gives_its_weights(tmp_path):
    train(algorithm=False, save_folder=str(tmp_path), save_interval='7ba', stop_at=7)
    checkpoint = str(tmp_path / 'ep0-ba7-rank0.pt')
    with pytest.raises(ValueError, match=r'without ALRS.*load_weights_only'):
        train(load_path=checkpoint)
    fresh = train(load_path=checkpoint, load_weights_only=True, stop_at=5)
    assert fresh.rates[4]['model.lm_head.weight'] == pytest.approx(5 * fresh.rates[4][''])


def test_state_without_alrs_starts_anew_and_says_so(whole_run):
    _, folder = whole_run
    with pytest.warns(UserWarning, match='no state of ALRS.*batch 7'):
        history = train(
            max_duration='260ba',
            stop_at=12,
            load_path=str(folder / 'ep0-ba7-rank0.pt'),
            load_ignore_keys=['state/algorithms/*'],
        )
    assert history.rates[0]['model.lm_head.weight'] == history.rates[0]['']
    assert history.rates[3]['model.lm_head.weight'] == pytest.approx(5 * history.rates[3][''])


# --- records ---


def test_the_record_holds_every_refresh_and_the_means_of_what_was_applied(whole_run):
    whole, folder = whole_run
    rows = read_records(folder / 'alrs.jsonl')
    refreshes = [row for row in rows if row['kind'] == 'refresh']
    assert [row['batch'] for row in refreshes] == list(range(0, 131, 5))
    assert all(POOL.search(name) for name in refreshes[0]['alpha'])
    assert max(refreshes[0]['multiplier'].values()) == 5
    for row in (row for row in rows if row['kind'] == 'lr'):
        rates = whole.rates[row['batch']]
        decoder = [rate for n, rate in rates.items() if 'decoder' in n and '.ffn.' in n]
        encoder = [rate for n, rate in rates.items() if 'encoder' in n and '.ffn.' in n]
        assert row['mean']['decoder/ffn'] == pytest.approx(sum(decoder) / 3)
        if row['batch'] > 1:
            assert row['ratio']['ffn'] == pytest.approx(sum(decoder) / sum(encoder))
        assert set(row['mean']) == {
            f'{stack}/{kind}' for stack in ('encoder', 'decoder') for kind in ('attention', 'ffn')
        } | {'decoder/global'}


def test_a_resumed_run_continues_the_record_without_a_gap_or_a_repeat(tmp_path):
    options = {'save_folder': str(tmp_path), 'save_interval': '7ba', 'save_overwrite': True}
    train(stop_at=11, **options)
    train(load_path=str(tmp_path / 'ep0-ba7-rank0.pt'), **options)
    rows = read_records(tmp_path / 'alrs.jsonl')
    assert [r['batch'] for r in rows if r['kind'] == 'lr'] == list(range(40))
    assert [r['batch'] for r in rows if r['kind'] == 'refresh'] == [0, 5, 10, 15, 20]


# --- what cannot work is refused by name ---


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('mode', 'uniformly'),
        ('multiplier_range', [5, 1]),
        ('multiplier_range', [0, 5]),
        ('update_interval', '100tok'),
        ('update_interval', '0ba'),
        ('transition', '0.1dur'),
        ('window', '-0.1dur'),
        ('pool', []),
        ('pool', ['attention', 'embedding']),
        ('tail_fraction', 0.0),
        ('estimator', 'hill'),
        ('decoder_boost', 2.0),
        ('log_interval', '1ep'),
    ],
)
def test_a_bad_key_is_named_with_its_value(key, value):
    with pytest.raises(ValueError, match=rf'alrs\.{key}.*{re.escape(str(value)[:4])}'):
        ALRS(**{key: value})


def test_an_exclusion_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r'alrs\.exclude.*q_prj'):
        build_trainer(algorithm=ALRS(exclude=['q_prj']))


def test_unsharded_flat_parameters_are_refused():
    with pytest.raises(ValueError, match='use_orig_params'):
        build_trainer(parallelism_config={'fsdp': {'use_orig_params': False}})


def test_stacked_experts_are_refused_with_the_layout_that_works():
    model = Toy()
    ffn = model.model.decoder[0].ffn
    ffn.experts = torch.nn.Module()
    ffn.experts.gate_proj = torch.nn.Parameter(torch.ones(4, 12, 8))
    with pytest.raises(ValueError, match=r'ffn\.experts\.gate_proj.*2-D'):
        build_trainer(model=model)


def test_experts_that_are_matrices_of_their_own_get_their_own_groups():
    model = Toy()
    ffn = model.model.decoder[0].ffn
    ffn.experts = torch.nn.ModuleList(
        torch.nn.ModuleDict({'gate_proj': torch.nn.Linear(8, 12, bias=False)}) for _ in range(2)
    )
    ffn.router = torch.nn.Linear(8, 2, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        trainer = build_trainer(model=model)
    names = {group[GROUP_KEY] for group in trainer.state.optimizers[0].param_groups}
    assert {f'model.decoder.0.ffn.experts.{i}.gate_proj.weight' for i in range(2)} <= names
    assert not any('router' in name for name in names)
    trainer.close()


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_named_before_it_reaches_a_rate(value):
    model = Toy()
    model.model.decoder[0].attn.v_proj.weight.data[0, 0] = value
    with pytest.raises(SpectrumError, match=r'decoder\.0\.attn\.v_proj'):
        train(model=model)


def test_a_constant_spectrum_is_named():
    model = Toy()
    torch.nn.init.orthogonal_(model.model.encoder[0].attn.o_proj.weight)
    with pytest.raises(SpectrumError, match=r'encoder\.0\.attn\.o_proj.*constant'):
        train(model=model)


def test_a_zero_matrix_is_neutral_and_stays_out_of_the_extremes():
    model = Toy()
    model.model.encoder[0].attn.o_proj.weight.data.zero_()
    history = train(model=model, max_duration='40ba', stop_at=5)
    base = cosine(1e-2, 40, 4)
    assert history.rates[4]['model.encoder.0.attn.o_proj.weight'] == pytest.approx(base[4])
    assert all(math.isfinite(rate) for rates in history.rates for rate in rates.values())


def test_the_state_is_plain_text():
    state = ALRS().state_dict()
    assert json.loads(state['alrs'])['settings']['update_interval'] == 100


def test_several_schedulers_are_refused():
    history = History()
    schedulers = [ConstantWithWarmupScheduler('3ba'), LinearWithWarmupScheduler('3ba')]
    with pytest.raises(ValueError, match='one Composer scheduler'):
        build_trainer(scheduler=schedulers, history=history).fit()
