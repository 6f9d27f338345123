"""AFAT: masks, alignment, the joint step by hand, precision, accumulation, composition, families, occlusion as an
attack."""

import copy, math, pickle, warnings
from functools import partial
from contextlib import nullcontext
import pytest, timm, torch, torch.nn.functional as F
from torch import nn
from fastai.vision.all import (
    Callback,
    CancelFitException,
    CrossEntropyLossFlat,
    CutMix,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    LabelSmoothingCrossEntropyFlat,
    Learner,
    L,
    MixUp,
    Normalize,
    SGD,
    SaveModelCallback,
    accuracy,
    first,
    set_seed,
)
from fastai.callback.schedule import *
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.attacks import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev import afat
from robust_nbdev.afat import *
from robust_nbdev.rvt_fan import *
from robust_nbdev.datasets import fashion_mnist
from robust_nbdev.evaluate import *
from robust_nbdev.eval_data import *
from robust_nbdev.models import small_model
from robust_nbdev.test_utils import *
from two_processes import one_and_two


def plain(x):
    return x.as_subclass(torch.Tensor)


def learner(cbs=None, n=16, bs=16, **kw):
    kw = {**dict(opt_func=SGD, lr=0.1, wd=0.0), **kw}
    return synth_learner(cbs=cbs, dls=kw.pop('dls', None) or synth_dls(n, bs=bs), **kw)


def flat(m):
    return torch.cat([p.detach().flatten() for p in m.parameters()])


def images(n=4, size=28, c=1, seed=0):
    return torch.rand(n, c, size, size, generator=torch.Generator().manual_seed(seed))


def counts(x, x2, p):
    return (
        ((x != x2).any(1, keepdim=True).unfold(2, p, p).unfold(3, p, p).flatten(4).any(-1)).flatten(1).sum(1).tolist()
    )


def no_hooks(m):
    return all(
        not (o._forward_hooks or o._forward_pre_hooks or o._backward_hooks) and 'forward' not in o.__dict__
        for o in m.modules()
    )


class Watch(Callback):
    "Note gradients of both models right before the steps"

    order = 9

    def before_step(self):
        self.f = torch.cat([p.grad.flatten().clone() for p in self.learn.model.parameters()])
        c = self.learn.afat.corruption
        self.c = None if c is None else torch.cat([p.grad.flatten().clone() for p in c.parameters()])


# --- masks
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'share,n,k',
    [(0.1, 196, 20), (0.1, 49, 5), (0.1, 16, 2), (0.1, 64, 6), (0.01, 16, 1), (0, 16, 0), (1, 16, 16), (0.5, 9, 4)],
)
def test_number_of_patches(share, n, k):
    assert n_occluded(share, n) == k


def test_number_of_patches_refuses():
    for s in (-0.1, 1.1):
        with pytest.raises(ValueError, match='between 0 and 1'):
            n_occluded(s, 10)


@pytest.mark.parametrize('n', [16, 49, 196])
def test_exact_number_ties_included(n):
    for k in (1, n // 10 + 1, n):
        for sc in (torch.zeros(3, n), torch.randn(3, n), torch.randint(0, 2, (3, n)).float()):
            m = keep_mask(sc, k)
            assert (m == 0).sum(1).tolist() == [k] * 3 and m.unique().numel() <= 2
    sc = torch.randn(3, n)
    m = keep_mask(sc, 2)
    assert (sc[m == 0].view(3, 2).amax(1) <= sc.masked_fill(m == 0, 9).amin(1)).all()  # the lowest go


def test_straight_through():
    g = torch.tensor([[-3.0, 0.2, 5, 0]])
    for ste, want in (('identity', g), ('clip', g.clamp(-1, 1)), ('sign', g.sign())):
        s = torch.randn(1, 4).requires_grad_()
        keep_mask(s, 2, ste).backward(g)
        assert torch.equal(s.grad, want)
    with pytest.raises(ValueError, match='ste must be one of'):
        keep_mask(torch.zeros(1, 4), 1, 'soft')


def test_the_relative_estimator_moves_covered_patches_alone_and_against_each_other():
    s = torch.tensor([[0.0, 1, 5, 6], [7, 0, 1, 8]]).requires_grad_()
    keep_mask(s, 2).backward(torch.tensor([[-3.0, -1, 9, 9], [9, 4, -2, 9]]))
    assert s.grad.tolist() == [[-1, 1, 0, 0], [0, 3, -3, 0]]


def test_one_covered_patch_is_compared_with_those_of_the_batch():
    s = torch.tensor([[0.0, 1], [1, 0]]).requires_grad_()
    keep_mask(s, 1).backward(torch.tensor([[-3.0, 9], [9, -1]]))
    assert s.grad.tolist() == [[-1, 0], [0, 1]]


def test_occlude_rectangles():
    x = images(2)[:, :, :14]
    keep = torch.ones(2, 8)
    keep[0, 5] = 0
    o = occlude(x, keep, (7, 7), torch.full((1,), 9.0))
    assert torch.equal(o[1], x[1]) and (o[0, :, 7:, 7:14] == 9).all() and (o[0] == 9).sum() == 49


@pytest.mark.parametrize('fill', ['noise', 'uniform', 'drop'])
def test_cover(fill):
    m, x, rng = Normalized(nn.Identity(), [0.3], [0.2]), images(6), torch.get_rng_state()
    c = patch_cover(x, 3, fill, m)
    assert torch.equal(torch.get_rng_state(), rng) and torch.equal(patch_cover(x[2:4], 3, fill, m), c[2:4])
    lo, hi = dict(noise=(0.3, 0.5), uniform=(0, 1), drop=(0.3, 0.3))[fill]
    assert lo - 1e-6 <= c.min()
    assert c.max() <= hi + 1e-6
    assert fill == 'drop' or not torch.equal(c, patch_cover(x, 4, fill, m))


def test_cover_refuses_and_knows_raw_models():
    with pytest.raises(ValueError, match='fill must be one of'):
        patch_cover(images(1), 0, 'black')
    assert patch_cover(images(2), 0, 'drop').abs().max() == 0 and patch_cover(images(64), 0).max() > 0.95


def test_patches_must_tile():
    m = timm.create_model(
        'vit_tiny_patch16_224',
        patch_size=16,
        embed_dim=24,
        depth=1,
        num_heads=3,
        dynamic_img_size=True,
        dynamic_img_pad=True,
        img_size=32,
    )
    with pytest.raises(ValueError, match='multiple of the patches'):
        patch_size(m, images(1, 40, 3))


def test_corruption_model():
    c = PatchOcclusion((14, 14), (16, 16))
    x = images(2, 224, 3)
    assert sum(p.numel() for p in c.parameters()) == 768 + 38416 and (c(x, 20) == 0).sum(1).tolist() == [20, 20]
    (c(x, 20) * torch.arange(196)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in c.parameters())
    with pytest.raises(ValueError, match='made for images'):
        c(images(2, 32, 3), 5)
    assert torch.allclose(c.scores(x), c.fc(F.gelu(F.conv2d(x, c.conv.weight, stride=16)).flatten(1)), atol=1e-5)


def test_fresh_ones_follow_the_seed_and_leave_the_random_state():
    m, x, rng = tiny_vit(), images(), torch.get_rng_state()
    a, b, c = [occlusion_for(m, x, s) for s in (0, 0, 1)]
    assert torch.equal(flat(a), flat(b))
    assert not torch.equal(flat(a), flat(c))
    assert torch.equal(torch.get_rng_state(), rng)
    assert a.mean.item() == 0.5 and a.grid == (4, 4) and a.patch == (7, 7)


def test_scores_are_those_of_normalised_images():
    m, x = Normalized(tiny_vit().model, [0.3], [0.2]), images()
    c = occlusion_for(m, x)
    assert torch.allclose(c.scores(x), c.fc(F.gelu(c.conv((x - 0.3) / 0.2)).flatten(1)), atol=1e-5)
    assert not torch.allclose(c.scores(x), c.fc(F.gelu(c.conv(x)).flatten(1)), atol=1e-3)


def test_likeness_of_attention_by_hand():
    m, x = tiny_vit(), images()
    x2 = x.flip(3)
    a, b = attn_maps(m, x), attn_maps(m, x2)
    want = torch.stack(
        [
            torch.stack([F.cosine_similarity(p[:, h, i], q[:, h, i]) for h in range(2) for i in range(17)])
            for p, q in zip(a, b)
        ]
    ).mean((0, 1))
    assert torch.allclose(attn_cos(m, x, x2), want, atol=1e-5)


def test_align_by_hand():
    f, g = [[torch.randn(2, 3, 4) for _ in range(3)] for _ in range(2)]
    assert torch.allclose(align_loss(f, g), sum((a - b).pow(2).mean() for a, b in zip(f, g)) / 3)
    assert torch.allclose(align_loss(f, g, 'sum'), sum((a - b).pow(2).sum() / 2 for a, b in zip(f, g)) / 3)
    with pytest.raises(ValueError, match='how must be'):
        align_loss(f, g, 'max')
    assert align_loss([f[0].half()], [g[0].half()]).dtype == torch.float32


# --- the joint step
# ---------------------------------------------------------------------------------------------------------


def by_hand(l, x, y, lam, share=0.25, select='adversarial'):
    "Gradients of classifier and corruption model for one batch, from the definition"
    m, c = l.model, l.afat.corruption
    keep = (
        c(x, n_occluded(share, 16))
        if c is not None
        else random_keep(x, 16, n_occluded(share, 16), torch.initial_seed() % 2**62)
    )
    x2 = occlude(x, keep, (7, 7), patch_cover(x, torch.initial_seed() % 2**62, 'noise', m))
    m.train()
    f, z = block_outputs(m, torch.cat([x, x2]), logits=True)
    a, (z, z2) = align_loss(*zip(*[o.chunk(2) for o in f])), z.chunk(2)
    loss = F.cross_entropy(z, y) + lam * a
    grad = lambda v, ps: torch.cat([g.flatten() for g in torch.autograd.grad(v, ps, retain_graph=True)])
    up = None if c is None else grad(F.cross_entropy(z2, y) if select == 'ce' else lam * a, list(c.parameters()))
    return grad(loss, list(m.parameters())), up, loss.item()


@pytest.mark.parametrize('select', ['adversarial', 'random', 'ce'])
@pytest.mark.parametrize('lam', [0.005, 3.0])
def test_one_step_by_hand(select, lam):
    w, l = Watch(), learner(AFAT(occlude=0.25, lam=lam, select=select, corruption_lr=0.1, length=None))
    x, y = map(plain, l.dls.train.one_batch())
    if select != 'random':
        l.afat.corruption = occlusion_for(l.model, x, 5)
    l.add_cb(w)
    f, c, loss = by_hand(l, *map(plain, one(l)), lam, select=select)
    was = None if c is None else flat(l.afat.corruption)
    l.fit(1)
    assert torch.allclose(w.f, f, atol=1e-5, rtol=1e-4)
    assert l.recorder.losses[0].item() == pytest.approx(loss, rel=1e-4)
    assert (w.c is None) == (select == 'random')
    if w.c is not None:
        assert torch.allclose(w.c, c, atol=1e-6, rtol=1e-3)
        # Nesterov's first step, uphill, weights decayed
        assert torch.allclose(flat(l.afat.corruption) - was, 0.1 * 1.9 * (c - 0.05 * was), atol=1e-5)


def one(l):
    "The one training batch; the sums of gradients do not depend on its order"
    return l.dls.train.one_batch()


def test_the_batch_is_the_clean_one_again_and_each_epoch_has_its_own_noise():
    seen = []

    class See(Callback):
        order = 8

        def after_pred(self):
            if self.training:
                seen.append(plain(self.x).clone())

        def after_batch(self):
            if self.training:
                assert len(self.x) == 16 and torch.equal(plain(self.x), seen[-1][:16])

    l = learner([AFAT(occlude=0.25, lam=1.0, select='random'), See()])
    l.fit(2)
    (x, x2), (y, y2) = [o.chunk(2) for o in seen]
    at = [next(j for j in range(16) if torch.equal(y[j], o)) for o in x]  # the order of the epochs differs
    assert all(not torch.equal(a, y2[j]) for a, j in zip(x2, at))
    assert any(
        counts(a[None], b[None], 7) != counts(a[None], c[None], 7) or not torch.equal(a != b, a != c)
        for a, b, c in zip(x, x2, y2[at])
    )


def test_gradients_that_an_interrupted_fit_left_do_not_count():
    def go(left):
        l = learner(AFAT(occlude=0.25, lam=1.0, length=None, corruption_lr=0.1))
        x = images(2)
        l.afat.corruption = c = occlusion_for(l.model, x, 3)
        l.afat.optim = corruption_optim(c, 0.1)
        if left:
            for p in c.parameters():
                p.grad = torch.ones_like(p)
        l.fit(1)
        return flat(c)

    assert torch.equal(go(True), go(False))


def test_directions_and_cost():
    class Moves(Callback):
        order = 9

        def before_step(self):
            self.was = [
                (p, p.detach().clone(), p.grad.clone())
                for m in (self.learn.model, self.learn.afat.corruption)
                for p in m.parameters()
            ]

    w, l = Moves(), learner(AFAT(occlude=0.25, lam=1.0), model=Counted(tiny_vit(num_classes=4)))
    l.add_cb(w)
    l.fit(1)
    n = len(list(l.model.parameters()))
    dots = [((p.detach() - q) * g).sum().item() for p, q, g in w.was]
    assert sum(dots[:n]) < 0 < sum(dots[n:]) and l.model.forwards == 2 * 16 + len(l.dls.valid_ds)


@pytest.mark.parametrize('kw', [dict(occlude=0), dict(lam=0), dict(occlude=switch(0.1, pct=2 / 3, before=0), epochs=1)])
def test_nothing_at_zero(kw):
    ep = kw.pop('epochs', 2)

    def go(cbs):
        l = learner(cbs, n=32, model=tiny_vit(num_classes=4, drop_path_rate=0.2, proj_drop_rate=0.2))
        l.fit(ep)
        return l

    l = go(AFAT(**kw))
    assert torch.equal(flat(l.model), flat(go(None).model)) and l.afat.corruption is None


def test_length_makes_the_step_independent_of_lam():
    def step(lam, length):
        l = learner(AFAT(occlude=0.25, lam=lam, length=length))
        l.afat.corruption = c = occlusion_for(l.model, images(2))
        was = flat(c)
        l.fit(1)
        return flat(c) - was

    assert torch.allclose(step(0.001, 5.0), step(1.0, 5.0), atol=1e-7)
    assert not torch.allclose(step(0.001, None), step(1.0, None), atol=1e-9)
    assert step(0.1, 5.0).norm() == pytest.approx(1e-4 * 1.9 * 5, rel=0.02)


def test_ascent_on_a_frozen_classifier():
    """Masks of a corruption model that was trained alone move features more than random ones; the classifier stays as
    it was"""
    m, (x, y) = (
        small_model('vit', data='fashion_mnist'),
        [plain(o) for o in fashion_mnist(n_train=16, n_valid=64, bs=64).valid.one_batch()],
    )
    before, rng = state_of(m), torch.get_rng_state()
    c, seen = fit_corruption(m, (x, y), epochs=30, lr=1e-2)
    assert len(seen) == 30 and state_of(m) == before and torch.equal(torch.get_rng_state(), rng)

    def align(keep, seed):
        with torch.no_grad():
            f = block_outputs(m, torch.cat([x, occlude(x, keep, (7, 7), patch_cover(x, seed, 'noise', m))]))
            return align_loss(*zip(*[o.chunk(2) for o in f])).item()

    assert align(c(x, 2), 99) > 1.05 * sum(align(random_keep(x, 16, 2, s), 99) for s in range(5)) / 5


@pytest.fixture(scope='module')
def small_vit():
    "A trained ViT, training images, and held-out ones"
    dls = fashion_mnist(n_train=1000, n_valid=128, bs=64)
    held = [torch.cat(o) for o in zip(*[b[1:] for b in eval_batches(dls.valid)])]
    return small_model('vit', data='fashion_mnist'), dls.train, held


def moved(m, x, attack):
    "Alignment loss under an occlusion"
    with torch.no_grad():
        f = block_outputs(m, torch.cat([x, attack(m, x, None, seed=9)]))
    return align_loss(*zip(*[o.chunk(2) for o in f])).item()


def test_a_corruption_model_does_better_than_chance_on_images_that_it_has_not_seen(small_vit):
    m, train, (x, _) = small_vit
    c, _ = fit_corruption(m, train, epochs=2, lr=3e-3)
    assert moved(m, x, Occlusion(by=c)) > 1.15 * moved(m, x, Occlusion())
    assert len(c(x, 2).unique(dim=0)) >= 5  # its masks depend on the image


def test_with_the_published_estimator_a_corruption_model_keeps_its_patches(small_vit):
    m, train, (x, _) = small_vit
    first_choice = occlusion_for(m, x, ste='clip')(x, 2)
    c, _ = fit_corruption(m, train, occlusion_for(m, x, ste='clip'), epochs=2, lr=3e-3)
    favourites = (1 - first_choice).sum(0).topk(4).indices
    assert (1 - c(x, 2))[:, favourites].sum() > 0.5 * 2 * len(x)  # chance: a quarter


@pytest.mark.parametrize('how', ['single', 'gradient'])
def test_a_ranking_moves_features_most(small_vit, how):
    m, _, (x, _) = small_vit
    assert moved(m, x, RankedOcclusion(how=how)) > 1.4 * moved(m, x, Occlusion())


def test_the_effect_of_a_patch_is_that_of_covering_it_alone():
    m, x = tiny_vit(), images(2)
    cover = patch_cover(x, 0, 'noise', m)
    keep = torch.ones(2, 16)
    keep[:, 5] = 0
    pairs = zip(block_outputs(m, x), block_outputs(m, occlude(x, keep, (7, 7), cover)))
    want = torch.stack([(a - b).pow(2).flatten(1).mean(1) for a, b in pairs]).mean(0)
    assert torch.allclose(patch_effects(m, x, cover, (7, 7))[:, 5], want, rtol=1e-3)
    with pytest.raises(ValueError, match='how must be one of'):
        patch_effects(m, x, cover, (7, 7), 'all')


def test_masks_of_the_gradient_train_without_a_corruption_model():
    l = learner(AFAT(occlude=0.25, lam=1.0, select='gradient'), model=Counted(tiny_vit(num_classes=4)))
    l.fit(1)
    assert l.afat.corruption is None and l.afat.df.align_loss[0] > 0 and l.model.training is False


def test_a_learner_keeps_its_own_table_when_it_loads(tmp_path):
    l = resumable(tmp_path)
    l.fit(1)
    l.save('first')
    before = flat(l.afat.corruption)
    l.fit(2)
    l.load('first')
    assert torch.equal(flat(l.afat.corruption), before) and l.afat.df.epoch.tolist() == [0, 1, 2]


def test_weights_saved_without_afat_are_not_loaded_with_an_older_adversary(tmp_path):
    l = resumable(tmp_path)
    l.fit(1)
    l.save('m')
    learner(path=tmp_path).save('m')
    fresh = resumable(tmp_path)
    fresh.load('m', with_opt=False)
    assert fresh.afat.corruption is None


def test_a_corruption_model_alone_knows_its_epochs():
    m, data = tiny_vit(), (images(), torch.arange(4))
    c, _ = fit_corruption(m, data, epochs=3)
    again = occlusion_for(m, data[0])
    again.load_state_dict(c.state_dict())
    assert int(again.epochs) == 3


def test_a_run_that_goes_on_has_the_adversary_that_it_left(tmp_path):
    whole, rest = resumable(tmp_path), resumable(tmp_path)
    whole.fit(2, cbs=SaveRun('r'))
    kept = flat(whole.afat.corruption)
    assert rest.resume('r') == 2 and torch.equal(flat(rest.afat.corruption), kept)


PAPER_NETS = ['rvt_tiny_plus', 'rvt_small_plus', 'rvt_base_plus'] + [
    'fan_tiny_8_p4_hybrid',
    'fan_small_12_p4_hybrid',
    'fan_base_16_p4_hybrid',
]


def test_recipes_have_the_numbers_of_the_published_code():
    rates = [afat_recipe(k).peak_lr() for k in PAPER_NETS]
    assert rates == pytest.approx([2e-3] * 4 + [4e-3] * 2)
    assert afat_recipe('rvt_small_plus', 'cifar').peak_lr() == pytest.approx(1.25e-4)
    assert [afat_recipe(k).drop_path for k in PAPER_NETS] == [0.1] * 4 + [0.25, 0.35]
    assert [afat_recipe(k).half for k in PAPER_NETS] == [True, True, False, True, True, True]
    with pytest.raises(ValueError, match='net must be one of'):
        afat_recipe('deit_small_patch16_224')


@pytest.mark.slow
@pytest.mark.parametrize('net', PAPER_NETS)
def test_each_recipe_takes_a_step(net):
    x = torch.rand(4, 3, 224, 224)
    dls = DataLoaders.from_dsets(list(zip(x, range(4))), list(zip(x, range(4))), bs=4)
    dls.c = 4
    r = afat_recipe(net)
    few = dict(depth=1) if net.startswith('fan') else dict(depths=(1, 1) if 'tiny' in net else (1,))
    l = r.learner(dls, r.model(224, 4, **few), cbs=AFAT())
    before = flat(l.model)
    with l.no_bar(), l.no_logging():
        r.fit(l, 1)
    assert not torch.equal(flat(l.model), before) and l.afat.df.align_loss[0] > 0


def test_images_of_the_augmentation_reach_the_statistics_alone():
    m = Normalized(timm.create_model('rvt_nano_plus', img_size=28, in_chans=1, num_classes=4), [0.5], [0.5])
    weights = [p.detach().clone() for p in m.parameters()]
    l = learner([afat._AugmentPass()], model=m, lr=0.0)
    with l.no_bar(), l.no_logging():
        l.fit(1)
    assert all(torch.equal(a, b) for a, b in zip(weights, m.parameters()))
    assert first(o for o in m.modules() if isinstance(o, nn.BatchNorm2d)).num_batches_tracked == 2


@pytest.mark.parametrize('select', ['adversarial', 'ce'])
def test_accumulation(select):
    def go(bs, cbs):
        l = learner([AFAT(occlude=0.25, lam=1.0, select=select, corruption_lr=0.1, length=None), *cbs], bs=bs)
        l.afat.corruption = occlusion_for(l.model, images(2), 3)
        if bs < 16:
            assert len(l.dls.train) == 16 // bs
        l.fit(1)
        return flat(l.model), flat(l.afat.corruption)

    (f, c), (f4, c4) = go(16, []), go(4, [GradientAccumulation(16)])
    assert torch.allclose(f, f4, atol=1e-5)
    assert torch.allclose((c - c4) / (4 if select == 'ce' else 1), torch.zeros(()), atol=1e-4 if select != 'ce' else 1)


@pytest.mark.parametrize('dtype,scale', [(torch.bfloat16, 1.0), (torch.float16, 2.0**4), (torch.float16, 2.0**14)])
def test_mixed_precision(dtype, scale):
    def go(cbs):
        w = Watch()
        l = learner([AFAT(occlude=0.25, lam=1.0, length=None), w, *cbs])
        l.afat.corruption = occlusion_for(l.model, images(2), 3)
        l.fit(1)
        return l, w

    (l, w), (h, v) = go([]), go([HalfPrecision(dtype, scale)])
    assert v.c.dtype == torch.float32
    assert F.cosine_similarity(w.c, v.c, dim=0) > 0.97
    assert v.c.norm() / w.c.norm() == pytest.approx(1, rel=0.1)
    assert not torch.is_autocast_enabled('cpu') and no_hooks(h.model)


def test_overflow_skips_both_models():
    l = learner([AFAT(occlude=0.25, lam=1.0), HalfPrecision(scale=2.0**40)])
    l.afat.corruption = c = occlusion_for(l.model, images(2))
    was = flat(c), flat(l.model)
    l.fit(1)
    assert torch.equal(flat(c), was[0])
    assert torch.equal(flat(l.model), was[1])
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in c.parameters())
    l.remove_cb(HalfPrecision)
    l.fit(1)
    assert not torch.equal(flat(c), was[0])


def test_a_skipped_step_is_skipped_by_both():
    "The loss scaler finds an infinite gradient in the classifier alone: the corruption model waits too, and forgets"

    class Inf(Callback):
        order = 9

        def before_step(self):
            next(self.learn.model.parameters()).grad.fill_(math.inf)

    l = learner([AFAT(occlude=0.25, lam=1.0), HalfPrecision(scale=2.0**4), Inf()])
    l.afat.corruption = c = occlusion_for(l.model, images(2))
    was = flat(c)
    l.fit(1)
    assert torch.equal(flat(c), was) and all(p.grad is None or p.grad.abs().sum() == 0 for p in c.parameters())


def test_summed_losses():
    "A Learner's loss that sums over images gets an alignment that counts images too"

    def grads(reduction):
        w = Watch()
        l = learner(
            [AFAT(occlude=0.25, lam=3.0, select='random'), w],
            loss_func=CrossEntropyLossFlat(reduction=reduction),
            lr=1e-3,
        )
        l.fit(1)
        return w.f

    assert torch.allclose(grads('sum'), 16 * grads('mean'), rtol=1e-3, atol=1e-4)


def test_summed_losses_under_mixup():
    "MixUp puts itself in front of the loss, which still sums"

    def added(*cbs):
        got, at = {}, AFAT.order

        def note(k, order):
            c = Callback(after_loss=lambda self: self.training and got.update({k: self.learn.loss_grad.item()}))
            c.order = order
            return c

        l = learner(
            [AFAT(occlude=0.25, lam=3.0, select='random'), note('before', at - 0.1), note('after', at + 0.1), *cbs],
            loss_func=CrossEntropyLossFlat(reduction='sum'),
            lr=1e-3,
        )
        l.fit(1)
        return got['after'] - got['before'], l.afat.df.align_loss[0]

    for cbs in ([], [MixUp()], [CutMix()]):
        v, align = added(*cbs)
        assert v == pytest.approx(16 * 3 * align, rel=1e-3)


# --- composition
# ------------------------------------------------------------------------------------------------------------

COMPANY = dict(
    mixup=lambda: [MixUp()],
    cutmix=lambda: [CutMix()],
    clip=lambda: [GradientClip(0.1)],
    ema=lambda: [EMA(0.9)],
    at=lambda: [AdvTrain(PGD(0.1, steps=1))],
    fgsm_rs=lambda: [AdvTrain(FGSM_RS(0.1))],
    awp=lambda: [AWP(0.01)],
    at_awp=lambda: [AdvTrain(FGSM(0.1)), AWP(0.01)],
    no_decay=lambda: [NoDecay()],
    all=lambda: [
        MixUp(),
        GradientAccumulation(32),
        HalfPrecision(torch.bfloat16),
        GradientClip(1.0),
        EMA(0.9),
        AdvTrain(FGSM(0.1)),
    ],
)


@pytest.mark.parametrize('company', COMPANY)
@pytest.mark.parametrize('loss', [CrossEntropyLossFlat(), LabelSmoothingCrossEntropyFlat()], ids=['ce', 'smooth'])
def test_company(company, loss):
    for flip in (False, True):
        cbs = [AFAT(occlude=0.25, lam=0.1), *COMPANY[company]()]
        l = learner(cbs[::-1] if flip else cbs, n=32, loss_func=loss, opt_func=ranger_or_adam())
        l.fit(2, 1e-3)
        assert l.loss_func is loss
        assert no_hooks(l.model)
        assert flat(l.model).isfinite().all()
        assert not torch.is_autocast_enabled('cpu')
        assert len(l.afat.df) == 2
        assert all(isinstance(v, float) and math.isfinite(v) for v in l.recorder.values[-1])


def ranger_or_adam():
    from fastai.optimizer import Adam

    return Adam


def test_awp_moves_and_returns():
    "At gamma 0 AWP changes nothing; at a tiny gamma next to nothing"

    def go(cbs):
        l = learner([AFAT(occlude=0.25, lam=1.0), *cbs])
        l.fit(1)
        return flat(l.model)

    a, b, c = go([]), go([AWP(0.0)]), go([AWP(1e-6)])
    assert torch.equal(a, b) and torch.allclose(a, c, atol=1e-4) and not torch.equal(a, c)


def test_refuses_what_cannot_be():
    for cb in (TRADES(PGD(0.1, steps=1)), MART(PGD(0.1, steps=1)), AdvTrain(FGSM(0.1), clean_loss=0.5)):
        with pytest.raises(ValueError, match='joint batch'):
            learner([AFAT(), cb]).fit(1)
    l = learner(AFAT())
    l.model.model.set_grad_checkpointing(True)
    with pytest.raises(ValueError, match='gradient checkpointing'):
        l.fit(1)
    l = learner(AFAT())
    l.dls.train.after_batch.add(Normalize.from_stats([0.5], [0.5], cuda=False))
    with pytest.raises(ValueError, match='Normalize'):
        l.fit(1)
    l = learner(AFAT(), model=nn.Sequential(nn.Flatten(), nn.Linear(784, 4)))
    with pytest.raises(TypeError, match='supported transformer'):
        l.fit(1)
    l = learner(AFAT())
    l.model = torch.compile(l.model, backend='eager')
    with pytest.raises(ValueError, match='compile'):
        l.fit(1)
    l = learner(AFAT(corruption=PatchOcclusion((2, 2), (7, 7), 1)))
    with pytest.raises(ValueError, match='made for images'):
        l.fit(1)


@pytest.mark.parametrize(
    'kw,words',
    [
        (dict(occlude=2), 'occlude must be'),
        (dict(lam=-1), 'lam must be'),
        (dict(select='best'), 'select must be one of'),
        (dict(fill='black'), 'fill must be one of'),
        (dict(how='max'), 'how must be one of'),
        (dict(ste='x'), 'ste must be one of'),
    ],
)
def test_arguments(kw, words):
    with pytest.raises(ValueError, match=words):
        AFAT(**kw)


def test_the_gradient_of_the_binariser_is_that_of_the_corruption_model():
    "A given model has a gradient of its own: it is kept, and another one is refused, not ignored"
    make = lambda ste: PatchOcclusion((4, 4), (7, 7), 1, ste=ste)
    assert AFAT().ste == 'relative'
    assert AFAT(ste='clip').ste == 'clip'
    assert AFAT(corruption=make('sign')).ste == 'sign'
    assert AFAT(corruption=make('clip'), ste='clip', patch=7).ste == 'clip'
    assert repr(AFAT(corruption=make('sign'))).endswith("select='adversarial', ste='sign')")
    with pytest.raises(
        ValueError, match="ste='clip' is for a fresh corruption model, the given one has ste='identity'"
    ):
        AFAT(corruption=make('identity'), ste='clip')
    with pytest.raises(
        ValueError, match="ste='identity' is for a fresh corruption model, the given one has ste='sign'"
    ):
        AFAT(corruption=make('sign'), ste='identity')
    for patch in (14, (14, 7), [7, 14]):
        with pytest.raises(
            ValueError, match=r'patch=\(.*\) is for a fresh corruption model, the given one has patch=\(7, 7\)'
        ):
            AFAT(corruption=make('clip'), patch=patch)
    l = learner(AFAT(occlude=0.25, ste='sign'))
    l.fit(1)
    assert l.afat.corruption.ste == 'sign'


def test_mask_accuracy():
    m, x, y = tiny_vit(), images(6), torch.arange(6)
    p = [predict(m, Occlusion(share=0.5)(m, x, y, seed=i)) for i in range(3)]
    y = p[1].clone()
    clean = predict(m, x)
    y[0] = (clean[0] + 1) % 10
    y[1] = clean[1]
    assert mask_accuracy(m, (x, y), masks=3, share=0.5, bs=4) == pytest.approx(
        [((o == y) & (clean == y)).float().mean().item() for o in p]
    )
    for data, n in (((x[:0], y[:0]), None), ((x, y), 0)):
        with pytest.raises(ValueError, match='the data is empty|whole number'):
            mask_accuracy(m, data, masks=2, n=n)


def test_repr():
    assert repr(AFAT()) == "AFAT(occlude=0.1, lam=0.005, select='adversarial')"
    assert (
        repr(AFAT(occlude=warmup(0.1), fill='drop'))
        == "AFAT(occlude=warmup(0.1, pct=0.1), lam=0.005, select='adversarial', fill='drop')"
    )
    assert repr(Occlusion(by=PatchOcclusion((2, 2), (7, 7), 1))) == 'Occlusion(by=PatchOcclusion(2x2 patches of 7x7))'
    assert Occlusion().name == 'occlusion'


def test_patches_of_ones_own_must_tile():
    for select in ('adversarial', 'random'):
        with pytest.raises(ValueError, match='28x28 are not a multiple of the patch, 5x5'):
            learner(AFAT(patch=5, select=select)).fit(1)
    with pytest.raises(ValueError, match='28x28 are not a multiple of the patch, 5x5'):
        PatchAugment(patch=5)(tiny_vit(), images())
    with pytest.raises(ValueError, match='28x28 are not a multiple of the patch, 7x9'):
        occlusion_for(tiny_vit(), images(), patch=(7, 9))
    l = learner(AFAT(patch=(14, 7)))
    l.fit(1)
    assert l.afat.corruption.grid == (2, 4)


def test_a_joint_batch_that_begins_later_is_refused():
    "TORA's batch is joint as soon as its schedule leaves 0"
    from robust_nbdev.tora import TORA, tora_vit

    l = learner([AFAT(), TORA(FGSM(0.1), lam=switch(0.5, pct=0.5))], n=64, model=tora_vit(tiny_vit(num_classes=4), d=2))
    with pytest.raises(ValueError, match='32 images for 16 labels'):
        l.fit_tora(0, 1)


def test_a_cancelled_batch_leaves_nothing():
    from fastai.vision.all import CancelBatchException, CancelValidException

    def skip(self):
        raise CancelBatchException() if self.training else CancelValidException()

    c = Callback(before_batch=skip)
    c.order = 8
    l = learner([AFAT(occlude=0.25), c])
    l.fit(1)
    assert no_hooks(l.model) and l.afat.leaf is None and l.afat.kept is None


def test_a_corruption_model_is_trained_where_the_classifier_is(monkeypatch):
    import robust_nbdev.afat as A

    seen, real = [], A.eval_batches
    monkeypatch.setattr(A, 'eval_batches', lambda *a, **k: seen.append(k.get('device')) or real(*a, **k))
    fit_corruption(tiny_vit(), (images(), torch.arange(4)))
    assert seen == [torch.device('cpu')]


@pytest.mark.parametrize(
    'stop', [KeyboardInterrupt, RuntimeError('out of memory'), CancelFitException], ids=['interrupt', 'error', 'cancel']
)
@pytest.mark.parametrize(
    'event', ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'before_step', 'after_batch']
)
@pytest.mark.parametrize('awp', [False, True], ids=['', 'awp'])
def test_nothing_stays_on_the_model(event, awp, stop):
    "However a fit ends, and wherever: between AFAT's own event and the forward, or between AWP's two forwards"

    def bang(*a):
        raise stop

    for order in (AFAT.order + 0.1, AWP.order + 0.1, 99):
        c = Callback(**{event: bang})
        c.order = order
        l = learner([AFAT(occlude=0.25, lam=1.0), *([AWP(0.01)] if awp else []), c])
        with (
            nullcontext()
            if stop is CancelFitException
            else pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else RuntimeError)
        ):
            l.fit(1)
        assert no_hooks(l.model) and 'all_batches' not in l.__dict__ and l.afat.leaf is l.afat.undo is None
        pickle.dumps(l.model)


def test_an_epoch_that_is_left_out_leaves_nothing():
    l = learner(AFAT(occlude=0.25))
    l.fit(2, start_epoch=1)
    assert 'all_batches' not in l.__dict__ and l.afat.df.epoch.tolist() == [1]
    c = Callback(before_epoch=lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    c.order = 99
    l.add_cb(c)
    with pytest.raises(KeyboardInterrupt):
        l.fit(1)
    l.remove_cbs([c, l.afat])
    l.fit(1)
    assert 'all_batches' not in l.__dict__ and no_hooks(l.model)  # without AFAT, too


@pytest.mark.parametrize(
    'where', ['before_batch', 'forward', 'after_pred', 'after_loss', 'after_backward', 'after_step']
)
@pytest.mark.parametrize('awp', [False, True])
def test_interrupt_and_refit(where, awp):
    def go(stop):
        l = learner([AFAT(occlude=0.25, lam=1.0), *([AWP(0.01)] if awp else [])], n=32)

        def bang(*a):
            raise KeyboardInterrupt

        if stop:
            if where == 'forward':
                h = l.model.model.blocks[1].register_forward_pre_hook(bang)
            else:
                c = Callback(**{where: bang})
                c.order = 8
                l.add_cb(c)
            with pytest.raises(KeyboardInterrupt):
                l.fit(1)
            if where == 'forward':
                h.remove()
            else:
                l.remove_cb(c)
            assert no_hooks(l.model)
            set_seed(0, reproducible=True)
            l.model.load_state_dict(tiny_vit(num_classes=4).state_dict())
            l.create_opt()
            l.opt.zero_grad()
            l.afat.corruption = l.afat.optim = None
        set_seed(0, reproducible=True)
        l.dls.train.rng.seed(0)
        l.fit(1)
        return l

    a, b = go(True), go(False)
    assert no_hooks(a.model) and torch.allclose(flat(a.model), flat(b.model), atol=1e-5)


def test_only_training_trains():
    l = learner(AFAT(occlude=0.25, lam=1.0))
    l.fit(1)
    was = flat(l.afat.corruption)
    l.validate()
    l.get_preds()
    assert torch.equal(flat(l.afat.corruption), was)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        l.lr_find(num_it=5, show_plot=False)
    assert torch.equal(flat(l.afat.corruption), was) and no_hooks(l.model)


def test_goes_on_in_the_next_fit():
    l = learner(AFAT(occlude=0.25, lam=1.0))
    l.fit(2)
    c = l.afat.corruption
    was = flat(c)
    l.fit(1)
    assert l.afat.corruption is c and not torch.equal(flat(c), was) and l.afat.df.epoch.tolist() == [0, 1, 2]


def test_export(tmp_path):
    l = learner(AFAT(occlude=0.25, lam=1.0), dls=fashion_mnist(n_train=32, n_valid=16, bs=16), model=tiny_vit())
    l.fit(1)
    l.path = tmp_path
    l.export('l.pkl')
    from fastai.learner import load_learner

    x, o = images(2), load_learner(tmp_path / 'l.pkl')
    assert torch.allclose(o.model.eval()(x), l.model.eval()(x), atol=1e-6)
    assert o.afat.optim is None and torch.equal(flat(o.afat.corruption), flat(l.afat.corruption))


def test_schedules():
    seen = []
    l = learner(
        [
            AFAT(occlude=switch(0.5, pct=0.5, before=0.125), lam=warmup(1.0, pct=1)),
            Callback(
                after_pred=lambda self: (
                    seen.append(int((self.learn.afat.kept == 0).sum(1)[0]))
                    if self.training and self.learn.afat.kept is not None
                    else None
                )
            ),
        ],
        n=64,
    )
    l.fit(2)
    assert seen == [2] * 3 + [8] * 4  # lam is 0 at the first batch


# --- one fit or many, resumed fits, second copies
# -----------------------------------------------------------------------------


def life(fits, **kw):
    "A Learner that was trained in these calls of `fit`"
    l = learner(AFAT(**{**dict(occlude=0.25, lam=1.0), **kw}), n=32)
    set_seed(0)
    for f in fits:
        l.fit(**f)
    return l


@pytest.mark.parametrize('select', ['adversarial', 'random'])
@pytest.mark.parametrize(
    'fits',
    [4 * [dict(n_epoch=1)], 2 * [dict(n_epoch=2)], [dict(n_epoch=1), dict(n_epoch=4, start_epoch=1)]],
    ids=['1+1+1+1', '2+2', '1, and on with start_epoch'],
)
def test_four_fits_are_one(fits, select):
    a, b = life([dict(n_epoch=4)], select=select), life(fits, select=select)
    assert torch.equal(flat(a.model), flat(b.model))
    assert a.afat.df.equals(b.afat.df)
    assert a.afat.df.epoch.tolist() == [0, 1, 2, 3]
    if select != 'random':
        assert torch.equal(flat(a.afat.corruption), flat(b.afat.corruption))


def test_four_calls_draw_the_noise_of_one(monkeypatch):
    "A corruption model that is trained alone, call after call"
    import robust_nbdev.afat as A

    seen, real = [], A.patch_cover
    monkeypatch.setattr(A, 'patch_cover', lambda x, seed, *a: seen.append(seed) or real(x, seed, *a))
    m, data = tiny_vit(), (images(), torch.arange(4))
    fit_corruption(m, data, epochs=4, seed=5)
    once = list(seen)
    seen.clear()
    c = None
    for _ in range(4):
        c, _ = fit_corruption(m, data, c, seed=5)
    assert seen == once == [5, 6, 7, 8]


def test_a_loaded_corruption_model_draws_on(monkeypatch):
    "`fit_corruption` behind `AFAT.state_dict` has noise that the model has not seen"
    import robust_nbdev.afat as A

    seen, real = [], A.patch_cover
    m, data = tiny_vit(), (images(), torch.arange(4))
    c, _ = fit_corruption(m, data, epochs=2, seed=5)
    a = AFAT()
    a.load_state_dict(AFAT(corruption=c).state_dict())
    monkeypatch.setattr(A, 'patch_cover', lambda x, seed, *a: seen.append(seed) or real(x, seed, *a))
    fit_corruption(m, data, a.corruption, seed=5)
    assert seen == [7]


def resumable(path):
    return learner(AFAT(occlude=0.25, lam=1.0, corruption_lr=0.1), path=path)


def test_a_resumed_fit_has_the_adversary_that_it_left(tmp_path):
    "`learn.save` keeps it beside the weights, and `learn.load` finds it there"
    whole, half, rest = [resumable(tmp_path) for _ in range(3)]
    whole.fit(4)
    half.fit(2)
    half.save('m')
    rest.load('m')
    assert torch.equal(flat(rest.afat.corruption), flat(half.afat.corruption))
    assert not torch.equal(flat(half.afat.corruption), flat(whole.afat.corruption))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        rest.fit(4, start_epoch=2)
    assert torch.allclose(flat(rest.afat.corruption), flat(whole.afat.corruption), atol=1e-4)
    assert rest.afat.df.epoch.tolist() == [0, 1, 2, 3]


def test_a_resumed_fit_with_a_fresh_adversary_says_so(tmp_path):
    l = resumable(tmp_path)
    with pytest.warns(UserWarning, match='fresh corruption model.*state_dict'):
        l.fit(2, start_epoch=1)
    for go in (lambda: resumable(tmp_path).fit(1), lambda: learner(AFAT(select='random')).fit(2, start_epoch=1)):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            go()


def test_the_state_of_a_callback_that_has_not_begun():
    a = AFAT()
    a.load_state_dict(AFAT().state_dict())
    assert a.corruption is None and len(a.df) == 0


def test_a_second_copy_is_refused():
    for more in (AFAT(select='random'), type('Mine', (AFAT,), {})()):
        l = learner([AFAT(), more])
        for go in (lambda: l.fit(1), l.validate):
            with pytest.raises(ValueError, match='two AFAT callbacks'):
                go()


# --- the Learner's own loss
# -----------------------------------------------------------------------------------------------------

LOSSES = dict(
    weights=(CrossEntropyLossFlat(weight=torch.full((4,), 10.0)), CrossEntropyLossFlat(), 1),
    partial=(partial(F.cross_entropy, reduction='sum'), F.cross_entropy, 16),
    smooth_sum=(LabelSmoothingCrossEntropyFlat(reduction='sum'), LabelSmoothingCrossEntropyFlat(), 16),
    ignored=(CrossEntropyLossFlat(ignore_index=9), CrossEntropyLossFlat(), 1),
)


@pytest.mark.parametrize('select', ['random', 'adversarial'])
@pytest.mark.parametrize('k', LOSSES)
def test_what_is_added_follows_the_learners_loss(k, select):
    "Equal class weights change nothing, a sum is so many times the mean: both terms, not one of them"

    def grads(f):
        w = Watch()
        l = learner([AFAT(occlude=0.25, lam=3.0, select=select), w], loss_func=f, lr=1e-3)
        l.fit(1)
        return w.f

    f, g, times = LOSSES[k]
    assert torch.allclose(grads(f), times * grads(g), rtol=1e-3, atol=1e-4)


# --- a model that changes what it is given; what must stand still
# ---------------------------------------------------------------


class InPlace(Normalized):
    "Normalises the very tensor that it is called with"

    def forward(self, x):
        return self.model(x.sub_(self.mean).div_(self.std))


def in_place(m):
    return InPlace(m.model, m.mean, m.std).eval()


class Greedy(PatchOcclusion):
    "A corruption model with batch statistics, which writes into its images"

    def __init__(self, *args):
        super().__init__(*args)
        self.bn = nn.BatchNorm2d(1, affine=False)

    def scores(self, x):
        return super().scores(self.bn(x.mul_(0.5)))


def greedy(seed=0):
    torch.manual_seed(seed)
    return Greedy((4, 4), (7, 7), 1, 0.5, 0.5)


OCCLUSIONS = dict(
    random=lambda: Occlusion(share=0.25),
    learned=lambda: Occlusion(share=0.25, by=occlusion_for(tiny_vit(), images())),
    greedy=lambda: GreedyOcclusion(share=0.25),
    ranked=lambda: RankedOcclusion(share=0.25),
    augment=lambda: PatchAugment(p=0.5),
)


def test_every_occlusion_is_tried():
    import robust_nbdev.afat as A

    assert {
        o for o in vars(A).values() if isinstance(o, type) and issubclass(o, PatchAttack) and o.__module__ == A.__name__
    } == {type(f()) for f in OCCLUSIONS.values()}


@pytest.mark.parametrize('k', OCCLUSIONS)
def test_attacks_on_a_model_that_works_in_place(k):
    m, x, y = tiny_vit(), images(6), torch.arange(6)
    a = OCCLUSIONS[k]()
    want, x0 = a(m, x, y), x.clone()
    assert torch.equal(a(in_place(m), x, y), want) and torch.equal(x, x0)


@pytest.mark.parametrize(
    'see',
    [
        lambda m, x: attn_cos(m, x, x.flip(3)),
        lambda m, x: torch.tensor(mask_accuracy(m, (x, torch.arange(6)), masks=2, share=0.5)),
        lambda m, x: torch.tensor(fit_corruption(m, (x, torch.arange(6)), epochs=2)[1]),
    ],
    ids=['attention', 'masks', 'fit_corruption'],
)
def test_what_looks_at_a_model_that_works_in_place(see):
    m, x = tiny_vit(), images(6)
    x0, want = x.clone(), see(m, x)
    assert torch.equal(see(in_place(m), x), want) and torch.equal(x, x0)


def test_pictures_of_a_model_that_works_in_place(monkeypatch):
    import robust_nbdev.afat as A

    seen, real = [], A.plt.Axes.imshow
    monkeypatch.setattr(
        A.plt.Axes, 'imshow', lambda self, o, **kw: seen.append(torch.as_tensor(o)) or real(self, o, **kw)
    )
    x = images(2)
    show_occlusion(in_place(tiny_vit()), Occlusion(share=0.25), (x, torch.arange(2)), 2)
    assert all(torch.equal(o, p[0]) for o, p in zip(seen, x))


@pytest.mark.parametrize('awp', [False, True], ids=['', 'awp'])
def test_training_a_model_that_works_in_place(awp):
    def go(m):
        l = learner([AFAT(occlude=0.25, lam=1.0), *([AWP(0.01)] if awp else [])], model=m)
        l.fit(1)
        return flat(l.model)

    assert torch.equal(go(tiny_vit(num_classes=4)), go(in_place(tiny_vit(num_classes=4))))


def test_a_corruption_model_that_writes_into_its_images():
    m, x, c = tiny_vit(), images(6), greedy()
    x0, was = x.clone(), copy.deepcopy(c.state_dict())
    o = Occlusion(share=0.25, by=c)(m, x, None)
    assert torch.equal(x, x0) and c.training and all(torch.equal(v, was[k]) for k, v in c.state_dict().items())
    assert max(counts(x, o, 7)) <= 4 and torch.equal(Occlusion(share=0.25, by=c)(m, x[2:4], None), o[2:4])
    fit_corruption(m, (x, torch.arange(6)), c)
    assert torch.equal(x, x0)
    seen = []
    l = learner(
        [
            AFAT(occlude=0.25, lam=1.0, corruption=greedy()),
            Callback(after_batch=lambda self: seen.append(plain(self.x).max().item())),
        ]
    )
    l.fit(1)
    assert min(seen) > 0.6


def test_searching_a_learning_rate_leaves_the_corruption_model_alone(tmp_path):
    l = learner(AFAT(occlude=0.25, lam=1.0, corruption=greedy()), path=tmp_path)
    was = copy.deepcopy(l.afat.corruption.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        l.lr_find(num_it=12, show_plot=False)
    assert all(torch.equal(v, was[k]) for k, v in l.afat.corruption.state_dict().items())
    l.fit(1)
    assert not torch.equal(l.afat.corruption.bn.running_mean, was['bn.running_mean'])


def test_the_model_stands_still_while_the_corruption_model_learns():
    "Batch statistics, modes, dropout, gradients, frozen parameters"
    m = Normalized(
        timm.create_model(
            'fan_nano_p4_hybrid', img_size=28, in_chans=1, num_classes=4, embed_dim=32, depth=2, stem_dims=(8, 8)
        ),
        [0.5],
        [0.5],
    )
    m.train()
    next(m.parameters()).requires_grad_(False)
    before = state_of(m)
    assert any(isinstance(o, nn.BatchNorm2d) for o in m.modules())
    fit_corruption(m, (images(8), torch.arange(8) % 4), bs=4, epochs=2)
    assert state_of(m) == before


def test_a_corruption_model_is_not_trained_where_blocks_run_again():
    m = tiny_vit()
    m.model.set_grad_checkpointing(True)
    with pytest.raises(ValueError, match='gradient checkpointing.*set_grad_checkpointing'):
        fit_corruption(m, (images(), torch.arange(4)))


# --- copies that others make
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('copied', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy', 'pickle'])
def test_a_copy_that_is_made_during_a_step_is_a_model_of_its_own(copied):
    "Between AFAT's event and the forward, when the model is watched"
    kept = []
    c = Callback(before_batch=lambda self: self.training and kept.append(copied(self.learn.model)))
    c.order = AFAT.order + 0.1
    l = learner([AFAT(occlude=0.25, lam=1.0), c])
    l.fit(1)
    m, x = kept[0].eval(), images(2)
    z = m(x)
    assert not torch.allclose(z, l.model.eval()(x))
    for p in m.parameters():
        p.data.mul_(0.5)
    assert not torch.allclose(m(x), z) and len(l.afat.df) == 1


def test_copies_on_several_devices_are_refused():
    l = learner(AFAT())
    l.model = nn.DataParallel(l.model)
    l.model.device_ids = [0, 1]
    with pytest.raises(ValueError, match='DataParallel.*distrib_ctx'):
        l.fit(1)


# --- families
# ---------------------------------------------------------------------------------------------------------------


def family(k):
    kw = dict(in_chans=1, num_classes=4)
    if k == 'deit':
        return timm.create_model(
            'deit_tiny_distilled_patch16_224', img_size=28, patch_size=7, embed_dim=32, depth=2, num_heads=2, **kw
        )
    if k == 'reg':
        return timm.create_model(
            'vit_tiny_patch16_224', img_size=28, patch_size=7, embed_dim=32, depth=2, num_heads=2, reg_tokens=2, **kw
        )
    if k == 'xcit':
        return timm.create_model(
            'xcit_nano_12_p16_224',
            img_size=32,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=2,
            cls_attn_layers=1,
            **kw,
        )
    if k == 'cait':
        return timm.create_model(
            'cait_xxs24_224', img_size=28, patch_size=7, embed_dim=32, depth=2, num_heads=2, depth_token_only=1, **kw
        )
    if k == 'swin':
        return timm.create_model(
            'swin_tiny_patch4_window7_224',
            img_size=28,
            patch_size=2,
            window_size=7,
            embed_dim=16,
            depths=(2, 1),
            num_heads=(2, 2),
            **kw,
        )
    if k == 'levit':
        return timm.create_model('levit_128s', img_size=64, **kw)
    if k == 'rvt_pool':
        return timm.create_model('rvt_nano_plus', img_size=28, dims=(16, 32), depths=(2, 1), heads=(2, 4), **kw)
    return timm.create_model(
        k,
        img_size=28,
        **(dict(dims=(32,), depths=(2,)) if 'rvt' in k else dict(embed_dim=32, depth=2, stem_dims=(8, 8))),
        **kw,
    )


BLOCKS = dict(
    deit=2, reg=2, xcit=2, cait=2, swin=3, levit=None, rvt_pool=3, rvt_nano=2, rvt_nano_plus=2, fan_nano_p4_hybrid=2
)


@pytest.mark.parametrize('k', BLOCKS)
@pytest.mark.parametrize('select', ['adversarial', 'ce'])
def test_families(k, select):
    torch.manual_seed(0)
    m = Normalized(family(k), [0.5], [0.5])
    l = learner(
        AFAT(occlude=0.25, lam=1.0, select=select),
        model=m,
        lr=1e-3,
        dls=synth_dls(16, size=dict(xcit=32, levit=64).get(k, 28), bs=8),
    )
    assert BLOCKS[k] is None or len(patch_blocks(m)) == BLOCKS[k]
    l.fit(1)
    c = l.afat.corruption
    assert c.grid == patch_grid(m, l.dls.one_batch()[0]) and no_hooks(m) and l.afat.df.align_loss[0] > 0
    x = plain(l.dls.one_batch()[0])
    m.eval()
    cos = attn_cos(m, x, Occlusion(share=0.5)(m, x, None))
    assert cos.shape == (len(x),)
    assert (cos < 1 + 1e-6).all()
    assert k == 'levit' or (cos < 1).all()
    assert torch.allclose(attn_cos(m, x, x), torch.ones(len(x)), atol=1e-4)


# --- occlusion as an attack
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'make',
    [
        lambda c: Occlusion(share=0.25),
        lambda c: Occlusion(share=0.25, by=c),
        lambda c: GreedyOcclusion(share=0.25),
        lambda c: Occlusion(share=0.25, fill='drop'),
        lambda c: PatchAugment(),
    ],
    ids=['random', 'learned', 'greedy', 'drop', 'augment'],
)
def test_leaves_everything_alone(make):
    m, x, y = tiny_vit(), images(6), torch.arange(6)
    c = occlusion_for(m, x)
    a = make(c)
    before, rng, x0 = state_of(m), torch.get_rng_state(), x.clone()
    o = a(m, x, y)
    assert state_of(m) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(x, x0)
    assert not o.requires_grad
    assert 0 <= o.min()
    assert o.max() <= 1
    assert torch.equal(o, a(m, x, y))
    assert torch.equal(a(m, x[2:5], y[2:5]), o[2:5])  # the batch does not matter
    if not isinstance(a, PatchAugment):
        assert max(counts(x, o, 7)) <= 4
    assert all(p.grad is None for p in c.parameters())
    with torch.no_grad():
        assert torch.equal(a(m, x, y), o)


@pytest.mark.parametrize('c,size', [(1, 28), (3, 32)])
def test_any_channels_and_size(c, size):
    m = tiny_vit(size=size, patch=4, in_chans=c)
    x = images(3, size, c)
    for a in (Occlusion(), GreedyOcclusion(share=0.05)):
        assert max(counts(x, a(m, x, torch.tensor([0, 1, 2])), 4)) <= n_occluded(0.1, (size // 4) ** 2)


def test_greedy_is_the_best_single_patch_and_counts():
    m = Counted(tiny_vit(seed=1))
    x = images(5)
    y = m(x).argmax(1)
    m.forwards = 0
    o = GreedyOcclusion(share=0.06, bs=7)(m, x, y)
    assert m.forwards == 5 * 16
    cover = patch_cover(x, image_seed(x, 0), 'noise', m)
    vals = torch.stack(
        [
            ce(m(occlude(x, torch.ones(5, 16).scatter(1, torch.full((5, 1), j), 0), (7, 7), cover)), y)
            for j in range(16)
        ],
        1,
    )
    fooled = m(o).argmax(1) != y
    assert torch.allclose(ce(m(o), y)[~fooled], vals.amax(1)[~fooled], atol=1e-5) and counts(x, o, 7) == [1] * 5


def test_greedy_beats_random_and_stops_when_fooled():
    dls = synth_dls(64)
    l = synth_learner(dls=dls, lr=3e-3)
    l.fit(8)
    m = l.model.eval()
    x, y = [plain(o) for o in dls.valid.one_batch()]
    acc = lambda a: (predict(m, a(m, x, y)) == y).float().mean().item()
    assert acc(GreedyOcclusion(share=0.4)) <= min(
        acc(Occlusion(share=0.4)), acc(RandomOcclusion(share=0.4, fill='noise'))
    )
    wrong = predict(m, GreedyOcclusion(share=0.4)(m, x, y)) != y
    n = torch.tensor(counts(x, GreedyOcclusion(share=0.4)(m, x, y), 7))
    assert (n[~wrong] == n_occluded(0.4, 16)).all()


def test_in_reports_and_training(tmp_path):
    m, x, y = tiny_vit(), images(20), torch.arange(20) % 10
    rep = robust_report(
        m,
        (x, y),
        [Occlusion(), Occlusion(by=occlusion_for(m, x)), GreedyOcclusion(), PGD(0.1, steps=2)],
        out=tmp_path / 'r',
    )
    assert len(rep.df) >= 4
    learner([AdvTrain(Occlusion(share=0.25))]).fit(1)


def test_patch_augment():
    m, x = tiny_vit(), images(32)
    assert torch.equal(PatchAugment(p=0)(m, x), x)
    share = sum(counts(x, PatchAugment(noise=0.01)(m, x), 7)) / (32 * 16)
    assert abs(share - (1 - 0.9**3)) < 0.08
    only = PatchAugment(p=1, least=1.0, noise=0.0)(m, x)
    assert torch.allclose(only[:, :, 7:14, :7], x[:, :, 7:14, :7].flip(3), atol=1e-5)
    n = PatchAugment(p=1, least=1.0, noise=0.05)(m, x * 0.4 + 0.3)
    assert 0.03 < (n - PatchAugment(p=1, least=1.0, noise=0.0)(m, x * 0.4 + 0.3)).std() < 0.07
    u, v = torch.arange(7) / 28, torch.arange(7)[:, None] / 28
    ramps = (
        torch.stack([u.expand(7, 7), v.expand(7, 7)]).repeat(1, 4, 4).expand(64, -1, -1, -1)
        + torch.rand(64, 2, 1, 1) * 0.1
    )
    # [64,2,16,7,7]
    p = (
        PatchAugment(p=1, least=0.5, noise=0.0, patch=7)(tiny_vit(in_chans=2), ramps)
        .unfold(2, 7, 7)
        .unfold(3, 7, 7)
        .flatten(2, 3)
    )
    far = (p.mean((-2, -1)) - ramps[:, :, :7, :7].mean((-2, -1))[..., None]).transpose(0, 1).flatten(1)
    assert abs(torch.corrcoef(far)[0, 1]) < 0.15
    assert (far.std(1) > 0.005).all()  # across and down, a crop is moved independently
    cut = (p[:, 1, :, 4, 3] - p[:, 1, :, 2, 3]) / (2 / 28)
    assert abs(cut.square().mean() - 0.75) < 0.02
    assert cut.min() > 0.5**0.5 - 1e-3  # areas from half to all, evenly
    flatx = torch.full_like(x, 0.5)
    assert torch.allclose(PatchAugment(p=1, noise=0.0)(m, flatx), flatx, atol=1e-6)
    with pytest.raises(ValueError, match='p must be'):
        PatchAugment(p=2)


def test_show(monkeypatch):
    l = learner(AFAT(occlude=0.25, lam=1.0))
    with pytest.raises(ValueError, match='no corruption model'):
        l.afat.show_masks()
    l.fit(1)
    l.afat.show_masks(max_n=3)
    show_occlusion(l.model, GreedyOcclusion(), l.dls.valid, 2)


def test_pictures_of_sorted_data_show_several_classes(monkeypatch):
    import robust_nbdev.afat as A

    seen, real = [], A.outputs
    monkeypatch.setattr(A, 'outputs', lambda m, x: seen.append(x) or real(m, x))
    x, y = images(40), torch.arange(4).repeat_interleave(10)
    show_occlusion(tiny_vit(num_classes=4), Occlusion(share=0.25), (x, y), 6)
    at = [next(j for j in range(40) if torch.equal(x[j], o)) for o in seen[0]]
    assert len(at) == 6 and y[at].unique().tolist() == [0, 1, 2, 3]


# --- two processes
# ----------------------------------------------------------------------------------------------------------

JOB = '''
def learner(dls): return Learner(dls, tiny_vit(num_classes=4), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=AFAT(occlude=.25, lam=1., corruption_lr=.1, length=None))
fits = [lambda l: l.fit(2, 1e-2)]
def keep(l): return [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (get_model(l.model),l.afat.corruption)]
'''  # noqa: E501


def test_two_processes_are_one(tmp_path):
    """Masks, alignment and ascent of two processes are those of one on the joined batch, and both have the same
    corruption model, to the bit"""
    pytest.importorskip('accelerate')
    for o, p, q in zip(*one_and_two(JOB, tmp_path)):
        assert torch.equal(p, q) and torch.allclose(o, p, atol=1e-4)


# --- the paper's scale
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('name', ['rvt_tiny_plus', 'fan_tiny_8_p4_hybrid'])
def test_paper_scale(name):
    "One AFAT step of AdamW and one evaluation batch under attack at 224 pixels"
    torch.manual_seed(0)
    m = Normalized(timm.create_model(name))
    x, y = images(2, 224, 3), torch.tensor([1, 2])
    from fastai.vision.all import DataLoaders, Adam

    l = Learner(
        DataLoaders.from_dsets([*zip(x, y)], [*zip(x, y)], bs=2, device='cpu'),
        m,
        loss_func=CrossEntropyLossFlat(),
        cbs=AFAT(),
        opt_func=Adam,
    )
    with l.no_bar(), l.no_logging():
        l.fit(1, 1e-3)
    assert l.afat.corruption.grid == (14, 14)
    assert l.afat.df.align_loss[0] > 0
    assert counts(x, Occlusion(by=l.afat.corruption)(m, x, y), 16) == [20, 20]
    assert (PGD(1 / 255, steps=1)(m.eval(), x, y) - x).abs().max() <= 1 / 255 + 1e-6
    assert ((PatchFool(steps=1)(m, x, y) != x).any(1).flatten(1).sum(1) <= 256).all()


# --- what a model does to its blocks, frozen parts, the range of the pixels
# -----------------------------------------------------


class Scaled(timm.models.vision_transformer.VisionTransformer):
    "Goes on with three times each block's output"

    inplace = False

    def forward_features(self, x, **kw):
        x = self._pos_embed(self.patch_embed(x))
        for b in self.blocks:
            x = b(x).mul_(3.0) if self.inplace else b(x) * 3.0
        return self.norm(x)


def test_a_model_that_writes_into_its_blocks_outputs():
    def run(inplace):
        torch.manual_seed(0)
        m = Scaled(img_size=28, patch_size=7, in_chans=1, num_classes=4, embed_dim=32, depth=2, num_heads=2)
        m.inplace = inplace
        l = learner(AFAT(lam=0.1), model=Normalized(m, [0.5], [0.5]))
        l.fit(1)
        return l.afat.df.align_loss.tolist(), flat(l.model)

    (a, w), (b, v) = run(False), run(True)
    assert a == pytest.approx(b, rel=1e-4)
    torch.testing.assert_close(w, v)


def test_a_frozen_backbone_stays_as_it_is():
    torch.manual_seed(0)
    m = Normalized(timm.create_model('rvt_nano', img_size=28, in_chans=1, num_classes=4), [0.5], [0.5])
    for n, p in m.named_parameters():
        p.requires_grad_('head' in n)
    was = {k: v.clone() for k, v in m.named_buffers()}
    learner(AFAT(), model=m, train_bn=False).fit(1)
    assert len(was) > 10 and all(torch.equal(v, was[k]) for k, v in m.named_buffers())


class Scale(Callback):
    "Images in other units"

    order = AFAT.order - 1

    def __init__(self, by):
        self.by = by

    def before_batch(self):
        self.learn.xb = (self.x * self.by,)


@pytest.mark.parametrize(
    'by,kind,says', [(255, ValueError, 'images must lie in'), (1 / 255, UserWarning, 'below one grey level')]
)
def test_images_in_other_units(by, kind, says):
    m, x = tiny_vit(num_classes=4), images()
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        with pytest.raises(kind, match=says):
            learner([AFAT(), Scale(by)]).fit(1)
        with pytest.raises(kind, match=says):
            fit_corruption(m, (x * by, torch.zeros(4).long()))


@pytest.mark.parametrize('kw', [dict(mean=(123.7, 116.3, 103.5)), dict(std=(58.4, 57.1, 57.4))])
def test_statistics_in_grey_levels_are_refused(kw):
    with pytest.raises(ValueError, match='divide both by 255'):
        PatchOcclusion((4, 4), (7, 7), **kw)


def rates_of(r, bs, cbs=()):
    "Learning rates of the steps of two epochs"
    learn = r.learner(synth_dls(64, bs=bs), tiny_vit(num_classes=4))
    r.fit(learn, 2, cbs=cbs)
    return learn.recorder.lrs


quick = afat_recipe('rvt_tiny_plus').but(randaug='', erase=0.0, patch_augment=False, warmup=0, cooldown=1, epochs=2)


def test_the_rate_of_the_recipe_is_that_of_a_step_not_of_a_batch():
    assert rates_of(quick, 8, [GradientAccumulation(32)])[0] == pytest.approx(rates_of(quick, 32)[0])


def test_small_batches_scale_the_whole_schedule():
    "At 8 images a step the peak is below `min_lr`"
    lrs = rates_of(quick, 8)
    assert lrs[0] == pytest.approx(quick.peak_lr(8)) and lrs[-1] == pytest.approx(quick.min_lr * 8 / quick.bs)


def test_the_recipe_refuses_a_second_mixer_and_a_second_schedule():
    learn = quick.learner(synth_dls(64, bs=8), tiny_vit(num_classes=4))
    with pytest.raises(ValueError, match='mixes images'):
        quick.fit(learn, 1, cbs=MixUp())
    with pytest.raises(ValueError, match='schedule of the learning rate'):
        quick.fit(learn, 1, cbs=ParamScheduler(dict(lr=SchedLin(0, 1))))
