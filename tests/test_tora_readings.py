"TORA-ViT: readings of the fusion, which part of the gates matters, attacks on the gates, and runs of the experiments."

import pytest, torch
import numpy as np
from dataclasses import asdict
from robust_nbdev.attacks import *
from robust_nbdev.core import *
from robust_nbdev.experiments import *
from robust_nbdev import tora
from robust_nbdev.tora import *
from robust_nbdev.tora import Branches, _mean_maps, _tora_images, _training_passes
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


# --- the switches
# -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    'kw,words',
    [
        (dict(gate='row'), 'gate must be one of'),
        (dict(gate='key', folded=True), 'folded'),
        (dict(gate='mean', average=False), 'average=False'),
        (dict(tokens='fusion'), "values='features'"),
        (dict(tokens='fusion', values='features', residual=False), 'residual'),
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


@pytest.mark.parametrize('name', [k for k, o in READINGS.items() if o.foldable])
def test_folded_is_the_same_function(name):
    kw = asdict(READINGS[name]) | dict(folded=False)
    m = noisy(**kw)
    assert torch.allclose(m(images()), with_state_of(m, **kw | dict(folded=True))(images()), atol=1e-4)


@pytest.mark.parametrize('name', list(READINGS))
def test_even_weights_are_those_of_a_gate_that_prefers_nothing(name):
    m = noisy(**asdict(READINGS[name]) | dict(folded=False))
    for b in m.model.adapters:
        b.gate.q.weight.data.zero_()
    for g in gate_maps(m, images()):
        assert torch.allclose(g, torch.full_like(g, READINGS[name].even(g.shape[-1])))


def test_three_adapters_are_refused():
    with pytest.raises(ValueError, match='third'):
        Branches(8, 2, ('acc', 'rob', 'third'))


@pytest.mark.parametrize('wrapper', [lambda m: WithGates(m, share=True), WithMaps])
def test_half_precision_does_not_round_the_gates_away(wrapper):
    m, x = noisy(), images()
    full, half = wrapper(m)(x)[:, 4:], wrapper(m.bfloat16())(x.bfloat16())[:, 4:]
    assert half.std() > 0 and (half - full).abs().max() < 0.05


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
@pytest.mark.parametrize('name', ['own token', 'gathering tokens'])
def test_a_file_brings_its_reading_along(name, tmp_path):
    m, f = noisy(**vars(READINGS[name])), tmp_path / 'a.safetensors'
    save_adapters(m, f)
    again = load_adapters(tiny_vit(num_classes=4), f)
    assert torch.equal(again(images()), m(images())) and again.model.tora.about == m.model.tora.about


def test_a_file_of_another_reading_is_refused(tmp_path):
    save_adapters(noisy(values='features'), tmp_path / 'a.safetensors')
    with pytest.raises(ValueError, match='values features.*values changes'):
        load_adapters(noisy(), tmp_path / 'a.safetensors')


# --- which part of the gates matters
# -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name', ['over both', 'gathering tokens'])
def test_forced_gates_are_the_same_everywhere(name):
    m, x = noisy(**vars(READINGS[name])), images()
    z = m(x)
    with forced_gates(m, 0.25):
        maps = gate_maps(m, x)
        assert all((w[:, 0] == w[0, 0, 0, 0]).all() for w in maps)
        assert all(torch.allclose(w[:, 0] * 3, w[:, 1]) for w in maps) and not torch.allclose(m(x), z, atol=1e-3)
    assert torch.equal(m(x), z)


def test_one_adapter_alone_hears_nothing_of_the_other():
    m, x = noisy(gate='mean'), images()
    with forced_gates(m, 1.0):
        z = m(x)
        for b in m.model.adapters:
            b.sides['rob'].up.bias.data += 1
        assert torch.allclose(m(x), z, atol=1e-5)
    with pytest.raises(ValueError, match='between 0 and 1'), forced_gates(m, 2):
        pass


@pytest.mark.parametrize('name', ['mean over tokens', 'own token', 'over keys', 'gathering tokens'])
def test_fixed_gates_keep_their_weights_for_any_image_and_end_with_the_context(name):
    m = noisy(**asdict(READINGS[name])).eval()
    with torch.no_grad():
        before, maps = m(images(2)), [g[:1] for g in gate_maps(m, images(2))]
        with pytest.raises(RuntimeError, match='stop'), fixed_gates(m, maps):
            assert all(torch.equal(g[1], w[0]) for g, w in zip(gate_maps(m, images(2, seed=5)), maps))
            assert torch.allclose(m(images(2))[0], before[0], atol=1e-5)
            raise RuntimeError('stop')
        assert torch.equal(m(images(2)), before)


def test_fixed_gates_of_another_number_of_blocks_are_refused():
    m = noisy()
    maps = [g[:1] for g in gate_maps(m, images(1))]
    with pytest.raises(ValueError, match='got weights for'), fixed_gates(m, maps[:-1]):
        pass


def test_an_attack_on_the_maps_moves_them():
    m, x, y = noisy(scale=1.0).eval(), images(4), torch.zeros(4, dtype=torch.long)
    net = WithMaps(m)

    def moved(x_adv):
        with torch.no_grad():
            return map_distance(4)(net(x_adv), net(x)).mean().item()

    start, end = [PGD(0.1, steps=o, loss=map_distance(4))(net, x, y, seed=0) for o in (0, 10)]
    assert moved(end) > 2 * moved(start) > 0
    assert torch.equal(net(x).argmax(1), m(x).argmax(1))


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


# --- attacks on the gates
# -------------------------------------------------------------------------------------------------------------------
def share(m, x):
    return (WithGates(m, share=True)(x)[:, 4:] + 100).detach()


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
LESS = dict(n_train=16, n=20)


def smoke(name, **where):
    found = [o for o in trials_of(name, 'smoke') if all(o.key[k] == v for k, v in where.items())]
    return found[0]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    "Weights are kept in a folder of the test"
    (tmp_path / 'settings.ini').write_text(f'[DEFAULT]\nout = {tmp_path / "out"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path / 'out' / 'tora_weights'


def counting(model):
    "A list whose sum is the passes of images while gradients are on: a backward that has weight gradients counts twice"
    passes = []

    def seen(model, args, z):
        if torch.is_grad_enabled():
            passes.append(len(z))
        if z.requires_grad:
            times = 2 if model.training else 1  # an attack is made in evaluation mode
            z.register_hook(lambda g: passes.append(times * len(g)))

    model.register_forward_hook(seen)
    return passes


@pytest.mark.parametrize('method', ['head only', 'single adapter', 'AdapterFusion', 'TORA', 'full fine-tuning'])
def test_every_method_trains_with_the_passes_that_its_cost_names(method, kept, monkeypatch):
    monkeypatch.setattr(tora, '_tora_backbone', lambda how, dls: tiny_vit(num_classes=dls.c))
    with_parts, counted = tora._with_parts, []

    def watched(how, model):
        model = with_parts(how, model)
        counted.append(counting(model))
        return model

    monkeypatch.setattr(tora, '_with_parts', watched)
    how = smoke('tora.table3', method=method, lam=0.9).key | LESS | dict(n_train=32, bs=8, epochs=2, train_steps=2)
    tuned(how, _tora_images(how))
    assert sum(counted[0]) == pytest.approx(_training_passes(how), rel=0.1)


def test_the_mean_map_counts_every_image_once():
    m, dls = noisy(), synth_dls(80, bs=8)
    x, _ = held_out(dls)
    assert len(x) % 8
    for mean, maps in zip(_mean_maps(m, dls), gate_maps(m, x)):
        assert torch.allclose(mean, maps.mean(0, keepdim=True), atol=1e-5)


def test_phase_1_is_trained_once_for_all_lam_and_changes_no_row(kept):
    low, high = [smoke('tora.table2', lam=o).key | LESS for o in (0.1, 0.9)]
    tuned(low, _tora_images(low))
    m, _ = tuned(high, _tora_images(high))
    assert len(list(kept.iterdir())) == 3
    for f in kept.iterdir():
        f.unlink()
    anew, _ = tuned(high, _tora_images(high))
    assert all(torch.equal(v, anew.state_dict()[k]) for k, v in m.state_dict().items())


@pytest.mark.slow
def test_parts_gates_and_corruptions_give_verdicts(kept):
    where = dict(method='TORA', reading='mean over tokens')
    parts, gate = [smoke(o, **where) for o in ('tora.parts', 'tora.gate')]
    assert set(parts.fn(**parts.key).verdicts) >= {
        'phase 1 clean',
        'QK of phase 2 pgd5',
        'robustness adapter pgd5',
    }
    got = gate.fn(**gate.key | dict(bs=4))  # more images than fit into one batch
    assert len(got.verdicts) == 17
    for name in got.verdicts.keys() - {'clean'}:
        change = abs(got.numbers[f'{name}: share'] - got.numbers['share clean'])
        assert change <= got.numbers[f'{name}: most'] + 1e-6
    t = smoke('tora.corruptions', method='pretrained')
    rows = t.fn(**t.key | dict(bs=4))
    assert len(rows.verdicts) == 16 and rows.numbers['corrupted'] == pytest.approx(
        100 * np.mean([v.mean() for k, v in rows.verdicts.items() if k != 'clean'])
    )
