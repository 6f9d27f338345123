"""Explorers: the functions that make scenes, widgets without a front end, and static twins, also in a browser where
there is one."""

import html, json, re, shutil, subprocess, sys
import pytest, torch
from torch import nn

from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.attacks import *
from robust_nbdev.evaluate import *
from robust_nbdev.corruptions import *
from robust_nbdev.models import small_model
from robust_nbdev.datasets import fashion_mnist
from robust_nbdev.robust_tokens import *
from robust_nbdev.tora import *
from robust_nbdev.afat import *
from robust_nbdev.aas import *
from robust_nbdev.explorer import *
from robust_nbdev.test_utils import *


def images(n=4, c=1, size=28, seed=0):
    return (torch.rand(n, c, size, size, generator=torch.Generator().manual_seed(seed)) * 255).round() / 255


def grey(t):
    return Scene(
        {
            'a': {'picture': torch.full((1, 2, 2), float(t))},
            'b': {'t': t, 'shares': dict(x=t, rest=1 - t), 'gaps': torch.tensor([1.0, 2 + t])},
        }
    )


# --- scenes
# ---------------------------------------------------------------------------------------------------------------------


def test_a_scene_draws_every_kind_of_value_and_escapes_names():
    s = Scene(
        {'<b>': {'"x"': images(1)[0], 'n': 1 / 3, 't': '<i>', 'bars': {'<u>': 0.256}, 'h': torch.tensor([1.0, 4.0])}}
    )
    t = s._repr_html_()
    assert [p[0] for p in s.slots] == ['src', 'text', 'text', 'text', 'width', 'text', 'height', 'height']
    assert [p[1] for p in s.slots[1:]] == ['0.333', '<i>', '<u>', 26, '26%', 25, 100]
    assert '<b>"' not in t and all(o in t for o in ('&lt;b&gt;', '&lt;i&gt;', '&lt;u&gt;', '&quot;x&quot;'))
    assert Scene({'a': {'h': torch.zeros(3)}}).slots == [('height', 0)] * 3


# --- twins
# ----------------------------------------------------------------------------------------------------------------------


def data_of(t):
    return json.loads(re.search(r'const D = (\{.*?\});\n', t, re.S)[1])


def test_twin_loads_nothing_and_has_one_script():
    t = static_twin(grey, dict(t=[0.0, 0.5, 1.0]))
    assert not re.search(r'(https?:)?//[a-z]|\bsrc="(?!data:)|url\(|@import|fetch\(|import\(', t)
    assert t.count('<script') == t.count('</script>') == 1


def test_twin_holds_every_state_in_order_and_the_first_without_a_script():
    show = lambda u, t: Scene({'p': {'sum': f'{10 * u + t}'}})
    t = static_twin(show, dict(u=[1, 2], t=[0, 1, 2]), start=dict(t=2, u=2))
    d = data_of(t)
    assert [d['texts'][o[0]] for o in d['states']] == ['10', '11', '12', '20', '21', '22']
    assert d['labels'] == [['1', '2'], ['0', '1', '2']]
    assert '<span data-slot="text">22</span>' in t
    assert 'value="2" aria-valuetext="2"' in t
    assert 'value="1" aria-valuetext="2"' in t


def test_twin_stores_nothing_twice_and_nothing_that_stands_still():
    still = torch.zeros(1, 2, 2)
    show = lambda i, t: Scene({'p': {'moves': torch.full((1, 2, 2), i / 2), 'still': still, 'same': 'text', 't': t}})
    d = data_of(static_twin(show, dict(i=[0, 1, 2], t=[0, 1, 2])))
    assert len(d['pictures']) == 3 and len(d['texts']) == 3 and len(d['slots']) == 2 and len(d['states']) == 9


def test_names_are_escaped_in_controls_data_and_title(tmp_path):
    t = static_twin(lambda a: Scene({'p': {'t': a}}), {'a': ['</script><img src=x>', 'b&"c']})
    assert '</script><img' not in t
    assert data_of(t)['texts'] == ['</script><img src=x>', 'b&"c']
    assert t.count('</script>') == 1


# --- widgets
# --------------------------------------------------------------------------------------------------------------------


def test_widget_fires_when_its_value_is_set():
    pytest.importorskip('ipywidgets')
    seen = []
    w = live_widget(
        lambda kind, t: seen.append((kind, t)) or grey(t),
        dict(kind={'first': 1, 'second': 2}, t=[0.0, 0.5, 1.0]),
        start=dict(t=0.5),
    )
    w.controls['t'].value = 1.0
    assert '<span data-slot="text">1</span>' in w.scene.value
    w.controls['kind'].value = 2
    assert seen == [(1, 0.5), (1, 1.0), (2, 1.0)]


def test_without_ipywidgets_the_widget_says_what_to_install_and_the_twin_works(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ipywidgets', None)
    e = Explorer(grey, dict(t=[0.0, 1.0]))
    with pytest.raises(ImportError, match='pip install ipywidgets'):
        e.widget()
    assert len(e.twin()) > 0


# --- explorers
# ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def nets():
    return {k: small_model('vit', robust=k == 'robust', data='fashion_mnist') for k in ('plain', 'robust')}


@pytest.fixture(scope='module')
def data():
    x, y = fashion_mnist(64, 16, bs=16, seed=0).valid.one_batch()
    return x.as_subclass(torch.Tensor).cpu(), y.as_subclass(torch.Tensor).cpu()


def test_attention_of_the_class_token(nets, data):
    x = data[0][:3]
    for m in (
        small_model('xcit', data='fashion_mnist'),
        add_tokens(tiny_vit(), 3),
        tiny_vit(class_token=False, global_pool='avg'),
    ):
        a = class_attention(m, x)
        assert a.shape == (3, *patch_grid(m, x)) and (a >= 0).all() and (a.sum((1, 2)) <= 1 + 1e-5).all()
    m = nets['plain']
    a = attn_maps(m, x)[-1].mean(1)[:, 0, 1:].view(3, 4, 4)
    assert torch.allclose(class_attention(m, x), a)
    with pytest.raises(TypeError, match='no class token'):
        class_attention(nn.Conv2d(1, 1, 1), x)


def test_eps_moves_picture_and_numbers_and_stays_in_the_ball(nets, data):
    x, y = [o[:2] for o in data]
    before = {k: state_of(m) for k, m in nets.items()}
    e = explore_attack(nets, x, y, eps=[0, 0.02, 0.1], steps=[3])
    got = [e(eps=o, attack=e.controls['attack']['PGD'])['plain'] for o in (0, 0.02, 0.1)]
    assert all((o['attacked'] - x[0]).abs().max() <= eps + 1e-6 for o, eps in zip(got, (0, 0.02, 0.1)))
    assert torch.equal(got[0]['attacked'], x[0]) and not torch.equal(got[1]['attacked'], got[2]['attacked'])
    assert got[1]['probabilities'] != got[2]['probabilities'] and got[2]['largest change'] == '25.5/255'
    assert {k: state_of(m) for k, m in nets.items()} == before


def test_attack_view_is_the_attack_that_was_given(nets, data):
    x, y = [o[:3] for o in data]
    a = PGD(0.05, steps=2, norm='Linf')
    got = attack_view(nets['plain'], x, y, a, vocab=list('abcdefghij'), seed=5)
    assert torch.equal(torch.stack([o['model']['attacked'] for o in got]), a(nets['plain'], x, y, seed=5))
    p = nets['plain'](a(nets['plain'], x, y, seed=5)).softmax(1)
    for i, o in enumerate(got):
        assert (
            o['model']['prediction']
            == f'{"abcdefghij"[p[i].argmax()]}, {"correct" if p[i].argmax() == y[i] else "wrong"}'
        )


def test_fgsm_ignores_steps_and_settings_are_attacked_once(nets, data):
    x, y = [o[:1] for o in data]
    c = Counted(nets['plain'])
    e = explore_attack(c, x, y, attacks=(FGSM(), PGD()), eps=[0, 0.1], steps=[1, 2])
    fgsm = e.controls['attack']['FGSM']
    assert torch.equal(
        e(eps=0.1, attack=fgsm, steps=1)['model']['attacked'], e(eps=0.1, attack=fgsm, steps=2)['model']['attacked']
    )
    n = c.passes
    e(eps=0.1, attack=fgsm, steps=1)
    assert c.passes == n


def test_attacks_are_told_apart_and_those_inside_others_move(nets, data):
    x, y = [o[:1] for o in data]
    a = AAS(PGD(), ascent=1)
    e = explore_attack(nets['robust'], x, y, attacks=(PGD(), PGD(loss=dlr), a), eps=[0.05, 0.1], steps=[1, 2])
    assert list(e.controls['attack']) == ['PGD(8/255, steps=10)', 'PGD(8/255, loss=dlr, steps=10)', 'AAS']
    assert e(attack=a, eps=0.05, steps=2)['image']['attack'] == repr(a.but(eps=0.05, steps=2))
    assert (e(attack=a, eps=0.05)['model']['attacked'] - x[0]).abs().max() <= 0.05 + 1e-6
    for bad in (Occlusion(), lambda model, x, y=None, seed=0: x):
        with pytest.raises(TypeError, match='no eps'):
            explore_attack(nets, x, y, attacks=[bad])
    with pytest.raises(TypeError, match='class of attacks'):
        explore_attack(nets, x, y, attacks=[PGD])


def test_corruption_explorer(nets, data):
    x, y = data
    e = explore_corruption(nets, x, y, ['fog', 'gaussian_noise'], shown=2, seed=3)
    assert torch.equal(e(severity=0)['image']['corrupted'], x[0])
    assert list(e.controls['image'].values()) == [0, 1]
    sc = e(severity=4, corruption='gaussian_noise', image=1)
    xc = corrupt(x, 'gaussian_noise', 4, 3)
    assert torch.equal(sc['image']['corrupted'], xc[1])
    for k, m in nets.items():
        assert sc[k]['accuracy'] == f'{100 * (predict(m, xc) == y).float().mean():.1f}% of 16 images'


def probes(n=3):
    torch.manual_seed(0)
    m = add_tokens(small_model('vit', data='fashion_mnist'), n, 'cls_patch')
    tokens_of(m).weight.data.mul_(100)
    return LinearProbe(WithoutTokens(m), 10), LinearProbe(m, 10)


def test_token_explorer_on_off_and_who_is_attacked(data):
    x, y = data
    off, on = ps = probes()
    a = PGD(0.1, steps=2, loss=feat_cos)
    before = state_of(on)
    e = explore_tokens(ps, x, y, a, eps=[0, 0.1], shown=2)
    clean = e(tokens=False, eps=0)['model']
    key = "cosine with the plain backbone's clean features"
    assert clean[key] == '1.000' and float(e(tokens=True, eps=0)['model'][key]) < 1
    blind, aware = [e(tokens=True, eps=0.1, attacker=o) for o in (False, True)]
    assert torch.equal(blind['image']['attacked'], a(off.model, x, seed=0)[0])
    assert torch.equal(aware['image']['attacked'], a(on.model, x, seed=0)[0])
    assert torch.equal(e(tokens=False, eps=0.1)['image']['attacked'], blind['image']['attacked'])
    xa = a(off.model, x, seed=0)
    assert (
        blind['model']['accuracy, attacked']
        == f'{100 * ((predict(on, xa) == y) & (predict(on, x) == y)).float().mean():.1f}% of 16 images'
    )
    assert blind['model'][key] == f'{feature_cosine(on.model, x, xa, clean=off.model)[0]:.3f}'
    assert state_of(on) == before


def dial():
    torch.manual_seed(0)
    m = tora_vit(small_model('vit', data='fashion_mnist'))
    gates = {}
    for p in tora_parts(m)['acc'] + tora_parts(m)['rob']:
        p.data += 0.05 * torch.randn_like(p)
    g0 = gates_of(m)
    for lam in (0.1, 0.9):
        gates[lam] = {k: v + 0.5 * torch.randn_like(v) for k, v in g0.items()}
    return GateDial(m, gates)


def test_lam_explorer_shows_the_gates_of_its_lam_and_gives_the_old_ones_back(data):
    x, y = data
    d = dial()
    was, st = gates_of(d.model), state_of(d.model)
    e = explore_lam(d, x, y, PGD(0.05, steps=1), lams=[0.1, 0.5, 0.9], shown=2)
    got = {o: e(lam=o, image=1) for o in (0.1, 0.5, 0.9)}
    assert all(torch.equal(v, was[k]) for k, v in gates_of(d.model).items()) and state_of(d.model) == st
    title = 'weight of the accuracy adapter, block by block'
    assert not torch.equal(got[0.1][title]['block 3'], got[0.9][title]['block 3'])
    m = d(0.5)
    p = m(x).softmax(1)
    assert got[0.5]['clean']['probabilities'] == chances(p[1], int(y[1]))
    assert got[0.5]['clean']['accuracy'] == f'{100 * (p.argmax(1) == y).float().mean():.1f}% of 16 images'
    xa = PGD(0.05, steps=1)(m, x, y, seed=0)
    assert torch.equal(got[0.5]['attacked, PGD(0.05, steps=1)']['picture'], xa[1])
    with pytest.raises(ValueError, match='lam must lie between'):
        lam_view(d, x, y, PGD(0.05, steps=1), 0.95)


def test_lam_view_gives_the_gates_back_when_the_attack_fails(data):
    d = dial()
    was = gates_of(d.model)

    def broken(model, x, y=None, seed=0):
        raise RuntimeError('broken')

    with pytest.raises(RuntimeError, match='broken'):
        lam_view(d, *data, broken, 0.5)
    assert all(torch.equal(v, was[k]) for k, v in gates_of(d.model).items())


def test_mask_explorer_covers_what_the_corruption_model_chooses(nets, data):
    x, y = data
    m = nets['plain']
    cs = {0: occlusion_for(m, x, 0), 5: occlusion_for(m, x, 1)}
    before = state_of(m)
    e = explore_masks(m, x, y, cs, shares=[0, 0.25, 1.0], shown=2, seed=2)
    none = e(share=0, steps=0)
    assert torch.equal(none['learned patches']['picture'], x[0])
    assert none['learned patches']['alignment loss'] == '0.0000'
    assert none['image']['patches covered'] == '0 of 16'
    some = e(share=0.25, steps=5, image=1)
    keep = cs[5](x, 4).detach()
    assert torch.equal(some['learned patches']['picture'], occlude(x, keep, (7, 7), patch_cover(x, 2, 'noise', m))[1])
    assert some['image']['patches covered'] == '4 of 16'
    changed = (some['random patches']['picture'] != x[1]).view(1, 4, 7, 4, 7).any(4).any(2).sum()
    assert changed <= 4 and float(some['random patches']['alignment loss']) > 0
    x2 = Occlusion(share=0.25, by=cs[5])(m, x, y, seed=2)
    assert (
        some['learned patches']['accuracy']
        == f'{100 * ((predict(m, x) == y) & (predict(m, x2) == y)).float().mean():.1f}% of 16 images'
    )
    assert state_of(m) == before


def test_scale_explorer_moves_the_histogram_and_counts_as_two_models_does(nets, data):
    x, y = data
    a = PGD(0.1, steps=2)
    m = nets['robust']
    before = state_of(m)
    e = explore_scales(nets, x, y, a, scales=[0.1, 1.0, 10.0])
    assert e.first == dict(model='robust', scale=1.0)
    hs = [
        e(scale=o)['numbers before the softmax']['gaps in block 1, 0.001 to 1000, log scale'] for o in (0.1, 1.0, 10.0)
    ]
    mean = [(h * torch.linspace(-2.9, 2.9, 30)).sum() / h.sum() for h in hs]
    assert mean[0] + 0.8 < mean[1] < mean[2] - 0.8
    assert hs[0].sum() == hs[1].sum()  # in block 1 by exactly one decade, but for what the ends of the axis hold
    v = two_models(m, x, y, Scaled(a, 0.1))
    got = e(scale=0.1)[f'accuracy on 16 images, {a!r}']['share of images classified correctly']
    assert got['the stronger of the two attacks'] == v['worst'].float().mean()
    assert got['scaled model, attacked directly'] == v['on_scaled'].float().mean()
    assert state_of(m) == before


@pytest.mark.parametrize('view', [attack_view, lam_view])
def test_a_function_that_works_in_place_leaves_the_pictures_alone(view, nets, data):
    x, y = [o[:2].clone() for o in data]
    was, made = x.clone(), []

    def brighten(model, x, y, seed=0):
        made.append(x.clone())
        return x.add_(0.2).clamp_(0, 1)

    view(nets, x, y, brighten) if view is attack_view else view(dial(), x, y, brighten, 0.5)
    assert torch.equal(x, was) and all(torch.equal(o, was) for o in made)  # every model is attacked on clean images


def test_images_out_of_their_ball_are_not_shown(nets, data):
    class Beyond(PGD):
        def __call__(self, model, x, y=None, **kw):
            return (x + 0.4).clamp(0, 1)

    with pytest.raises(ValueError, match=r'out of its ball Linf\(0.1\)'):
        attack_view(nets, *data, Beyond(0.1))


# --- what holds, and what no longer does
# ------------------------------------------------------------------------------------------


def test_a_model_whose_code_was_repaired_is_asked_again(nets, data):
    "The same weights behind another forward: in a notebook, a cell that was run again"
    x, y = [o[:2] for o in data]
    hard = type('Hard', (Wrapper,), {'forward': lambda self, x: self.model(x).detach() + 0 * x.sum()})
    m = hard(nets['plain'])
    e = explore_attack(m, x, y, attacks=[PGD()], eps=[0.1], steps=[2])
    old = e()['model']['attacked']
    hard.forward = lambda self, x: self.model(x)
    assert not torch.equal(e()['model']['attacked'], old)
    assert torch.equal(e()['model']['attacked'], PGD(0.1, steps=2)(nets['plain'], x, y)[0])


def test_a_loss_that_has_changed_is_asked_again(nets, data):
    x, y = [o[:2] for o in data]
    m, how = nets['plain'], dict(sign=1)
    a = PGD(0.1, steps=2, loss=lambda z, y: how['sign'] * ce(z, y))
    e = explore_attack(m, x, y, attacks=[a], eps=[0.1], steps=[2])
    old = e()['model']['attacked']
    how['sign'] = -1
    assert not torch.equal(e()['model']['attacked'], old)
    assert torch.equal(e()['model']['attacked'], a(m, x, y)[0])


def test_a_step_that_was_given_moves_with_the_radius(nets, data):
    x, y = [o[:2] for o in data]
    a = PGD(0.1, steps=3, alpha=0.02)
    e = explore_attack(nets['plain'], x, y, attacks=[a], eps=[0, 0.2], steps=[3])
    assert torch.equal(e(eps=0.2)['model']['attacked'], PGD(0.2, steps=3, alpha=0.04)(nets['plain'], x, y)[0])
    t = PGD(0.1, steps=3, alpha=0.02, loss=feat_cos)
    assert explore_tokens(probes(), x, y, t, eps=[0.2])()['image']['attack'] == repr(t.at_eps(0.2))


def test_what_only_prints_alike_is_refused(nets, data):
    x, y = data
    f, g = lambda z, y: ce(z, y), lambda z, y: -ce(z, y)
    with pytest.raises(ValueError, match='print as'):
        explore_attack(nets, x, y, attacks=[PGD(loss=f), PGD(loss=g)])
    with pytest.raises(ValueError, match='print alike'):
        explore_corruption({1: nets['plain'], '1': nets['robust']}, x, y)
    c = occlusion_for(nets['plain'], x)
    with pytest.raises(ValueError, match='keep copies'):
        explore_masks(nets['plain'], x, y, {0: c, 5: c})


def test_right_under_attack_is_right_before_and_after(nets, data):
    "Labels that only the attacked images get: nobody is right about them"
    x, _ = data
    a = PGD(0.1, steps=3, loss=margin)
    none = '0.0% of 16 images'
    d = dial()
    m = d(0.5)
    xa = a(m, x, predict(m, x), seed=0)
    y = predict(m, xa)
    y[y == predict(m, x)] = (y[y == predict(m, x)] + 1) % 10
    fixed = lambda model, x, y=None, *, seed=0: xa
    sc = lam_view(d, x, y, fixed, 0.5)[0]
    assert (predict(m, xa) == y).any() and sc[f'attacked, {fixed!r}']['accuracy'] == sc['clean']['accuracy'] == none
    off, on = ps = probes()
    y = predict(on, xa)
    keep = predict(on, x) != y
    assert keep.any()
    got = token_view(ps, x[keep], y[keep], PGD(0.1, loss=feat_cos), x_adv=xa[keep])[0]['model']
    assert got['accuracy, attacked'] == f'0.0% of {int(keep.sum())} images'
    m = nets['plain']
    c = occlusion_for(m, x)
    x2 = Occlusion(share=0.5, by=c)(m, x, None)
    y = predict(m, x2)
    keep = predict(m, x) != y
    assert keep.any()
    assert (
        mask_view(m, x[keep], y[keep], c, 0.5)[0]['learned patches']['accuracy'] == f'0.0% of {int(keep.sum())} images'
    )


# --- as users call them
# -----------------------------------------------------------------------------------------------------------


def cnn(c=1, n=5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(c, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, n),
    ).train()


x3, y3 = images(3), torch.arange(3)


def drive(e):
    "Every value of every control of the live widget, once; the scenes"
    w = e.widget()
    got = [w.scene.value]
    for c in w.controls.values():
        for o in c.options:
            c.value = o[1]
            got.append(w.scene.value)
    return got


def test_own_models_stay_as_they_are():
    "A batch of one, in training mode"
    pytest.importorskip('ipywidgets')
    m, x, y = cnn(), x3[:1], torch.arange(1)
    before, weights = state_of(m), {k: v.clone() for k, v in m.state_dict().items()}
    for e in (
        explore_attack(m, x, y, eps=[0, 0.1], steps=[1]),
        explore_corruption(m, x, y, ['fog', 'contrast'], [0, 5]),
    ):
        assert len(set(drive(e))) >= 3
    assert state_of(m) == before
    assert all(torch.equal(v, weights[k]) for k, v in m.state_dict().items())
    assert all(p.grad is None for p in m.parameters())


@pytest.mark.parametrize(
    'make,error,match',
    [
        (lambda: static_twin(grey, {}), ValueError, 'needs controls'),
        (lambda: static_twin(grey, dict(t=[])), ValueError, "'t' has no values"),
        (lambda: Explorer(grey, dict(t=[0]), dict(x=1)), ValueError, "start names \\['x'\\]"),
        (lambda: explore_attack(cnn(), x3, y3.float()), TypeError, 'use y.long'),
        (
            lambda: explore_attack(cnn(), x3[:1], [0], vocab=['a', 'b'])(),
            ValueError,
            'names 2 classes, the model has 5',
        ),
        (lambda: explore_attack(cnn(), x3 * 4 - 2, y3), ValueError, 'images must lie in'),
        (lambda: explore_attack(cnn(), x3, y3, eps=[0, 8]), ValueError, 'write 8/255'),
        (lambda: explore_attack(cnn(), x3, y3, steps=[-1]), ValueError, 'steps must be'),
        (lambda: explore_attack([cnn()], x3, y3), TypeError, 'dict of models by name, got list'),
        (lambda: explore_corruption(synth_learner(), x3, y3), TypeError, 'give learn.model'),
        (
            lambda: explore_corruption(cnn(), x3, y3, ['fog', 'rain']),
            ValueError,
            "no corruption .'rain'., there are: gaussian_noise",
        ),
        (lambda: explore_tokens(cnn(), x3, y3), ValueError, "two classifiers, such as `LinearProbe`.*got Sequential"),
        (lambda: explore_lam(cnn(), x3, y3, PGD(0.1)), TypeError, 'needs a GateDial'),
        (lambda: explore_scales(cnn(), x3, y3, PGD(0.1))(), TypeError, 'timm families'),
        (lambda: static_twin(lambda a: 3, dict(a=[1, 2])), TypeError, r'must return a scene.*got int'),
    ],
)
def test_mistakes_are_named_before_anything_is_shown(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_an_error_stands_where_the_scene_stood_and_goes():
    pytest.importorskip('ipywidgets')

    def show(t):
        if t:
            raise ValueError('no <such> state')
        return grey(0.0)

    w = live_widget(show, dict(t=[0, 1]))
    good = w.scene.value
    with pytest.raises(ValueError, match='such'):
        w.controls['t'].value = 1
    assert w.scene.value == '<div class="rx">ValueError: no &lt;such&gt; state</div>'
    w.controls['t'].value = 0
    assert w.scene.value == good


def test_bars_of_a_broken_model_say_nan():
    assert [p[1] for p in Scene({'p': {'bars': {'a': float('nan'), 1: 0.5}}}).slots] == ['a', 0, 'nan%', '1', 50, '50%']


# --- in a browser
# ---------------------------------------------------------------------------------------------------------------

CHROME = next((p for o in ('chromium', 'chromium-browser', 'google-chrome', 'chrome') if (p := shutil.which(o))), None)
browser = pytest.mark.skipif(CHROME is None, reason='no chromium here')


def in_browser(tmp_path, body, script):
    "What `script`, a function body, returns on a page"
    f = tmp_path / 'page.html'
    f.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><body>{body}<script>const got = (() => {{{script}}})();'
        ' document.body.innerHTML = ""; const p = document.createElement("pre"); p.id = "result"; p.textContent ='
        ' JSON.stringify(got); document.body.append(p);</script></body></html>'
    )
    cmd = [
        CHROME,
        '--headless',
        '--no-sandbox',
        '--disable-gpu',
        '--no-first-run',
        '--disable-background-networking',
        '--disable-component-update',
        '--disable-sync',
        f'--user-data-dir={tmp_path / "profile"}',
        '--dump-dom',
        f.as_uri(),
    ]
    out = subprocess.run(cmd, capture_output=True, text=True, timeout=120).stdout
    assert (m := re.search(r'<pre id="result">(.*?)</pre>', out, re.S)), out[-2000:]
    return json.loads(html.unescape(m[1]))


SEE = (
    'const see = r => [...r.querySelectorAll("[data-slot]")].map(e => e.dataset.slot === "src" ? e.src.split(",")[1] :'
    ' e.dataset.slot === "text" ? e.textContent : parseInt(e.style[e.dataset.slot])); const set = (c, v) => { c.value ='
    ' v; c.dispatchEvent(new Event("input")); };'
)


@browser
def test_moving_eps_changes_picture_and_numbers_in_the_browser(nets, data, tmp_path):
    e = explore_attack(nets, data[0][:2], data[1][:2], attacks=(FGSM(), PGD()), eps=[0, 0.05, 0.1], steps=[1, 2])
    got = in_browser(
        tmp_path,
        e.twin(),
        SEE
        + '''
        const root = document.querySelector("[data-twin]"), c = [...root.querySelectorAll("[data-control]")], eps = c[2], before = see(root);
        set(eps, 2); const after = see(root), said = [eps.getAttribute("aria-valuetext"), eps.nextElementSibling.textContent], all = [];
        for (let i = 0; i < 2; i++) for (let a = 0; a < 2; a++) for (let s = 0; s < 3; s++) for (let k = 0; k < 2; k++) { set(c[0], i); set(c[1], a); set(c[2], s); set(c[3], k); all.push(see(root)); }
        return {type: eps.type, label: eps.closest("label").innerText, before, after, said, all};''',  # noqa: E501
    )
    want = lambda **st: [p[1] for p in e(**st).slots]
    assert got['type'] == 'range' and got['label'].startswith('eps') and got['said'] == ['0.1', '0.1']
    assert got['before'] == want() and got['after'] == want(eps=0.1) and got['before'] != got['after']
    kinds = [p[0] for p in e().slots]
    for kind in ('src', 'text', 'width'):
        assert any(a != b for k, a, b in zip(kinds, got['before'], got['after']) if k == kind), kind
    attacks = list(e.controls['attack'].values())
    assert got['all'] == [
        want(image=i, attack=a, eps=o, steps=k)
        for i in range(2)
        for a in attacks
        for o in (0, 0.05, 0.1)
        for k in (1, 2)
    ]


@browser
def test_twins_on_one_page_do_not_disturb_each_other(tmp_path):
    a, b = (
        static_twin(grey, dict(t=[0.0, 1.0])),
        static_twin(lambda t: Scene({'p': {'t': f'text {t}'}}), dict(t=dict(one=1, two=2))),
    )
    got = in_browser(
        tmp_path,
        a + b + a,
        SEE
        + 'const r = [...document.querySelectorAll("[data-twin]")], c = r.map(o => o.querySelector("[data-control]"));'
        ' set(c[2], 1); const first = r.map(see); set(c[1], 1); return [first, r.map(see), c[1].tagName];',
    )
    at = {t: [p[1] for p in grey(t).slots] for t in (0.0, 1.0)}
    assert got == [[at[0.0], ['text 1'], at[1.0]], [at[0.0], ['text 2'], at[1.0]], 'SELECT']
