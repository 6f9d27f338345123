"""`aas`: planted underflow, scales by hand, every family, the contract of attacks, AAS-AT with every method, models
left unchanged."""

import copy, math, pickle, warnings
from dataclasses import FrozenInstanceError, dataclass
import pytest, timm, torch, torch.nn.functional as F
from torch import nn
from fastai.vision.all import (
    Callback,
    CrossEntropyLossFlat,
    DataLoaders,
    Learner,
    set_seed,
)
from fastai.callback.schedule import *
import robust_nbdev.aas as aas_mod
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.aas import *
from robust_nbdev.compare import StepCost
from robust_nbdev.datasets import fashion_mnist
from robust_nbdev.experiments import profile_for, trials_of
from robust_nbdev.models import small_model
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *
from copies import replicate, reusing

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=4)
FAMILIES = dict(
    vit=('vit_tiny_patch16_224', SMALL),
    xcit=('xcit_nano_12_p8_224', {**SMALL, 'eta': 0.5}),
    swin=(
        'swin_tiny_patch4_window7_224',
        dict(img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=4),
    ),
    levit=(
        'levit_128s',
        dict(img_size=32, embed_dim=(32, 48), depth=(1, 1), num_heads=(2, 3), key_dim=8, stem_type='s8', num_classes=4),
    ),
)


def build(k, on=True):
    "A small model with sharp attention"
    torch.manual_seed(0)
    m = timm.create_model(FAMILIES[k][0], **FAMILIES[k][1])
    for n, p in m.named_parameters():
        if ('qkv' in n or '.q.' in n or '.k.' in n) and p.ndim == 2:
            p.data.mul_(8)
        if k == 'levit' and n.endswith('bn.weight'):
            p.data.fill_(2.0)
        if 'head' in n and p.ndim == 2:
            p.data.mul_(20)
    for o in m.modules():
        if hasattr(o, 'fused_attn'):
            o.fused_attn = on
    return Normalized(m, mean=[0.5] * 3, std=[0.5] * 3).eval()


X, Y = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 0])
PGD2 = PGD(0.05, steps=2)


def close(a, b, tol=1e-5):
    return torch.allclose(a, b, atol=tol)


def grey(n=6):
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(2)), torch.arange(n) % 4


def right(m, x, y):
    return (predict(m, x) == y).float().mean().item()


# --- underflow
# ------------------------------------------------------------------------------------------------------------------

PL = PGD(0.1, steps=20)


def test_underflow_planted_and_repaired():
    "On saturated attention the gradient is not small: it is nothing, for each loss and start; scales bring it back"
    m = planted_vit(8)
    x, y = planted_images(8)
    assert attn_gaps(m, x)[0].amax(1).min() > 104 and right(m, x, y) == 1
    with attack_mode(m):
        assert (Objective(m, x, y, ce).grad(x)[0] == 0).all()
    assert [right(m, a(m, x, y), y) for a in (PL.restart(2), APGD(0.1, steps=20), PL.but(loss=margin))] == [1.0] * 3
    assert [right(m, a(m, x, y), y) for a in (AAS(PL, per='batch'), AAS(APGD(0.1, steps=20)))] == [0.0] * 2


def test_no_underflow_no_repair():
    m = planted_vit(1)
    x, y = planted_images(8)
    assert torch.equal(GapScaled(PL)(m, x, y), PL(m, x, y))


def test_the_report_notices_the_planted_model():
    pgd = PGD(0.1, steps=8)
    rep = robust_report(planted_vit(8), planted_images(16), [pgd, AAS(pgd)], bs=16)
    assert [r['accuracy'] for r in rep.rows] == [1, 1, 0, 0] and any('zero' in w for w in rep.warnings)


def test_float64_is_a_double_model():
    m = build('vit')
    before = state_of(m)
    x_adv = Float64(PGD2)(m, X, Y)
    ref = PGD2(copy.deepcopy(m).double(), X.double(), Y, seed=image_seed(X))
    assert x_adv.dtype == torch.float32 and close(x_adv, ref.float(), 1e-6) and state_of(m) == before
    c = Counted(m)
    Float64(PGD2)(c, X, Y)
    assert (c.forwards, c.backwards) == (10, 10)


# --- a scale of one, gradients, fused
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('per', ['image', 'batch'])
@pytest.mark.parametrize('k,climb', [('xcit', eq3), ('levit', lpips_feats), ('vit', gama)])
def test_gradient_of_the_climb_is_finite_differences(k, climb, per):
    m, x = build(k).double(), X[:2].double()
    a = AAS(PGD2, climb=climb, per=per, temperature=True)
    own = a.base(m).double()
    g = torch.Generator().manual_seed(0)
    s = 0.3 + 0.6 * torch.rand(2 if per == 'image' else 1, len(own), generator=g, dtype=torch.float64)
    with attack_mode(m):
        gain, _ = a.gain(m, x, Y[:2], None, own)
        f = lambda s: gain(s).sum()
        assert torch.autograd.gradcheck(f, s.requires_grad_(), atol=2e-8, nondet_tol=1e-12)
        assert (torch.autograd.grad(f(s), s)[0] != 0).any()


def test_lpips_is_the_packages():
    from lpips import normalize_tensor

    # [B,D,N,1], as LPIPS has channels first
    a, b = torch.rand(2, 5, 8), torch.rand(2, 5, 8)
    img = lambda o: normalize_tensor(o.transpose(1, 2)[..., None])
    assert close(lpips_feats([a], [b]), (img(a) - img(b)).pow(2).sum(1).mean((1, 2)), 1e-6)


# --- the ascent
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'kw', [{}, dict(log=True, eta=0.1, per='batch'), dict(climb=ce, temperature=True)], ids=lambda kw: ' '.join(kw)
)
def test_the_ascent_climbs(kw):
    m, a = build('vit'), AAS(PGD2, **{'eta': 0.05, **kw})
    with attack_mode(m), torch.no_grad():
        gain, _ = a.gain(m, X, Y, None, a.base(m))
        s0, s1 = [a.but(ascent=i).scales(m, X, Y) for i in (0, 10)]
        v0, v1 = [gain(s if a.per == 'image' else s[None]).mean() for s in (s0, s1)]
    assert v1 > v0 and (s1 >= 1e-7).all() and (s1 <= 1).all()


def test_guard():
    m = build('vit')
    loose = AAS(PGD2, eta=0.3)
    flip = predict(loose.scaled(m, X), X) != predict(m, X)
    assert flip.any()
    s = loose.but(guard=0.0).scales(m, X)
    assert (s[flip] == 1).all() and torch.equal(s[~flip], loose.scales(m, X)[~flip])
    b = loose.but(per='batch')
    share = (predict(b.scaled(m, X), X) != predict(m, X)).float().mean().item()
    assert (b.but(guard=max(share - 0.1, 0.0)).scales(m, X) == 1).all() == (share > 0) and torch.equal(
        b.but(guard=min(share + 0.1, 0.99)).scales(m, X), b.scales(m, X)
    )


def test_own_scales_are_the_reference():
    m = build('vit')
    own = add_scales(copy.deepcopy(m), [0.5, 0.4, 1.0])
    a = AAS(PGD2)
    s = a.scales(own, X)
    assert (s[:, 0] < 0.75).all() and (a.but(sigma=0.0, ascent=0).scales(own, X) == torch.tensor([0.5, 0.4, 1.0])).all()
    with torch.no_grad():
        z = a.scaled(own, X)(X)
        assert close(z, ScaledModel(m, s)(X), 1e-4)
    # a scale above 1 is not clamped to 1
    assert (AAS(PGD2, sigma=0.0, ascent=0).scales(add_scales(copy.deepcopy(m), 2.0), X) == 2).all()


# --- an attack like the others
# ------------------------------------------------------------------------------------------------------

ATTACKS = dict(
    aas=lambda: AAS(PGD2, guard=0.0),
    batch=lambda: AAS(PGD2, per='batch'),
    scaled=lambda: Scaled(PGD2, 0.5),
    gap=lambda: GapScaled(PGD2, limit=1.0),
    double=lambda: Float64(PGD2),
    l2=lambda: AAS(PGD(1.0, norm='L2', steps=2)),
    worst=lambda: AAS(WorstCase([FGSM(0.05), APGDT(0.05, steps=2, targets=2)])),
    square=lambda: AAS(Square(0.05, queries=5)),
    fool=lambda: AAS(PatchFool(steps=2)),
)


@pytest.mark.parametrize('a', ['l2', 'worst', 'square', 'fool'])
def test_ball_box_and_traces(a):
    m, A = build('vit'), ATTACKS[a]()
    m.train()
    m.model.blocks[0].attn.eval()
    before, rng = state_of(m), torch.random.get_rng_state()
    x = X.clone().requires_grad_()
    x_adv = A(m, x, Y)
    assert state_of(m) == before and torch.equal(rng, torch.random.get_rng_state())
    assert torch.equal(x.detach(), X) and x.grad is None and not x_adv.requires_grad
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    if A.norm:
        assert (threat_model(A.eps, A.norm).size(x_adv - X) <= A.eps * (1 + 1e-5)).all()
    assert torch.equal(A(m, X, Y), x_adv)  # the same again


@pytest.mark.parametrize('a', ['aas', 'double', 'square'])
def test_batch_mates_do_not_matter(a):
    m, A, i = build('vit'), ATTACKS[a](), [4, 1, 2]
    x_adv, mine = A(m, X, Y)[i], A(m, X[i], Y[i])
    assert torch.equal(predict(m, mine), predict(m, x_adv)) and close(mine, x_adv, 1e-6 if a == 'double' else 2e-3)


def test_per_batch_depends_on_mates_and_says_so():
    m, A = build('vit'), AAS(PGD2, per='batch')
    assert not close(A.scales(m, X), A.scales(m, X[:2]), 1e-4) and 'batch' in A.name and "per='batch'" in repr(A)


@pytest.mark.parametrize('a', ATTACKS)
def test_value(a):
    A = ATTACKS[a]()
    assert eval(repr(A), {**vars(aas_mod), **globals()}) == A and hash(A) == hash(ATTACKS[a]())
    assert pickle.loads(pickle.dumps(A)) == A and copy.deepcopy(A) == A
    with pytest.raises(FrozenInstanceError):
        A.attack = None
    check_attack(A)
    assert threat(A) == threat(A.attack)


@pytest.mark.parametrize(
    'make,err,words',
    [
        (lambda: AAS(PGD), TypeError, 'class'),
        (lambda: AAS(Transfer(nn.Identity(), PGD2)), TypeError, 'Transfer'),
        (lambda: AAS(PGD2, per='all'), ValueError, 'per must'),
        (lambda: AAS(PGD2, sigma=math.nan), ValueError, 'sigma'),
        (lambda: AAS(PGD2, climb='ce'), TypeError, 'climb'),
        (lambda: Scaled(PGD2, 'x'), TypeError, 's must'),
        (lambda: Scaled(PGD2, [1.0, math.inf]), ValueError, 'finite'),
        (lambda: AASTrain(floor=1.5), ValueError, 'floor'),
        (lambda: AASTrain(aas=PGD2), TypeError, 'aas='),
        (lambda: AASTrain(aas=AAS(PGD2, temperature=True)), TypeError, 'temperature'),
        (lambda: with_scales(PGD2, scales=[]), ValueError, 'at least one'),
        (lambda: Scaled(PGD2, [0.5, 0.5])(build('vit'), X, Y), ValueError, '3 blocks'),
        (lambda: AAS(PGD2).scaled(build('vit'), X)(X[:2]), ValueError, '5 images met a batch of 2'),
        (lambda: AAS(PGD2)(build('vit'), X * 255, Y), ValueError, 'divide by 255'),
    ],
)
def test_refused(make, err, words):
    with pytest.raises(err, match=words):
        make()


def test_a_refusal_leaves_the_model_alone():
    m = build('vit')
    m.model.set_grad_checkpointing(True)
    before = state_of(m)
    with pytest.raises(ValueError, match='checkpointing'):
        AAS(PGD2)(m, X, Y)
    assert state_of(m) == before


def test_eps_zero_targets_labels():
    m = build('vit')
    assert torch.equal(AAS(PGD2).but(eps=0)(m, X, Y), X)
    t = (Y + 1) % 4
    plain, aimed = [a(m, X, Y, target=t, targeted=True) for a in (PGD2, AAS(PGD2, climb=ce))]
    assert not torch.equal(aimed, X) and (m(aimed).gather(1, t[:, None]) - m(X).gather(1, t[:, None])).mean() > 0
    soft = F.one_hot(Y, 4).float()
    assert close(AAS(PGD2)(m, X, soft), AAS(PGD2)(m, X, Y), 1e-6) and not torch.equal(
        AAS(PGD(0.05, steps=2, loss=kl))(m, X), X
    )


@pytest.mark.parametrize('k,on', [('xcit', True), ('swin', True), ('levit', True), ('vit', False)])
def test_every_family(k, on):
    m, A = build(k, on), AAS(PGD2)
    before, s, x_adv = state_of(m), A.scales(m, X), A(m, X, Y)
    assert s.shape == (5, len(vit_blocks(m))) and (s < 1).any(1).all() and state_of(m) == before
    assert not torch.equal(x_adv, PGD2(m, X, Y)) and (x_adv - X).abs().max() <= 0.05 + 1e-6
    assert close(A(m, X[2:3], Y[2:3]), x_adv[2:3], 0.1) and close(A.scales(m, X[2:3]), s[2:3], 1e-3)
    assert torch.equal(ScaledModel(m, torch.ones_like(s))(X), m(X))
    assert torch.equal(AAS(PGD2, sigma=0.0, ascent=0)(m, X, Y), PGD2(m, X, Y))


@pytest.mark.parametrize('k,at', [('vit', 1), ('swin', 12), ('vit', 24)])
def test_nothing_left_after_an_exception(k, at):
    "Wherever it strikes: in the reference, in the ascent, in the attack"
    m, n = build(k).train(), [0]
    before = state_of(m)

    def fails(*a):
        n[0] += 1
        if n[0] == at:
            raise KeyboardInterrupt

    h = vit_blocks(m)[1].mlp.register_forward_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        AAS(PGD(0.05, steps=14))(m, X, Y)
    h.remove()
    assert state_of(m) == before
    assert not any('temperature' in o.__dict__ for o in m.modules() if 'temperature' in o._parameters)


def test_in_low_precision_scales_are_found_in_float32():
    m = build('vit')
    with torch.autocast('cpu', dtype=torch.bfloat16):
        s = AAS(PGD2).scales(m, X)
        x_adv = AAS(PGD2)(m, X, Y)
    assert torch.equal(s, AAS(PGD2).scales(m, X)) and x_adv.dtype == torch.float32
    b = copy.deepcopy(m).bfloat16()
    assert AAS(PGD2)(b, X.bfloat16(), Y).dtype == torch.bfloat16


def test_around_attacks_that_drop_images():
    "Whatever stands between the scaled model and an attack that goes on with some of the images: each keeps its scales"
    m = build('vit')
    y = predict(m, X)
    for e in torch.linspace(0.002, 0.1, 15).tolist():
        at = APGDT(e, steps=2, targets=3)
        right = predict(m, at(m, X, y)) == y
        if 0 < right.sum() < 5:
            break
    assert 0 < right.sum() < 5
    both = [right.int().argmax().item(), right.int().argmin().item()]
    for A in (AAS(AAS(at, eta=0.3)), AAS(Float64(GapScaled(at, limit=1.0)))):
        alone = torch.cat([A(m, X[i : i + 1], y[i : i + 1]) for i in both])
        assert close(alone, A(m, X, y)[both], 2e-3)


def test_float64_around_what_draws_for_a_batch():
    "Square and the reference package take one seed, not one per image"
    m = build('vit')
    y, sq = predict(m, X), Square(1e-3, queries=4)
    for a in (WorstCase([sq]), AutoAttack(0.5, attacks='square', reference=True)):
        assert (Float64(a)(m, X, y) - X).abs().max() <= a.eps + 1e-6
    aa = AutoAttack(1e-3, attacks=(APGD(1e-3, steps=2), sq))
    assert len(robust_report(m, (X, y), [Float64(aa)]).rows) == 2


# --- with everything that takes an attack
# ---------------------------------------------------------------------------------------------


def test_report_does_not_depend_on_packing():
    "Verdicts of images, whatever the batches"
    a = AAS(PGD(0.05, steps=2))
    one, other = [robust_report(tiny_vit(num_classes=4), grey(12), [a], bs=bs).verdicts[repr(a)] for bs in (5, 12)]
    assert (one == other).all()


# --- two models
# -----------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_two_models_judge_what_only_one_of_them_gets_right():
    "Labels that are right for the scaled model alone, and images that only an attack makes right: wrong stays wrong"
    m = build('vit')
    x = torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    A = AAS(PGD2.but(eps=0.02), eta=0.3)
    ok = lambda f, o: predict(f, o) == y
    victim = A.scaled(m, x)
    y = predict(victim, x)
    only = predict(m, x) != y
    assert only.any() and not only.all()
    v = two_models(m, x, y, A)
    xs = A.craft(victim, x, y, 0)
    assert (
        torch.equal(v['on_scaled'], ok(victim, xs))
        and (~v['on_scaled'][only]).any()
        and torch.equal(v['transferred'], ok(m, x) & ok(m, xs))
        and not v['transferred'][only].any()
    )
    y = predict(m, x.flip(0))
    w = two_models(m, x, y, A, x_plain=x.flip(0), victim=victim)
    assert not ok(m, x).all() and torch.equal(w['plain'], ok(m, x)) and (w['worst'] <= w['clean']).all()


def test_the_second_start_is_another_one():
    m, x = build('vit'), torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    y = predict(m, x)
    A = Scaled(PGD(0.02, steps=1, alpha=0.002), 0.5)
    own = [predict(m, A.attack(m, x, y, seed=i)) == y for i in (0, 1)]
    t = scale_report(m, (x, y), A).iloc[0]
    assert not torch.equal(*own)
    assert t.plain == pytest.approx(100 * own[0].float().mean().item(), abs=1e-3) and t.twice == pytest.approx(
        100 * (own[0] & own[1]).float().mean().item(), abs=1e-3
    )


def test_two_functions_of_one_name_are_two_rows():
    "The scales of one are not used for the other"
    m = build('vit')
    up, down = lambda z, y: ce(z, y), lambda z, y: -ce(z, y)
    As = {k: AAS(PGD2, climb=f, eta=0.3) for k, f in dict(up=up, down=down).items()}
    t = scale_report(m, (X, Y), As, twice=False)
    alone = scale_report(m, (X, Y), {'down': As['down']}, twice=False)
    assert t.loc['down'].equals(alone.loc['down']) and t.clean_scaled['up'] != t.clean_scaled['down']


# --- AAS-AT
# -------------------------------------------------------------------------------------------------------------------------------  # noqa: E501

P2 = PGD(0.1, steps=2)
METHODS = dict(
    trades_awp=lambda: [TRADES(P2), AWP(0.01)],
    mo=lambda: [AdvTrain(ARDPRM(0.1, steps=2), ard=warmup(1, pct=0.5), prm=warmup(1, pct=0.5))],
    free=lambda: [FreeAT(FGSM(0.1), replay=2)],
)


def learner(cbs, model=None, **kw):
    return synth_learner(cbs=cbs, dls=kw.pop('dls', None) or synth_dls(32, bs=16), model=model, **kw)


def weights(l):
    return [p.detach().clone() for p in l.model.parameters()]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize('method', METHODS)
def test_composes(method):
    l = learner([*METHODS[method](), AASTrain(period=2)])
    lf, w = l.loss_func, weights(l)
    l.fit(2, 1e-3)
    assert l.aas_train.df.epoch.tolist() == [2] and (scales_of(l.model) < 1).any()
    assert l.loss_func is lf and not same(w, weights(l))
    assert 'model.attn_scales.s' in l.model.state_dict()
    assert not any('attn_scales' in n for n, _ in l.model.named_parameters())


def test_before_its_first_epoch_it_changes_no_bit():
    a, b = learner(METHODS['trades_awp']()), learner([*METHODS['trades_awp'](), AASTrain(period=2)])
    for l in (a, b):
        l.fit(1, 1e-3)
    assert same(weights(a), weights(b)) and (scales_of(b.model) == 1).all() and len(b.aas_train.df) == 0


def test_each_phase_starts_elsewhere_and_knows_the_labels():
    got = {}

    class Look(Callback):
        order = AASTrain.order - 0.1

        def before_batch(self):
            if self.training and self.epoch == 1 and 'x' not in got:
                got.update(
                    x=self.x.as_subclass(torch.Tensor).clone(),
                    y=self.y.as_subclass(torch.Tensor).clone(),
                    m=copy.deepcopy(self.model),
                )

    A = AAS(FGSM(), eta=0.01, ascent=1, climb=ce, sigma=0.2)
    l = learner([AASTrain(period=2, aas=A), Look()])
    l.fit(2, 1e-3)

    def seed_of(epoch):
        l.epochs_lived = Epochs(0, epoch)
        return l.aas_train.epoch_seed

    ref = [A.but(per='batch').scales(got['m'], got['x'], got['y'], seed=seed_of(i)) for i in (0, 1)]
    assert close(scales_of(l.model), ref[1], 1e-6) and not close(ref[0], ref[1], 1e-3)


def test_scales_are_found_on_the_images_as_they_are(monkeypatch):
    "Mixed ones under MixUp, never attacked ones"
    seen, real = [], AAS.scales
    monkeypatch.setattr(
        AAS,
        'scales',
        lambda self, m, x, *a, **k: seen.append(x.as_subclass(torch.Tensor).clone()) or real(self, m, x, *a, **k),
    )
    l = learner([AdvTrain(P2), AASTrain(period=1, aas=AAS(FGSM(), ascent=1))])
    l.fit(1, 1e-3)
    own = [o.as_subclass(torch.Tensor) for o, _ in l.dls.train_ds]
    assert len(seen) == 1 and all(any(torch.equal(a, b) for b in own) for a in seen[0])


STEEP = AAS(FGSM(), eta=0.5)


def test_repeated_ascents_lower_the_scales_and_warn_once_for_each_block():
    l = learner([AASTrain(period=1, aas=STEEP)])
    with pytest.warns(UserWarning, match='below 0.05') as heard:
        l.fit(4, 1e-3)
    assert scales_of(l.model).max() < 0.05
    assert len([o for o in heard if 'below 0.05' in str(o.message)]) <= len(scales_of(l.model))


@pytest.mark.parametrize('kw, least', [(dict(reset=True, aas=AAS(FGSM())), 0.5), (dict(floor=0.3, aas=STEEP), 0.3)])
def test_reset_and_floor_keep_the_scales_up(kw, least):
    l = learner([AASTrain(period=1, **kw)])
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        l.fit(4, 1e-3)
    assert scales_of(l.model).min() >= least - 1e-6


def test_floor_and_reset_leave_blocks_out_of_scope_alone():
    first = AAS(FGSM(), ascent=1, blocks=(0,))
    l = learner([AASTrain(period=1, aas=first, floor=0.5, reset=True)], model=add_scales(tiny_vit(), [0.2, 0.4]))
    l.fit(1, 1e-3)
    assert scales_of(l.model)[0] >= 0.5 and close(scales_of(l.model)[1], torch.tensor(0.4))


def test_a_report_of_an_attack_on_a_scaled_model_asks_for_its_base():
    attack, data = Float64(GapScaled(PGD2)), (torch.rand(4, 1, 28, 28), torch.arange(4))

    def warned(attacks):
        return any('alone may overstate' in o for o in robust_report(tiny_vit(), data, attacks).warnings)

    assert warned([WorstCase([attack, FGSM(PGD2.eps)])])
    assert not warned([WorstCase([WorstCase([PGD2]), attack])]) and not warned([PGD2.but(steps=5), attack])


def test_hold_leaves_the_weights_alone():
    "The paper's either/or: an epoch for the scales, none for the weights"
    a = learner([AdvTrain(P2), AASTrain(period=2, batches=None, hold=True)])
    ws = []
    a.add_cb(Callback(after_epoch=lambda self: ws.append([p.detach().clone() for p in self.model.parameters()])))
    a.fit(2, 1e-3)
    assert same(*ws) and len(a.aas_train.df) == 2 and (scales_of(a.model) < 1).any()


def test_interrupted():
    "A fit that breaks off leaves a model with its scales, and the next fit runs"

    def fire(self):
        if self.training and self.train_iter == 1:
            raise KeyboardInterrupt

    stop = Callback(before_batch=fire)
    stop.order = 30
    l = learner([TRADES(P2), AWP(0.01), AASTrain(period=1), stop])
    with pytest.raises(KeyboardInterrupt):
        l.fit(1, 1e-3)
    s = scales_of(l.model)
    l.validate()
    assert torch.equal(s, scales_of(l.model))
    l.remove_cb(stop)
    l.fit(1, 1e-3)
    assert l.aas_train.df.epoch.tolist() == [1, 1]  # the same epoch, once more


# --- paper scale
# -----------------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_an_ensemble_goes_on_after_the_scaled_model_has_failed():
    """An image that no longer fools the scaled model's judge may fool the model's: both columns are those of all
    members together"""
    x, y = planted_images(8)
    m = planted_vit(3)
    members = [PGD(0.1, steps=1, alpha=1e-3, rand=False), PGD(0.1, steps=20)]
    A = Scaled(WorstCase(members), 0.3)
    v = two_models(m, x, y, A)
    victim = A.scaled(m, x, y)
    ok = lambda f, o: predict(f, o) == y
    xs = [Scaled(a, 0.3).craft(victim, x, y, 0) for a in members]
    assert torch.equal(v['transferred'], ok(m, x) & ok(m, xs[0]) & ok(m, xs[1])) and torch.equal(
        v['on_scaled'], ok(victim, x) & ok(victim, xs[0]) & ok(victim, xs[1])
    )
    # the order of the members is nothing
    same = two_models(m, x, y, Scaled(WorstCase(members[::-1]), 0.3))
    assert all(torch.equal(v[k], same[k]) for k in v)


# --- one fit or many, second copies, held batches
# ---------------------------------------------------------------------------------------------------


def life(fits):
    "A Learner that was trained in these calls of `fit`"
    l = learner([AASTrain(period=2, aas=AAS(FGSM(), ascent=1))])
    set_seed(0)
    for kw in fits:
        l.fit(lr=1e-3, **kw)
    return l


def test_the_period_counts_over_the_learners_life():
    a, b = life([dict(n_epoch=4)]), life([dict(n_epoch=1), dict(n_epoch=4, start_epoch=1)])
    assert (
        a.aas_train.df.epoch.tolist() == [2, 4]
        and b.aas_train.df.equals(a.aas_train.df)
        and same(weights(a), weights(b))
    )


def test_no_ascent_while_a_learning_rate_is_searched(tmp_path):
    "Whatever epoch comes next; and scales stay when the callback goes"
    l = learner([AASTrain(period=2, aas=AAS(FGSM(), ascent=1))], path=tmp_path)
    l.fit(1, 1e-3)
    with l.no_bar():
        l.lr_find(num_it=4, show_plot=False)
    assert (scales_of(l.model) == 1).all()
    l.fit(1, 1e-3)
    s = scales_of(l.model)
    assert (s < 1).any()
    l.remove_cb(AASTrain)
    l.fit(1, 1e-3)
    assert torch.equal(s, scales_of(l.model))


def test_held_batches_show_no_loss():
    "Nothing was trained on them: their loss is not the zero that a fit begins with, nor that of the batch before"
    held = learner([AdvTrain(P2), AASTrain(period=1, batches=1, hold=True)])
    held.fit(1, 1e-3)
    assert len(held.recorder.losses) == 1 and held.recorder.values[0][0] > 1
    whole = learner([AASTrain(period=2, batches=None, hold=True, aas=AAS(FGSM(), ascent=1))])
    whole.fit(3, 1e-3)
    v = [o[0] for o in whole.recorder.values]
    assert math.isnan(v[1]) and v[0] > 1 and v[2] > 1 and len(whole.recorder.losses) == 4
    assert all(math.isfinite(o[1]) for o in whole.recorder.values)


# --- copies of a scaled model
# -----------------------------------------------------------------------------------------------------------------------  # noqa: E501


@pytest.mark.parametrize('copied,s', [(copy.deepcopy, 1.0), (replicate, [0.3, 0.6, 0.9])])
def test_a_copy_of_a_scaled_model_has_its_own_scales(copied, s):
    m = build('vit')
    a = ScaledModel(m, s)
    b = copied(a)
    z = a(X)
    assert torch.equal(b(X), z)
    b.scales.mul_(0.5)
    assert torch.equal(a(X), z) and close(b(X), ScaledModel(m, a.scales * 0.5)(X))


def test_scales_that_were_loaded_or_swapped_count():
    "Also where the model began with a scale of 1, which is no scaling at all"
    m = build('vit')
    want = ScaledModel(m, 0.5)(X)
    one_ = ScaledModel(m, 1.0)
    assert torch.equal(torch.func.functional_call(one_, dict(scales=torch.tensor(0.5)), (X,)), want)
    one_.load_state_dict(ScaledModel(m, 0.5).state_dict())
    assert torch.equal(one_(X), want)


# --- what is the same, and what only prints alike
# -----------------------------------------------------------------------------------------------------


def test_attacks_that_print_alike_are_not_one():
    m = build('vit')
    As = [AAS(PGD2, climb=lambda z, y: ce(z, y)), AAS(PGD2, climb=lambda z, y: -ce(z, y))]
    assert repr(As[0]) == repr(As[1])
    with pytest.raises(ValueError, match='print as .*name them'):
        scale_report(m, (X, Y), As)
    assert len(scale_report(m, (X, Y), [PGD_TWICE, PGD_TWICE], twice=False)) == 1


PGD_TWICE = Scaled(PGD2, 0.5)


@dataclass(frozen=True, repr=False)
class ByRadius(AAS):
    "Scales that depend on the attack inside"

    def scaled(self, model, x, y=None, *, target=None, seed=0):
        return ScaledModel(model, self.attack.eps)


def test_scales_that_depend_on_the_attack_are_not_shared():
    m = build('vit')
    As = {str(e): ByRadius(PGD(e, steps=1)) for e in (0.9, 0.01)}
    t = scale_report(m, (X, Y), As, twice=False)
    for k, a in As.items():
        assert t.loc[k].equals(scale_report(m, (X, Y), {k: a}, twice=False).loc[k])
    assert not close(ScaledModel(m, 0.9)(X), ScaledModel(m, 0.01)(X), 1e-3)


# --- blocks that use their memory again


def test_scales_of_a_model_whose_blocks_write_where_their_last_output_is():
    m, (x, y) = tiny_vit(num_classes=4), (torch.rand(4, 1, 28, 28), torch.arange(4))
    aas = AAS(PGD2)
    torch.testing.assert_close(aas.scales(reusing(m), x, y), aas.scales(m, x, y), atol=1e-3, rtol=0)


# --- data sorted by class


@pytest.mark.parametrize('batches', [1, None])
def test_scales_chosen_on_one_class_are_noticed(batches):
    dls = synth_dls(64)
    dls.train = dls.train.new(shuffle=False, get_idxs=lambda: sorted(range(64), key=lambda i: int(dls.train_ds[i][1])))
    if batches is None:
        dls.train = dls.train.new(get_idxs=lambda: [i for i in range(64) if int(dls.train_ds[i][1]) == 0])
    learn = synth_learner(dls=dls, cbs=[AdvTrain(PGD2), AASTrain(period=1, batches=batches)])
    with pytest.warns(UserWarning, match='AASTrain: .* 1 of 4 classes') as said:
        learn.fit(2)
    assert len([o for o in said if 'AASTrain:' in str(o.message)]) == 1


def test_scales_where_the_data_does_not_say_how_many_classes_there_are():
    data = torch.utils.data.TensorDataset(torch.rand(32, 1, 28, 28), torch.arange(32) % 4)
    dl = torch.utils.data.DataLoader(data, 8)
    learn = synth_learner(
        dls=DataLoaders(dl, dl), loss_func=nn.CrossEntropyLoss(), cbs=[AdvTrain(PGD2), AASTrain(period=1)]
    )
    learn.fit(1)
    assert len(learn.aas_train.df) == 1


# --- experiments
# --------------------------------------------------------------------------------------------------------------------


def test_scales_are_chosen_on_other_images_than_those_that_are_judged():
    _, (x, _), (held, _) = aas_mod._small('fashion_mnist', 200, 50)
    assert len(x) == 200 and len(held) == 50
    assert not any((o == x).flatten(1).all(1).any() for o in held)


def test_with_scales_is_never_weaker_than_the_attack():
    m, pgd = planted_vit(1), PGD(0.1, steps=5)
    x, y = planted_images(24)
    assert right(m, with_scales(pgd, 1e-7)(m, x, y), y) <= right(m, pgd(m, x, y), y)


# --- experiments


@pytest.mark.parametrize('method', list(aas_mod._BASES))
def test_the_passes_of_a_base_method_are_those_that_are_counted(method):
    "What a run with `AASTrain` leaves out is reckoned with these numbers"
    model, count = small_model('vit', robust=True, data='fashion_mnist'), StepCost(batches=None)
    dls = fashion_mnist(n_train=8, n_valid=8, bs=8)
    cbs = [*aas_mod._BASES[method][0](PGD(0.1, steps=2)), count]
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=cbs)
    with learn.no_bar(), learn.no_logging():
        learn.fit_adv(1, 1e-3)
    assert aas_mod._step_passes(dict(method=method, train_steps=2)) == pytest.approx(count.step, abs=0.1)


def test_both_arms_of_table_5_pay_the_same():
    paid = {}
    for t in trials_of('aas.table5', 'laptop'):
        paid.setdefault((t.key['method'], t.key['seed']), {})[t.key['aas']] = t.training
    for arms in paid.values():
        assert all(v == pytest.approx(arms['none'], rel=0.005) for v in arms.values()), arms


@pytest.mark.parametrize('profile', ['smoke', 'laptop', 'gpu', 'paper'])
def test_scales_change_more_than_once_in_every_run(profile):
    runs = [t.key for t in trials_of('aas.table5', profile) if t.key['aas'] != 'none']
    assert runs and all(aas_mod._ascents(k) > 1 for k in runs)


def test_an_epoch_draws_as_many_images_as_it_is_told():
    dls = aas_mod._drawn(fashion_mnist(n_train=60, n_valid=20, bs=16), 40, seed=0)
    epochs = [torch.cat([b[0] for b in dls.train]) for _ in range(2)]
    assert [len(o) for o in epochs] == [40, 40]
    assert all(len(o.flatten(1).unique(dim=0)) == 40 for o in epochs)
    assert not torch.equal(*epochs)


def test_queries_grow_by_the_factor_where_nothing_opposes():
    model = small_model('vit', robust=True, data='fashion_mnist')
    before = aas_mod._query_norm(model)
    learn = Learner(fashion_mnist(n_train=32, n_valid=8, bs=8), model, loss_func=CrossEntropyLossFlat())
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, 0.0, cbs=aas_mod._GrowQueries(10))
    assert aas_mod._query_norm(model) == pytest.approx(10 * before, rel=1e-3)


def test_a_network_is_trained_once(tmp_path, monkeypatch):
    monkeypatch.setenv('ROBUST_OUT', str(tmp_path))
    s = profile_for('aas', 'smoke')
    how = aas_mod._victim_key(s, 'swin', 'fashion_mnist', 0)
    (first, *_), fits = aas_mod._victim(how), []
    monkeypatch.setattr(aas_mod, '_fitted', lambda *a: fits.append(a))
    second, eps, x, y = aas_mod._victim(how | dict(seed=1))
    assert not fits and torch.equal(predict(first, x), predict(second, x)) and eps == s.eps


def test_the_weights_of_a_network_depend_on_its_training(tmp_path, monkeypatch):
    monkeypatch.setenv('ROBUST_OUT', str(tmp_path))
    s = profile_for('aas', 'smoke')
    for lr in (0.001, 0.01):
        s.net_lr = lr
        aas_mod._victim(aas_mod._victim_key(s, 'levit', 'fashion_mnist', 0))
    assert len(list(tmp_path.rglob('*.safetensors'))) == 2
