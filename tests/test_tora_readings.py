"TORA-ViT: readings of the fusion, which part of the gates matters, attacks on the gates, and runs of the experiments."

import pytest, timm, torch
import numpy as np
from robust_nbdev.attacks import *
from robust_nbdev.core import *
from robust_nbdev.experiments import *
from robust_nbdev.tora import *
from robust_nbdev.tora import _training_passes
from robust_nbdev.vit import *
from robust_nbdev.test_utils import *


def images(n=3, seed=0):
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def noisy(scale=0.3, **kw):
    "A tiny TORA-ViT whose parts are not zero"
    torch.manual_seed(1)
    m = tora_vit(tiny_vit(num_classes=4), d=2, **kw)
    for p in m.parameters():
        if p.requires_grad:
            p.data += scale * torch.randn_like(p)
    return m


def with_state_of(m, **kw):
    "Another reading with the same weights"
    other = tora_vit(tiny_vit(num_classes=4), d=2, **kw)
    other.load_state_dict(m.state_dict())
    return other


named = pytest.mark.parametrize('name', READINGS)


# --- the switches
# -------------------------------------------------------------------------------------------------------------------
def test_the_default_is_the_first_reading():
    assert Reading() == READINGS['mean over tokens'] and len(set(READINGS.values())) == len(READINGS) == 10


@pytest.mark.parametrize(
    'kw,words',
    [
        (dict(gate='row'), 'gate must be one of'),
        (dict(values='keys'), 'values must be one of'),
        (dict(tokens='out'), 'tokens must be one of'),
        (dict(gate='key', folded=True), 'folded'),
        (dict(gate='mean', average=False), 'average=False'),
        (dict(residual=False), 'residual'),
        (dict(tokens='fusion'), "values='features'"),
        (dict(tokens='fusion', values='features', gate='mean'), 'gather'),
        (dict(tokens='fusion', values='features', residual=False), 'residual'),
        (dict(tokens='fusion', values='features', folded=True), 'folded'),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_model_changes(kw, words):
    m = tiny_vit(num_classes=4)
    before = repr(state_of(m))
    with pytest.raises(ValueError, match=words):
        tora_vit(m, **kw)
    assert repr(state_of(m)) == before


def test_a_misspelt_switch_is_not_taken_for_one_of_timms():
    with pytest.raises(TypeError, match='residul'):
        tora_vit(tiny_vit(num_classes=4), residul=False)


def test_a_switch_goes_with_a_name_too():
    m = tora_vit('vit_tiny_patch16_224', pretrained=False, num_classes=5, img_size=32, gate='mean')
    assert m.model.tora.about['gate'] == 'mean' and m.model.adapters[0].gate.reading == Reading(gate='mean')


@pytest.mark.parametrize('name', [k for k in READINGS if k not in ('features alone', 'gathering tokens')])
def test_at_first_the_function_is_the_models(name):
    m, x = tiny_vit(num_classes=4), images()
    z = m(x)
    assert torch.allclose(tora_vit(m, **vars(READINGS[name]))(x), z, atol=1e-5)


def test_a_sum_is_n_times_the_mean():
    m = Gate(8)
    s = Gate(8, Reading(average=False))
    s.load_state_dict(m.state_dict())
    z, da, dr = torch.randn(3, 2, 5, 8)
    assert torch.allclose(5 * m(z, z + da, z + dr, da, dr), s(z, z + da, z + dr, da, dr), atol=1e-5)


@pytest.mark.parametrize('average', [True, False])
@pytest.mark.parametrize('values', ['changes', 'features'])
def test_folded_is_the_same_function(average, values):
    m = noisy(average=average, values=values)
    assert torch.allclose(
        m(images()), with_state_of(m, average=average, values=values, folded=True)(images()), atol=1e-4
    )


def test_the_mean_gate_of_equal_rows_is_the_diagonal_one():
    "With K=0 all gates are one half, whatever they are averaged over"
    a, b = [Gate(8, Reading(gate=o)) for o in ('mean', 'diagonal')]
    b.load_state_dict(a.state_dict())
    for g in (a, b):
        torch.nn.init.zeros_(g.k.weight)
    z, da, dr = torch.randn(3, 2, 5, 8)
    ins = (z, z + da, z + dr, da, dr)
    assert torch.allclose(a(*ins), b(*ins), atol=1e-6) and torch.allclose(a(*ins), (da + dr) / 2, atol=1e-6)


def test_features_are_the_tokens_and_the_changes():
    "V(z + d) weighted over adapters is V z plus what is weighted of the changes, where each token keeps its own"
    own = dict(gate='diagonal')
    a, b = Gate(8, Reading(values='features', **own)), Gate(8, Reading(**own))
    torch.nn.init.normal_(a.v.weight)
    b.load_state_dict(a.state_dict())
    z, da, dr = torch.randn(3, 2, 5, 8)
    ins = (z, z + da, z + dr, da, dr)
    assert torch.allclose(a(*ins), b(*ins) + a.v(z), atol=1e-5)


def test_without_the_residual_the_fused_features_are_all_that_is_left():
    a, b = [Branches(8, 2, reading=Reading(values='features', residual=o)) for o in (True, False)]
    for p in a.parameters():
        torch.nn.init.normal_(p)
    b.load_state_dict(a.state_dict())
    z = torch.randn(2, 6, 8)
    assert torch.allclose(a(z) - z, b(z), atol=1e-5)


def test_features_alone_averaged_over_tokens_are_nearly_the_same_for_all():
    m = tora_vit(tiny_vit(num_classes=4), values='features', residual=False)
    out = block_outputs(m, images())[0]
    assert out.std(1).max() < 0.1 * block_outputs(tiny_vit(num_classes=4), images())[0].std(1).max()


# --- tokens beside the sequence
# -------------------------------------------------------------------------------------------------------------------
def gathering(scale=0.3):
    return noisy(scale, values='features', tokens='fusion')


def test_tokens_beside_the_sequence_pass_the_blocks_unchanged():
    m, x = gathering(), images()
    seen = []
    hooks = [b.register_forward_pre_hook(lambda mod, args: seen.append(args[0])) for b in m.model.adapters]
    ins = []
    hooks += [b.register_forward_pre_hook(lambda mod, args: ins.append(args[0])) for b in m.model.blocks]
    m(x)
    for h in hooks:
        h.remove()
    assert torch.equal(seen[1][:, :2], ins[1][:, :2]) and not torch.equal(seen[1][:, 2:], ins[1][:, 2:])


def test_the_sequence_does_not_see_tokens_beside_it():
    m, x = gathering(), images()
    before = m.model.forward_features(2 * x - 1)[:, 2:]
    m.model.tora.shift['acc'].data += 1
    keyed = [b.gate.k.weight for b in m.model.adapters] + [b.gate.v.weight for b in m.model.adapters]
    for p in keyed:
        p.data.zero_()  # so that the fusion does not carry it either
    silent = m.model.forward_features(2 * x - 1)[:, 2:]
    m.model.tora.shift['acc'].data += 1
    assert torch.equal(m.model.forward_features(2 * x - 1)[:, 2:], silent) and not torch.equal(before, silent)


def test_tokens_beside_the_sequence_learn_of_the_image_by_the_fusion_alone():
    x = images()
    still = tora_vit(tiny_vit(num_classes=4), values='features', tokens='fusion')(x)
    assert torch.allclose(still[0], still[1], atol=1e-6) and not torch.allclose(*gathering()(x)[:2], atol=1e-3)


def test_every_part_of_gathering_tokens_gets_a_gradient():
    m = gathering()
    m(images()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for o in tora_parts(m).values() for p in o)


def test_a_mask_holds_for_tokens_beside_the_sequence():
    m, x = gathering(), images()
    seen = torch.ones(1, 1, 17, 17, dtype=torch.bool)
    assert torch.allclose(
        m.model.forward_features(2 * x - 1, attn_mask=seen), m.model.forward_features(2 * x - 1), atol=1e-5
    )
    assert len(patch_grid(m, x)) == 2 and [len(o[0, 0]) for o in gate_maps(m, x)] == [17, 17]


# --- files, pictures, cost
# -------------------------------------------------------------------------------------------------------------------
@named
def test_a_file_brings_its_reading_along(name, tmp_path):
    m, f = noisy(**vars(READINGS[name])), tmp_path / 'a.safetensors'
    save_adapters(m, f)
    again = load_adapters(tiny_vit(num_classes=4), f)
    assert torch.equal(again(images()), m(images())) and again.model.tora.about == m.model.tora.about


def test_a_file_of_another_reading_is_refused(tmp_path):
    save_adapters(noisy(values='features'), tmp_path / 'a.safetensors')
    with pytest.raises(ValueError, match='values features.*values changes'):
        load_adapters(noisy(), tmp_path / 'a.safetensors')


def test_a_file_without_switches_is_of_the_first_reading(tmp_path):
    "As files were before there were any"
    from safetensors import safe_open
    from safetensors.torch import save_file

    m, f = noisy(), tmp_path / 'a.safetensors'
    save_adapters(m, f)
    with safe_open(f, 'pt') as h:
        ts, about = {k: h.get_tensor(k) for k in h.keys()}, h.metadata()
    save_file(ts, f, {k: v for k, v in about.items() if k not in ('average', 'values', 'residual', 'tokens')})
    assert torch.equal(load_adapters(tiny_vit(num_classes=4), f)(images()), m(images()))


@named
def test_pictures_and_removal(name):
    x, m = images(), tiny_vit(num_classes=4)
    z = m(x)
    tora_vit(m, **vars(READINGS[name]))
    assert gate_pictures(m, x).shape == (2, 3, 2, 4, 4) and gate_pictures(m, x).abs().max() < 0.2
    assert torch.equal(remove_tora(m)(x), z)


def test_what_each_reading_costs_at_the_size_of_the_slides():
    "One N x N product more or less is 0.36 GFLOPs over the twelve blocks"
    with torch.device('meta'):
        x = torch.rand(1, 3, 224, 224)

    def cost(**kw):
        with torch.device('meta'):
            return 12 * (multiply_adds(tora_vit(timm.create_model('vit_base_patch16_224', depth=1), **kw), x)) / 1e9

    N, D = 197, 768
    product, projection = 12 * N * N * D / 1e9, 12 * N * D * D / 1e9
    assert cost() - cost(gate='diagonal') == pytest.approx(3 * product, abs=0.02)
    assert cost(gate='key') - cost() == pytest.approx(product, abs=0.02)
    assert cost(gate='both') == pytest.approx(cost(gate='key')) and cost(average=False) == pytest.approx(cost())
    assert cost(gate='mean') - cost(gate='diagonal') == pytest.approx(product, abs=0.02)
    assert cost() - cost(folded=True) == pytest.approx(product + 2 * projection, abs=0.1)


# --- which part of the gates matters
# -------------------------------------------------------------------------------------------------------------------
@named
def test_forced_gates_are_the_same_everywhere(name):
    m, x = noisy(**vars(READINGS[name])), images()
    z = m(x)
    with forced_gates(m, 0.25):
        maps = gate_maps(m, x)
        assert all((w[:, 0] == w[0, 0, 0, 0]).all() for w in maps)
        assert all(torch.allclose(w[:, 0] * 3, w[:, 1]) for w in maps) and not torch.allclose(m(x), z, atol=1e-3)
    assert torch.equal(m(x), z)


@pytest.mark.parametrize('name', ['mean over tokens', 'over keys', 'over both', 'own token', 'diagonal'])
def test_gates_forced_to_one_half_are_those_of_no_decision(name):
    "With Q=0 no softmax prefers anything"
    m, x = noisy(**vars(READINGS[name])), images()
    with forced_gates(m):
        half = m(x)
    for b in m.model.adapters:
        torch.nn.init.zeros_(b.gate.q.weight)
    assert torch.allclose(m(x), half, atol=1e-4)


def test_one_adapter_alone_hears_nothing_of_the_other():
    m, x = noisy(gate='mean'), images()
    with forced_gates(m, 1.0):
        z = m(x)
        for b in m.model.adapters:
            b.sides['rob'].up.bias.data += 1
        assert torch.allclose(m(x), z, atol=1e-5)
    with pytest.raises(ValueError, match='between 0 and 1'), forced_gates(m, 2):
        pass
    with pytest.raises(ValueError, match='no gates'), forced_gates(single_adapter(tiny_vit())):
        pass


def test_variants_swap_what_they_name_and_leave_the_last_gates():
    m = noisy()
    last = gates_of(m)
    first = {k: v + 1 for k, v in last.items()}
    seen = {name: gates_of(o) for name, o in gate_variants(m, first, last)}
    k, v = 'adapters.0.gate.k.weight', 'adapters.1.gate.v.weight'
    assert torch.equal(seen['phase 1'][k], first[k]) and torch.equal(seen['phase 2'][v], last[v])
    assert torch.equal(seen['QK of phase 2'][k], last[k]) and torch.equal(seen['QK of phase 2'][v], first[v])
    assert torch.equal(seen['V of phase 2'][k], first[k]) and torch.equal(seen['V of phase 2'][v], last[v])
    assert all(torch.equal(o, last[n]) for n, o in gates_of(m).items()) and len(seen) == 7


def test_variants_leave_the_last_gates_after_an_error_too():
    m = noisy()
    last = gates_of(m)

    def fails(m):
        raise RuntimeError('no')

    with pytest.raises(RuntimeError):
        decompose(m, {k: v + 1 for k, v in last.items()}, last, fails)
    assert all(torch.equal(o, last[n]) for n, o in gates_of(m).items())


def test_a_decomposition_is_a_table():
    m = noisy()
    got = decompose(m, gates_of(m), gates_of(m), lambda m: dict(z=m(images()).sum().item()))
    assert list(got.index[:2]) == ['phase 1', 'phase 2'] and got.z['phase 1'] == pytest.approx(got.z['V of phase 2'])


# --- attacks on the gates
# -------------------------------------------------------------------------------------------------------------------
def share(m, x):
    return (WithGates(m, share=True)(x)[:, 4:] + 100).detach()


def test_shares_are_those_of_the_maps():
    m, x = noisy(), images()
    want = torch.stack([w[:, 0].mean((1, 2)) for w in gate_maps(m, x)], 1)
    assert torch.allclose(share(m, x), want, atol=1e-4)
    with forced_gates(m, 0.25):
        assert torch.allclose(share(m, x), torch.tensor(0.25), atol=1e-4)


def test_an_attack_on_one_block_moves_that_block():
    m, x = noisy(0.6), images(8)
    net, y = WithGates(m, share=True), m(images(8)).argmax(1)
    up, down = [PGD(0.3, steps=5, loss=gate_loss(4, w, block=1, alone=True))(net, x, y) for w in (1.0, -1.0)]
    assert share(m, up)[:, 1].mean() > share(m, x)[:, 1].mean() > share(m, down)[:, 1].mean()


def test_alone_the_cross_entropy_does_not_count():
    z = torch.tensor([[1.0, 2.0, -99.5, -99.0]])
    y = torch.tensor([0])
    assert gate_loss(2, 3.0, alone=True)(z, y).item() == pytest.approx(3 * 0.75, abs=1e-4)
    assert gate_loss(2, 3.0, block=0, alone=True)(z, y).item() == pytest.approx(1.5, abs=1e-4)
    assert gate_loss(2, 0.0)(z, y).item() == pytest.approx(ce(z[:, :2], y).item())


def test_the_gate_goes_first():
    m, x = noisy(0.6), images(8)
    net, y = WithGates(m, share=True), m(images(8)).argmax(1)
    moved = gate_loss(4, 1.0, alone=True)
    first = PGD(0.3, steps=5, loss=moved)(net, x, y, seed=3)
    only = GateFirst(0.3, steps=0, gate_steps=5, gate=moved, loss=gate_loss(4, 0.0))(net, x, y, seed=3)
    assert torch.allclose(only, first, atol=1e-6)
    both = GateFirst(0.3, steps=3, gate_steps=5, gate=moved, loss=gate_loss(4, 0.0))(net, x, y, seed=3)
    assert (both - x).abs().max() <= 0.3 + 1e-6 and not torch.allclose(both, first, atol=1e-3)
    with pytest.raises(TypeError, match='loss of the first steps'):
        GateFirst(0.3)


# --- the experiments
# -------------------------------------------------------------------------------------------------------------------
def smoke(name, **where):
    found = [o for o in trials_of(name, 'smoke') if all(o.key[k] == v for k, v in where.items())]
    return found[0]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    "Weights are kept in a folder of the test"
    (tmp_path / 'settings.ini').write_text(f'[DEFAULT]\nout = {tmp_path / "out"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path / 'out' / 'tora_weights'


def test_methods_get_the_same_number_of_passes():
    found = trials_of('tora.table3', 'laptop')
    assert len({_training_passes(o.key) for o in found}) == 1 and len({o.cost for o in found}) == 1


def test_phase_1_is_trained_once_for_all_lam_and_changes_no_row(kept):
    low, high = [smoke('tora.table2', lam=o) for o in (0.1, 0.9)]
    low.fn(**low.key)
    with_kept = high.fn(**high.key)
    assert len(list(kept.iterdir())) == 3
    for f in kept.iterdir():
        f.unlink()
    anew = high.fn(**high.key)
    assert all((v == anew.verdicts[k]).all() for k, v in with_kept.verdicts.items())


def test_rows_of_the_tables(kept):
    t = smoke('tora.readings', reading='own token')
    got = t.fn(**t.key)
    assert set(got.verdicts) == {'clean', 'fgsm', 'pgd5', 'strong'}
    assert 0 <= got.numbers['share'] <= 1 and got.numbers['strong'] <= got.numbers['clean']


def test_parts_gates_and_corruptions_give_verdicts(kept):
    where = dict(method='TORA', reading='mean over tokens')
    parts, gate = [smoke(o, **where) for o in ('tora.parts', 'tora.gate')]
    assert set(parts.fn(**parts.key).verdicts) >= {'phase 1 clean', 'QK of phase 2 pgd5', 'robustness adapter pgd5'}
    got = gate.fn(**gate.key | dict(bs=4))  # more images than fit into one batch
    assert len(got.verdicts) == 12 and got.numbers['PGD: most'] < 0.5
    t = smoke('tora.corruptions', method='pretrained')
    rows = t.fn(**t.key | dict(bs=4))
    assert len(rows.verdicts) == 16 and rows.numbers['corrupted'] == pytest.approx(
        100 * np.mean([v.mean() for k, v in rows.verdicts.items() if k != 'clean'])
    )
