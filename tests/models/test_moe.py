# SPDX-License-Identifier: Apache-2.0
import math
import re
import warnings

import pytest
import torch
from composer import Trainer
from composer.core import DataSpec, Evaluator
from composer.loggers import InMemoryLogger
from composer.optim import ConstantWithWarmupScheduler
from distributed.alrs_training import History
from family import FAMILY, SMALL, build, token_ids
from omegaconf import OmegaConf
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.flop_counter import FlopCounterMode

from asymloop_foundry.algorithms.alrs import ALRS
from asymloop_foundry.algorithms.matrices import roles_of
from asymloop_foundry.models import moe
from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.flops import active_parameter_count, forward_flops, parameter_count
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM, SwiGLU
from asymloop_foundry.models.moe import MixtureOfExperts, choose_experts, router_losses

MEMBERS = [name for name in FAMILY if name.endswith('_moe')]
YAMLS = [
    f'{system}-moe{rates}-{scale}'
    for system, rates in (('dense', ''), ('full-loop', ''), ('asymloop', ''), ('asymloop', '-alrs'))
    for scale in ('60m', '135m')
]


def config(**fields) -> AsymLoopConfig:
    return AsymLoopConfig(**{**SMALL, 'd_ff': 24, 'n_experts': 6, **fields})


def mixture(dtype=torch.float64, **fields) -> MixtureOfExperts:
    torch.manual_seed(0)
    cfg = config(**fields)
    return MixtureOfExperts(cfg, (SwiGLU(cfg) for _ in range(cfg.n_experts))).to(dtype)


def token_by_token(layer: MixtureOfExperts, x_BND: torch.Tensor) -> torch.Tensor:
    """One token at a time, one expert at a time."""
    outputs = []
    for x_D in x_BND.flatten(0, 1):
        p_E = torch.softmax(layer.router.weight @ x_D, dim=0)
        chosen = sorted(range(len(p_E)), key=lambda i: (-p_E[i].item(), i))[: layer.top_k]
        total = sum(p_E[i] for i in chosen) if layer.normalize else 1.0
        y_D = 0
        for i in chosen:
            e = layer.experts[i]
            g_M, u_M = e.gate_proj.weight @ x_D, e.up_proj.weight @ x_D
            y_D = y_D + p_E[i] / total * (e.down_proj.weight @ (g_M / (1 + (-g_M).exp()) * u_M))
        outputs.append(y_D)
    return torch.stack(outputs).view_as(x_BND)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        n.replace('_checkpoint_wrapped_module.', ''): p.grad for n, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ('top_k', 'normalize'), [(1, False), (2, False), (2, True), (5, True), (6, False)]
)
def test_each_token_gets_its_likeliest_experts_by_their_probabilities(top_k, normalize):
    layer = mixture(expert_top_k=top_k, normalize_expert_weights=normalize)
    x = torch.randn(2, 11, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    results = []
    for function in (lambda x: layer(x)[0], lambda x: token_by_token(layer, x)):
        layer.zero_grad()
        x.grad = None
        y = function(x)
        (y * weight).sum().backward()
        results.append([y, x.grad, *gradients(layer).values()])
    for ours, literal in zip(*results, strict=True):
        torch.testing.assert_close(ours, literal, atol=1e-12, rtol=1e-10)


def test_no_token_is_dropped_when_all_choose_the_same_experts():
    layer = mixture()
    x = torch.randn(1, 1, 32, dtype=torch.float64).expand(1, 50, 32) * torch.linspace(
        0.5, 2, 50, dtype=torch.float64
    ).view(1, 50, 1)
    y, logits = layer(x)
    assert choose_experts(logits, 2).unique(dim=1).shape[1] == 1
    torch.testing.assert_close(y, token_by_token(layer, x), atol=1e-12, rtol=1e-10)


def test_an_expert_without_tokens_gets_zero_gradients():
    layer = mixture()
    x = torch.randn(1, 1, 32, dtype=torch.float64).expand(1, 9, 32)
    y, logits = layer(x)
    used = set(choose_experts(logits, 2).flatten().tolist())
    y.square().sum().backward()
    for j, expert in enumerate(layer.experts):
        for parameter in expert.parameters():
            assert (parameter.grad.abs().sum() > 0) == (j in used)


def test_equal_logits_choose_the_first_experts():
    logits = torch.zeros(3, 8)
    assert choose_experts(logits, 2).tolist() == [[0, 1]] * 3
    logits[1, 5] = 1
    logits[2, 0] = -1
    assert choose_experts(logits, 2).tolist() == [[0, 1], [5, 0], [1, 2]]


def test_routing_is_in_full_precision_under_autocast():
    layer = mixture(torch.float32)
    x = torch.randn(2, 64, 32)
    y, logits = layer(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        y_half, logits_half = layer(x)
    assert torch.equal(logits, logits_half)
    assert y_half.dtype == torch.float32
    torch.testing.assert_close(y_half, y, atol=2e-2 * y.abs().max().item(), rtol=0)
    half = layer.to(torch.bfloat16)
    assert half(x.bfloat16())[0].dtype == torch.bfloat16


def literal_losses(logits, real, top_k):
    """Load-balancing and z-loss with loops over calls and tokens."""
    balancing, z = [], []
    for call in logits:
        n_experts = call.shape[-1]
        count, probability, squares, n = [0] * n_experts, [0.0] * n_experts, 0.0, 0
        for l_E, r in zip(call.flatten(0, 1).tolist(), real.flatten().tolist(), strict=True):
            if not r:
                continue
            n += 1
            total = sum(math.exp(v) for v in l_E)
            squares += math.log(total) ** 2
            for i in sorted(range(n_experts), key=lambda i: -l_E[i])[:top_k]:
                count[i] += 1
            for i in range(n_experts):
                probability[i] += math.exp(l_E[i]) / total
        balancing.append(
            n_experts
            / (top_k * n)
            * sum(c * p / n for c, p in zip(count, probability, strict=True))
        )
        z.append(squares / n)
    return sum(balancing) / len(balancing), sum(z) / len(z)


def random_logits(calls=3, rows=2, length=13, n_experts=6):
    generator = torch.Generator().manual_seed(5)
    shape = (calls, rows, length, n_experts)
    return list(2 * torch.randn(shape, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize('top_k', [1, 2, 4])
def test_router_losses_are_the_literal_ones_of_real_tokens(top_k):
    logits = random_logits()
    ids = torch.ones(2, 13, dtype=torch.long)
    ids[0, 9:] = 0
    found = router_losses(config(expert_top_k=top_k, pad_token_id=0), logits, ids)
    assert [f.item() for f in found] == pytest.approx(literal_losses(logits, ids, top_k))
    masked = router_losses(config(expert_top_k=top_k), logits, None, attention_mask=ids)
    assert masked == found
    everything = router_losses(config(expert_top_k=top_k), logits, ids)
    expected = literal_losses(logits, torch.ones_like(ids), top_k)
    assert [f.item() for f in everything] == pytest.approx(expected)


def test_balanced_routing_has_a_balancing_loss_of_one():
    logits = [10 * torch.eye(6).repeat(4, 1)[None]]
    assert router_losses(config(expert_top_k=1), logits).load_balancing.item() == pytest.approx(1)
    collapsed = [torch.tensor([50.0, 50, 0, 0, 0, 0]).expand(1, 24, 6)]
    assert router_losses(config(), collapsed).load_balancing.item() == pytest.approx(3)


def test_losses_of_padding_alone_are_zero_and_finite():
    logits = [call.requires_grad_() for call in random_logits()]
    ids = torch.zeros(2, 13, dtype=torch.long)
    found = router_losses(config(pad_token_id=0), logits, ids)
    assert [f.item() for f in found] == [0, 0]
    sum(found).backward()
    assert all((call.grad == 0).all() for call in logits)


def test_processes_that_share_counts_average_to_the_losses_of_the_whole_batch(monkeypatch):
    cfg = config(pad_token_id=0)
    logits = random_logits(rows=4)
    ids = torch.ones(4, 13, dtype=torch.long)
    ids[0, 5:] = ids[1, 11:] = ids[3, 2:] = 0
    whole = router_losses(cfg, logits, ids)
    halves = [([call[rows] for call in logits], ids[rows]) for rows in (slice(2), slice(2, 4))]

    counts = []
    monkeypatch.setattr(moe.dist, 'is_initialized', lambda: True)
    monkeypatch.setattr(moe.dist, 'all_reduce', lambda tensor: counts.append(tensor.clone()))
    for half in halves:
        router_losses(cfg, *half)
    monkeypatch.setattr(moe.dist, 'all_reduce', lambda tensor: tensor.copy_(sum(counts)))
    parts = [router_losses(cfg, *half) for half in halves]
    weights = [half_ids.sum() / ids.sum() for _, half_ids in halves]
    for i in range(2):
        average = sum(w * part[i] for w, part in zip(weights, parts, strict=True))
        torch.testing.assert_close(average, whole[i])


@pytest.mark.parametrize('name', MEMBERS)
def test_training_adds_the_router_losses_of_all_executed_calls_and_evaluation_none(name):
    model = build(name, pad_token_id=0)
    ids = token_ids() + 1
    ids %= 61
    ids[1, 12:] = 0
    labels = ids.masked_fill(ids == 0, -100)
    evaluated = model(ids, labels=labels)
    routed = model.model(ids, use_cache=False).router_logits
    trained = model.train()(ids, labels=labels)
    assert evaluated.router_losses is None
    assert len(routed) == model.config.effective_depth
    balancing, z = literal_losses(routed, ids != 0, model.config.expert_top_k)
    assert trained.router_losses.load_balancing.item() == pytest.approx(balancing, rel=1e-5)
    assert trained.router_losses.router_z.item() == pytest.approx(z, rel=1e-5)
    added = 0.01 * balancing + 0.001 * z
    assert trained.loss.item() - evaluated.loss.item() == pytest.approx(added, rel=1e-3)


def test_padding_changes_neither_router_losses_nor_their_gradients():
    ids = token_ids(length=9).clamp(min=1)
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], dim=1)
    found = []
    for batch in (ids, padded):
        model = build('asymloop_moe', torch.float64, pad_token_id=0).train()
        losses = model(batch, labels=batch.masked_fill(batch == 0, -100)).router_losses
        sum(losses).backward()
        found.append([*losses, *(g for g in gradients(model).values() if g is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


def test_routing_is_decided_anew_at_each_iteration_by_the_same_routers():
    model = build('asymloop_moe')
    three = model.model(token_ids(), num_iterations=3, use_cache=False).router_logits
    chosen = [choose_experts(call, 2) for call in three]
    # Calls 2, 4 and 6 are the decoder's first layer at three iterations.
    assert not torch.equal(chosen[2], chosen[4])
    assert not torch.equal(chosen[4], chosen[6])
    routers = [n for n, _ in model.named_parameters() if n.endswith('router.weight')]
    assert len(routers) == model.config.num_hidden_layers


@pytest.mark.parametrize('loss', ['load_balancing', 'router_z'])
def test_each_router_loss_reaches_every_router(loss):
    model = build('asymloop_moe').train()
    ids = token_ids()
    getattr(model(ids, labels=ids).router_losses, loss).backward()
    for name, parameter in model.named_parameters():
        if name.endswith('router.weight'):
            assert parameter.grad.abs().sum() > 0, name


def test_balancing_alone_spreads_tokens_over_experts():
    layer = mixture()
    x = torch.randn(1, 256, 32, dtype=torch.float64) + 1
    optimizer = torch.optim.SGD([layer.router.weight], lr=0.05)
    values = []
    for _ in range(40):
        loss = router_losses(config(), [layer(x)[1]]).load_balancing
        values.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert values[0] > 1.1
    assert values[-1] - 1 < 0.2 * (values[0] - 1)


@pytest.mark.parametrize('ties', [False, True])
@pytest.mark.parametrize('recompute', ['own', 'wrapper'])
@pytest.mark.parametrize('name', MEMBERS)
def test_recomputation_routes_the_same_and_counts_router_losses_once(name, recompute, ties):
    models = [build(name).train(), build(name, activation_checkpointing=recompute == 'own').train()]
    if recompute == 'wrapper':
        apply_activation_checkpointing(models[1], check_fn=models[1].activation_checkpointing_fn)
    outputs = []
    for model in models:
        if ties:
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith('router.weight'):
                        parameter.zero_()
        ids = token_ids()
        outputs.append(model(ids, labels=ids))
        outputs[-1].loss.backward()
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert outputs[0].router_losses == outputs[1].router_losses
    expected, found = map(gradients, models)
    assert expected.keys() == found.keys()
    for parameter_name, gradient in expected.items():
        assert torch.equal(gradient, found[parameter_name]), parameter_name


def test_microbatches_differ_from_one_batch_only_by_their_own_token_counts():
    """The balancing loss is a product of two means of the microbatch: everything else is linear."""
    ids = token_ids(rows=32, length=33)
    results = []
    for size in (32, 8):
        model = build('asymloop_moe', torch.float64).train()
        parts = []
        for rows in ids.split(size):
            output = model(rows, labels=rows)
            (output.loss * len(rows) / len(ids)).backward()
            parts.append([output.loss.detach(), *output.router_losses])
        results.append((torch.tensor(parts).mean(dim=0), gradients(model)))
    (whole, whole_grads), (split, split_grads) = results
    torch.testing.assert_close(split[2], whole[2], atol=0, rtol=1e-6)
    # With 264 tokens a microbatch an expert's share varies by some percent; the excess falls as 1 / T.
    assert 0 < abs(split[1] - whole[1]) < 0.05
    assert abs(split[0] - whole[0]) < 0.01 * 0.05
    for name, gradient in whole_grads.items():
        assert (split_grads[name] - gradient).norm() < 1e-2 * gradient.norm(), name


@pytest.mark.parametrize('name', MEMBERS)
def test_flops_and_parameters_are_those_of_the_module(name):
    cfg = AsymLoopConfig(**{**SMALL, **FAMILY[name], 'attn_backend': 'reference'})
    model = AsymLoopForCausalLM(cfg).eval()
    assert parameter_count(cfg) == sum(p.numel() for p in model.parameters())
    idle = sum(
        p.numel()
        for n, p in model.named_parameters()
        if (found := re.search(r'experts\.(\d+)\.', n)) and int(found[1]) >= cfg.expert_top_k
    )
    assert active_parameter_count(cfg) == parameter_count(cfg) - idle
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(2, 16, dtype=torch.long), use_cache=False)
    assert forward_flops(cfg, 2, 16) == counter.get_total_flops()


@pytest.mark.parametrize('name', YAMLS)
def test_table_14_yamls_have_the_dense_models_active_parameters(request, name):
    root = request.config.rootpath / 'yamls'
    run = OmegaConf.load(root / 'moe' / f'{name}.yaml')
    system, scale = re.fullmatch(r'(.+)-moe(?:-alrs)?-(\w+)', name).groups()
    dense = OmegaConf.load(root / f'{system}-{scale}.yaml')
    assert run.run_name == name
    assert run.max_duration == {'60m': '3052ba', '135m': '5722ba'}[scale]
    assert ('alrs' in run.algorithms) == ('-alrs-' in name)

    def fields(yaml):
        model = OmegaConf.to_container(yaml.model, resolve=True)
        assert model.pop('name') == 'asymloop_causal_lm'
        return AsymLoopConfig(**model)

    sparse = fields(run)
    layers = sparse.num_hidden_layers
    routers = layers * 768 * 8
    assert active_parameter_count(sparse) == parameter_count(fields(dense)) + routers
    assert parameter_count(sparse) == active_parameter_count(sparse) + layers * 6 * 3 * 768 * 1024
    with torch.device('meta'):
        model = AsymLoopForCausalLM(sparse)
    assert parameter_count(sparse) == sum(p.numel() for p in model.parameters())


def test_each_experts_matrices_are_matrices_of_their_own_for_alrs():
    model = ComposerAsymLoopCausalLM(**SMALL | FAMILY['asymloop_moe'])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        roles = roles_of(model)
    experts = {n: r for n, r in roles.items() if '.experts.' in n}
    assert len(experts) == 4 * 4 * 3
    assert {r.kind for r in experts.values()} == {'ffn'}
    assert {r.stack for r in experts.values()} == {'encoder', 'decoder'}
    assert all(len(r.shape) == 2 for r in experts.values())
    assert {r.kind for n, r in roles.items() if n.endswith('router.weight')} == {'other'}


def test_composer_trains_with_alrs_and_logs_the_router_losses():
    torch.manual_seed(0)
    model = ComposerAsymLoopCausalLM(**SMALL | FAMILY['asymloop_moe'] | {'pad_token_id': 0})
    rows = [{'input_ids': row, 'labels': row} for row in token_ids(rows=32)]
    memory, history = InMemoryLogger(), History()
    trainer = Trainer(
        model=model,
        train_dataloader=DataSpec(
            torch.utils.data.DataLoader(rows, batch_size=8),
            get_num_tokens_in_batch=lambda batch: batch['input_ids'].numel(),
        ),
        eval_dataloader=Evaluator(
            label='eval',
            dataloader=torch.utils.data.DataLoader(rows, batch_size=8),
            metric_names=['LanguageCrossEntropy'],
        ),
        max_duration='4ba',
        eval_interval='4ba',
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        schedulers=ConstantWithWarmupScheduler(t_warmup='0ba'),
        device_train_microbatch_size=4,
        accumulate_train_batch_on_tokens=True,
        algorithms=[ALRS(window='1dur', update_interval='2ba', transition='1ba')],
        callbacks=[history],
        loggers=[memory],
        device='cpu',
        progress_bar=False,
    )
    trainer.fit()
    logged = {name: memory.data[f'loss/train/{name}'][-1][1] for name in ('total', 'router_z')}
    balancing = [value for _, value in memory.data['loss/train/load_balancing']]
    assert len(balancing) == 4
    assert all(0.99 < value < 2 for value in balancing)
    assert logged['router_z'] < logged['total']
    rates = {n: lr for n, lr in history.rates[-1].items() if '.experts.' in n}
    assert len(rates) == 48
    assert len(set(rates.values())) > 40

    trained = next(iter(memory.data['metrics/eval/LanguageCrossEntropy']))[1]
    model.eval()
    with torch.no_grad():
        ids = token_ids(rows=32)
        assert float(trained) == pytest.approx(model.model(ids, labels=ids).loss.item(), rel=1e-4)
    trainer.close()


@pytest.mark.parametrize(('fields', 'message'), [
    ({'n_experts': -1}, 'n_experts=-1'),
    ({'n_experts': 2.0}, r'n_experts=2\.0'),
    ({'n_experts': 1}, 'n_experts=1 is one dense SwiGLU'),
    ({'expert_top_k': 0}, 'expert_top_k=0 must be'),
    ({'expert_top_k': 7}, 'expert_top_k=7 is more than n_experts=6'),
    ({'normalize_expert_weights': 1}, 'normalize_expert_weights=1 must be true or false'),
    ({'normalize_expert_weights': True, 'expert_top_k': 1}, 'never reaches the router'),
    ({'normalize_expert_weights': True, 'expert_top_k': 6}, 'has no effect'),
    ({'load_balancing_coef': -0.1}, r'load_balancing_coef=-0\.1'),
    ({'router_z_coef': math.inf}, 'router_z_coef=inf'),
    ({'n_experts': 0, 'expert_top_k': 3}, 'expert_top_k=3 has no effect with n_experts=0'),
    ({'n_experts': 0, 'normalize_expert_weights': True}, 'no effect with n_experts=0'),
    ({'n_experts': 0, 'load_balancing_coef': 0.0}, 'no effect with n_experts=0'),
    ({'n_experts': 0, 'router_z_coef': 0.0}, 'no effect with n_experts=0'),
])  # fmt: skip
def test_contradictory_or_idle_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)
