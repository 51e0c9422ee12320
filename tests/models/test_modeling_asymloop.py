# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from family import FAMILY, HALVES, build, token_ids
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM, GlobalKV
from asymloop_foundry.models.reference import reference_logits

LLAMA_NAMES = {
    'encoder.': 'layers.',
    'decoder.': 'layers.',
    '.attn.': '.self_attn.',
    '.ffn.': '.mlp.',
    'attn_norm': 'input_layernorm',
    'ffn_norm': 'post_attention_layernorm',
}


def llama_name(name: str) -> str:
    for ours, theirs in LLAMA_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize('n_kv_heads', [4, 2])
def test_dense_equals_llama_in_logits_and_gradients(n_kv_heads):
    ours = build('dense', n_kv_heads=n_kv_heads)
    config = ours.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_encoder_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=n_kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=False,
        )
    )
    theirs.load_state_dict({llama_name(k): v for k, v in ours.state_dict().items()})
    ids = token_ids()
    a, b = ours(ids, labels=ids), theirs(ids, labels=ids)
    torch.testing.assert_close(a.logits, b.logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    reference = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter.grad, reference[llama_name(name)].grad) < 1e-4, name


def test_one_pass_of_a_decoder_without_global_kv_equals_dense():
    dense = build('dense')
    looped = build('full_loop', n_decoder_layers=4, num_iterations=1)
    looped.load_state_dict(
        {k.replace('encoder', 'decoder'): v for k, v in dense.state_dict().items()}
    )
    torch.testing.assert_close(looped(token_ids()).logits, dense(token_ids()).logits)


@pytest.mark.parametrize('name', FAMILY)
def test_every_member_equals_the_literal_reference(name):
    model = build(name, torch.float64)
    config = model.config
    ids = token_ids()
    weights = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    expected = reference_logits(
        weights,
        ids,
        n_heads=config.n_heads,
        n_encoder_layers=config.n_encoder_layers,
        n_decoder_layers=config.n_decoder_layers,
        num_iterations=config.num_iterations,
        additive_injection=config.input_injection == 'additive',
        expert_top_k=config.expert_top_k,
        normalize_expert_weights=config.normalize_expert_weights,
    )
    output = model(ids, labels=ids)
    # The rotary table is fp32 in the model and fp64 in the reference.
    torch.testing.assert_close(output.logits, expected, atol=2e-5, rtol=1e-5)
    output.loss.backward()
    next_token_loss(expected, ids).backward()
    for parameter_name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, weights[parameter_name].grad) < 1e-4, parameter_name


@pytest.mark.parametrize('name', FAMILY)
def test_a_token_never_changes_logits_before_it(name):
    # In double precision: another token changes which rows of an expert are multiplied together.
    model = build(name, torch.float64)
    ids = token_ids(rows=1)
    before = model(ids).logits
    for i in (1, 7, ids.shape[1] - 1):
        changed = ids.clone()
        changed[0, i] = (changed[0, i] + 1) % model.config.vocab_size
        after = model(changed).logits
        torch.testing.assert_close(after[:, :i], before[:, :i], atol=1e-12, rtol=0)
        assert (after[:, i:] - before[:, i:]).abs().amax(dim=-1).gt(1e-6).all()


@pytest.mark.parametrize('k', [1, 3, 5])
def test_encoder_and_global_kv_run_once_whatever_k_is(k):
    model = build('asymloop')
    calls = {'encoder': 0, 'global_kv': 0, 'decoder': 0}
    for part in calls:
        for module in getattr(model.model, part):
            module.register_forward_hook(
                lambda *_, part=part: calls.__setitem__(part, calls[part] + 1)
            )
    model(token_ids(), num_iterations=k)
    assert calls == {'encoder': 2, 'global_kv': 2, 'decoder': 2 * k}


def test_k_given_at_the_call_equals_k_of_the_configuration():
    five = build('asymloop', num_iterations=5)
    three = build('asymloop')
    three.load_state_dict(five.state_dict())
    ids = token_ids()
    torch.testing.assert_close(three(ids, num_iterations=5).logits, five(ids).logits)
    assert not torch.allclose(three(ids).logits, five(ids).logits)


def test_additive_injection_starts_from_a_zero_state():
    model = build('additive_injection', num_iterations=1)
    plain = build('no_global_kv', num_iterations=1)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(token_ids()).logits, plain(token_ids()).logits)


@pytest.mark.parametrize('name', FAMILY)
def test_every_parameter_gets_a_gradient(name):
    model = build(name).train()
    ids = token_ids()
    model(ids, labels=ids).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


PAPER_PARAMETERS = {
    # Table 5, in the paper's units of a million; before QKNorm weights, which Table 10 includes.
    '60m': (dict(d_model=768, n_heads=6, d_ff=2048, layers=6), 91_825_920, 95_366_016),
    '135m': (dict(d_model=768, n_heads=12, d_ff=2048, layers=12), 134_302_464, 141_381_504),
    '350m': (dict(d_model=1024, n_heads=16, d_ff=2736, layers=24), 368_231_424, 393_399_552),
    '1b': (dict(d_model=2048, n_heads=32, d_ff=5461, layers=24), 1_339_607_040, 1_440_272_640),
}


def count(layers: int, asym: bool, **fields) -> int:
    if asym:
        topology = dict(
            n_encoder_layers=layers // 2, n_decoder_layers=layers // 2, qk_norm='decoder'
        )
    else:
        topology = dict(n_encoder_layers=layers, n_decoder_layers=0, num_iterations=1)
    topology.update(fields)
    with torch.device('meta'):
        model = AsymLoopForCausalLM(AsymLoopConfig(vocab_size=32128, **topology))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize('scale', PAPER_PARAMETERS)
def test_parameter_counts_equal_table_5(scale):
    fields, dense, asym = PAPER_PARAMETERS[scale]
    assert count(asym=False, **fields) == dense
    assert count(asym=True, **fields) == asym


@pytest.mark.parametrize(('scale', 'millions'), [('60m', 100.23), ('135m', 151.11)])
def test_widened_full_loop_equals_table_10(scale, millions):
    fields = dict(PAPER_PARAMETERS[scale][0], d_ff=2656)
    loop = dict(n_encoder_layers=0, n_decoder_layers=fields['layers'], num_iterations=2)
    n = count(asym=False, **fields, **loop, global_kv=False)
    assert round(n / 1e6, 2) == millions


def test_parameter_matched_ablation_has_asymloops_parameters():
    fields = dict(PAPER_PARAMETERS['60m'][0], d_ff=2304)
    n = count(asym=True, **fields, global_kv=False)
    # The wider layers hold exactly the Global matrices' parameters; the Global keys' norms are gone.
    assert n == PAPER_PARAMETERS['60m'][2] - 3 * 128


def test_initialisation_is_normal_with_unit_norms():
    config = AsymLoopConfig(
        vocab_size=512, d_model=128, n_heads=4, d_ff=256, qk_norm='all', **HALVES
    )
    torch.manual_seed(0)
    for name, parameter in AsymLoopForCausalLM(config).named_parameters():
        if 'norm' in name:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std().item() / 0.02 - 1) < 0.03, name
            assert abs(parameter.mean().item()) < 1e-3, name


def test_truncated_initialisation_stays_within_the_cutoff():
    config = AsymLoopConfig(vocab_size=512, d_model=128, n_heads=4, d_ff=256, init_cutoff=3.0)
    for name, parameter in AsymLoopForCausalLM(config).named_parameters():
        if 'norm' not in name:
            assert parameter.abs().max() <= 0.06, name
            assert parameter.abs().max() > 0.05, name


def test_unused_parts_have_no_parameters():
    names = [n for n, _ in build('no_local_kv').named_parameters() if 'decoder' in n]
    assert not any('k_proj' in n or 'v_proj' in n or 'k_norm' in n for n in names)
    assert not any(isinstance(m, GlobalKV) for m in build('no_global_kv').modules())
    assert not any(
        'q_norm' in n or 'k_norm' in n for n, _ in build('no_qk_norm').named_parameters()
    )


@pytest.mark.parametrize('name', ['dense', 'full_loop', 'asymloop', 'no_local_kv'])
def test_activation_checkpointing_gives_the_same_loss_and_gradients(name):
    plain, recomputed = build(name).train(), build(name, activation_checkpointing=True).train()
    recomputed.load_state_dict(plain.state_dict())
    ids = token_ids()
    losses = [model(ids, labels=ids).loss for model in (plain, recomputed)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (parameter_name, a), (_, b) in zip(
        plain.named_parameters(), recomputed.named_parameters(), strict=True
    ):
        torch.testing.assert_close(a.grad, b.grad, msg=parameter_name)


def test_training_makes_no_logits_unless_asked():
    model = build('asymloop').train()
    ids = token_ids()
    assert model(ids, labels=ids).logits is None
    assert model(ids, labels=ids, return_logits=True).logits.shape == (2, 19, 61)
    assert model.eval()(ids, labels=ids).logits.shape == (2, 19, 61)


def test_loss_ignores_unscored_labels():
    model = build('asymloop')
    ids = token_ids()
    labels = ids.clone()
    labels[:, 12:] = -100
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, next_token_loss(output.logits[:, :12], ids[:, :12]))


@pytest.mark.parametrize('name', FAMILY)
def test_padding_on_either_side_leaves_real_positions_alone(name):
    model = build(name)
    ids = token_ids(rows=1, length=9)
    alone = model(ids).logits
    pad = torch.zeros(1, 4, dtype=torch.long)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(pad)
    left = model(torch.cat([pad, ids], 1), attention_mask=torch.cat([zeros, ones], 1)).logits
    right = model(torch.cat([ids, pad], 1), attention_mask=torch.cat([ones, zeros], 1)).logits
    torch.testing.assert_close(left[:, 4:], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(right[:, :9], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('name', FAMILY)
@pytest.mark.parametrize('k', [1, 3])
def test_greedy_generation_with_the_cache_equals_that_without(name, k):
    model = build(name)
    k = k if model.config.n_decoder_layers else 1
    prompts = token_ids(rows=2, length=6)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    options = dict(
        attention_mask=mask, max_new_tokens=12, do_sample=False, num_iterations=k, pad_token_id=0
    )
    cached = model.generate(prompts, use_cache=True, **options)
    recomputed = model.generate(prompts, use_cache=False, **options)
    assert cached.shape == (2, 18)
    assert torch.equal(cached, recomputed)


def test_a_cache_filled_with_another_k_is_refused():
    model = build('asymloop')
    cache = model(token_ids(length=5), num_iterations=1, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r'num_iterations=3.*another number'):
        model(token_ids(length=1), past_key_values=cache, use_cache=True)


def test_an_attention_mask_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r'attention_mask has shape \(2, 5\)'):
        build('asymloop')(token_ids(), attention_mask=torch.ones(2, 5))
