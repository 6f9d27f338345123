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
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Adam,
    LabelSmoothingCrossEntropyFlat,
    MixUp,
    Normalize,
    SGD,
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
from copies import reusing
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


def test_exact_number_ties_included():
    for k in (1, 5, 16):
        for sc in (torch.zeros(3, 16), torch.randn(3, 16), torch.randint(0, 2, (3, 16)).float()):
            m = keep_mask(sc, k)
            assert (m == 0).sum(1).tolist() == [k] * 3
            assert (sc[m == 0].view(3, k).amax(1) <= sc.masked_fill(m == 0, 9).amin(1)).all()  # the lowest go


@pytest.mark.parametrize(
    'ste,want',
    [
        ('relative', [[-1, 1, 0, 0], [0, 3, -3, 0]]),  # covered patches alone, and against each other
        ('identity', [[-3, -1, 9, 9], [9, 4, -2, 9]]),
        ('clip', [[-1, -1, 1, 1], [1, 1, -1, 1]]),
    ],
)
def test_what_each_estimator_moves(ste, want):
    s = torch.tensor([[0.0, 1, 5, 6], [7, 0, 1, 8]]).requires_grad_()
    keep_mask(s, 2, ste).backward(torch.tensor([[-3.0, -1, 9, 9], [9, 4, -2, 9]]))
    assert s.grad.tolist() == want


def test_one_covered_patch_is_compared_with_those_of_the_batch():
    s = torch.tensor([[0.0, 1], [1, 0]]).requires_grad_()
    keep_mask(s, 1).backward(torch.tensor([[-3.0, 9], [9, -1]]))
    assert s.grad.tolist() == [[-1, 0], [0, 1]]


def test_cover_knows_raw_models():
    assert patch_cover(images(2), 0, 'drop').abs().max() == 0 and patch_cover(images(64), 0).max() > 0.95


def test_fresh_ones_follow_the_seed_and_leave_the_random_state():
    m, x, rng = tiny_vit(), images(), torch.get_rng_state()
    a, b, c = [occlusion_for(m, x, s) for s in (0, 0, 1)]
    assert torch.equal(flat(a), flat(b))
    assert not torch.equal(flat(a), flat(c))
    assert torch.equal(torch.get_rng_state(), rng)


def test_scores_are_those_of_normalised_images():
    m, x = Normalized(tiny_vit().model, [0.3], [0.2]), images()
    c = occlusion_for(m, x)
    assert torch.allclose(c.scores(x), c.fc(F.gelu(c.conv((x - 0.3) / 0.2)).flatten(1)), atol=1e-5)
    assert not torch.allclose(c.scores(x), c.fc(F.gelu(c.conv(x)).flatten(1)), atol=1e-3)


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


@pytest.mark.parametrize('select,lam', [('adversarial', 0.005), ('random', 3.0), ('ce', 3.0)])
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

    def see(self):
        if self.training:
            seen.append(plain(self.x).clone())

    def again(self):
        if self.training:
            assert torch.equal(plain(self.x), seen[-1][:16])

    cb = Callback(after_pred=see, after_batch=again)
    cb.order = 8
    l = learner([AFAT(occlude=0.25, lam=1.0, select='random'), cb])
    l.dls.train = l.dls.train.new(shuffle=False)
    l.fit(2)
    (x, x2), (y, y2) = [o.chunk(2) for o in seen]
    assert torch.equal(x, y) and not any(torch.equal(a, b) for a, b in zip(x2, y2))
    assert not torch.equal(x != x2, x != y2)  # other patches, too


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


@pytest.fixture(scope='module')
def small_vit():
    "A trained ViT, training images, and held-out ones"
    dls = fashion_mnist(n_train=400, n_valid=64, bs=32)
    held = torch.cat([b[1] for b in eval_batches(dls.valid)])
    return small_model('vit', data='fashion_mnist'), dls.train, held


def moved(m, x, attack):
    "Alignment loss under an occlusion"
    with torch.no_grad():
        f = block_outputs(m, torch.cat([x, attack(m, x, None, seed=9)]))
    return align_loss(*zip(*[o.chunk(2) for o in f])).item()


def test_a_corruption_model_does_better_than_chance_on_images_that_it_has_not_seen(small_vit):
    m, train, x = small_vit
    c, _ = fit_corruption(m, train, epochs=2, lr=1e-2)
    assert moved(m, x, Occlusion(by=c)) > 1.15 * moved(m, x, Occlusion())
    assert len(c(x, 2).unique(dim=0)) >= 5  # its masks depend on the image


@pytest.mark.parametrize('how', ['single', 'gradient'])
def test_a_ranking_moves_features_most(small_vit, how):
    m, x = small_vit[0], small_vit[2][:32]
    assert moved(m, x, RankedOcclusion(how=how)) > 1.4 * moved(m, x, Occlusion())


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


def test_mixed_precision():
    def go(cbs):
        w = Watch()
        l = learner([AFAT(occlude=0.25, lam=1.0, length=None), w, *cbs])
        l.afat.corruption = occlusion_for(l.model, images(2), 3)
        l.fit(1)
        return w.c

    c, half = go([]), go([HalfPrecision(torch.float16, 2.0**14)])
    assert half.dtype == torch.float32 and F.cosine_similarity(c, half, dim=0) > 0.97
    assert half.norm() / c.norm() == pytest.approx(1, rel=0.1)


def test_a_skipped_step_is_skipped_by_both():
    "The loss scaler finds an infinite gradient in the classifier alone: the corruption model waits too, and forgets"
    inf = Callback(before_step=lambda self: next(self.learn.model.parameters()).grad.fill_(math.inf))
    inf.order = 9
    l = learner([AFAT(occlude=0.25, lam=1.0), HalfPrecision(scale=2.0**4), inf])
    l.afat.corruption = c = occlusion_for(l.model, images(2))
    was = flat(c), flat(l.model)
    l.fit(1)
    assert torch.equal(flat(c), was[0]) and torch.equal(flat(l.model), was[1])
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in c.parameters())
    l.remove_cb(inf)
    l.fit(1)
    assert not torch.equal(flat(c), was[0])


def test_summed_losses_under_mixup():
    "MixUp puts itself in front of the loss, which still sums"
    got, at = {}, AFAT.order

    def note(k, order):
        c = Callback(after_loss=lambda self: self.training and got.update({k: self.learn.loss_grad.item()}))
        c.order = order
        return c

    l = learner(
        [AFAT(occlude=0.25, lam=3.0, select='random'), note('before', at - 0.1), note('after', at + 0.1), MixUp()],
        loss_func=CrossEntropyLossFlat(reduction='sum'),
        lr=1e-3,
    )
    l.fit(1)
    assert got['after'] - got['before'] == pytest.approx(16 * 3 * l.afat.df.align_loss[0], rel=1e-3)


# --- composition
# ------------------------------------------------------------------------------------------------------------

COMPANY = dict(
    at_awp=lambda: [AdvTrain(FGSM(0.1)), AWP(0.01)],
    all=lambda: [
        MixUp(),
        GradientAccumulation(32),
        HalfPrecision(torch.bfloat16),
        GradientClip(1.0),
        EMA(0.9),
        AdvTrain(FGSM(0.1)),
    ],
)


@pytest.mark.parametrize('company,turned', [('at_awp', False), ('all', True)])
def test_company(company, turned):
    loss = LabelSmoothingCrossEntropyFlat()
    cbs = [AFAT(occlude=0.25, lam=0.1), *COMPANY[company]()]
    l = learner(cbs[::-1] if turned else cbs, n=32, loss_func=loss, opt_func=Adam)
    l.fit(2, 1e-3)
    assert l.loss_func is loss and no_hooks(l.model) and flat(l.model).isfinite().all()
    assert not torch.is_autocast_enabled('cpu') and len(l.afat.df) == 2


def around(wrap):
    l = learner(AFAT())
    l.model = wrap(l.model)
    return l


def two_devices(model):
    m = nn.DataParallel(model)
    m.device_ids = [0, 1]
    return m


def checkpointing():
    m = tiny_vit(num_classes=4)
    m.model.set_grad_checkpointing(True)
    return m


def normalising():
    dls = synth_dls(16)
    dls.train.after_batch.add(Normalize.from_stats([0.5], [0.5], cuda=False))
    return dls


@pytest.mark.parametrize(
    'make,err,words',
    [
        (lambda: learner([AFAT(), TRADES(PGD(0.1, steps=1))]), ValueError, 'joint batch'),
        (lambda: learner([AFAT(), AdvTrain(FGSM(0.1), clean_loss=0.5)]), ValueError, 'joint batch'),
        (lambda: learner(AFAT(), model=checkpointing()), ValueError, 'gradient checkpointing'),
        (lambda: learner(AFAT(), dls=normalising()), ValueError, 'Normalize'),
        (lambda: learner(AFAT(), model=nn.Sequential(nn.Flatten(), nn.Linear(784, 4))), TypeError, 'transformer'),
        (lambda: around(partial(torch.compile, backend='eager')), ValueError, 'compile'),
        (lambda: learner(AFAT(corruption=PatchOcclusion((2, 2), (7, 7), 1))), ValueError, 'made for images'),
        (lambda: around(two_devices), ValueError, 'DataParallel.*distrib_ctx'),
        (lambda: learner(AFAT(patch=5)), ValueError, '28x28 are not a multiple of the patch, 5x5'),
        (lambda: learner(AFAT(patch=5, select='random')), ValueError, '28x28 are not a multiple of the patch, 5x5'),
    ],
)
def test_refused_at_fit(make, err, words):
    with pytest.raises(err, match=words):
        make().fit(1)


@pytest.mark.parametrize(
    'make,words',
    [
        (lambda: AFAT(occlude=2), 'occlude is a share'),
        (lambda: AFAT(select='best'), 'select must be one of'),
        (lambda: PatchOcclusion((4, 4), (7, 7), std=(58.4, 57.1, 57.4)), 'divide both by 255'),
        (lambda: PatchAugment(patch=5)(tiny_vit(), images()), '28x28 are not a multiple of the patch, 5x5'),
        (lambda: occlusion_for(tiny_vit(), images(), patch=(7, 9)), '28x28 are not a multiple of the patch, 7x9'),
        (lambda: fit_corruption(checkpointing(), (images(), torch.arange(4))), 'set_grad_checkpointing'),
        (lambda: afat_recipe('deit_small_patch16_224'), 'net must be one of'),
    ],
)
def test_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_what_a_given_corruption_model_has_is_kept_and_another_is_refused():
    make = lambda ste: PatchOcclusion((4, 4), (7, 7), 1, ste=ste)
    assert AFAT().ste == 'relative' and AFAT(ste='clip').ste == 'clip'
    assert AFAT(corruption=make('sign')).ste == 'sign'
    assert AFAT(corruption=make('clip'), ste='clip', patch=7).ste == 'clip'
    says = 'is for a fresh corruption model, the given one has'
    with pytest.raises(ValueError, match=f"ste='clip' {says} ste='identity'"):
        AFAT(corruption=make('identity'), ste='clip')
    with pytest.raises(ValueError, match=rf'patch=\(14, 7\) {says} patch=\(7, 7\)'):
        AFAT(corruption=make('clip'), patch=(14, 7))
    l = learner(AFAT(occlude=0.25, ste='sign', patch=(14, 7)))
    l.fit(1)
    assert l.afat.corruption.ste == 'sign' and l.afat.corruption.grid == (2, 4)


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
    seen, real = [], afat.eval_batches
    monkeypatch.setattr(afat, 'eval_batches', lambda *a, **k: seen.append(k.get('device')) or real(*a, **k))
    fit_corruption(tiny_vit(), (images(), torch.arange(4)))
    assert seen == [torch.device('cpu')]


@pytest.mark.parametrize(
    'event,awp,stop',
    [
        ('before_batch', False, KeyboardInterrupt),
        ('after_pred', True, RuntimeError('out of memory')),
        ('before_step', True, CancelFitException),
    ],
)
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


def test_interrupt_and_refit():
    "A forward that breaks off leaves nothing for the next fit"

    def go(stop):
        l = learner([AFAT(occlude=0.25, lam=1.0), AWP(0.01)], n=32)

        def bang(*a):
            raise KeyboardInterrupt

        if stop:
            h = l.model.model.blocks[1].register_forward_pre_hook(bang)
            with pytest.raises(KeyboardInterrupt):
                l.fit(1)
            h.remove()
            assert no_hooks(l.model)
            l.model.load_state_dict(tiny_vit(num_classes=4).state_dict())
            l.create_opt()
            l.opt.zero_grad()
            l.afat.corruption = l.afat.optim = None
        set_seed(0, reproducible=True)
        l.dls.train.rng.seed(0)
        l.fit(1)
        return flat(l.model)

    assert torch.allclose(go(True), go(False), atol=1e-5)


# --- one fit or many, resumed fits, second copies
# -----------------------------------------------------------------------------


def life(fits):
    "A Learner that was trained in these calls of `fit`"
    l = learner(AFAT(occlude=0.25, lam=1.0), n=32)
    set_seed(0)
    for f in fits:
        l.fit(**f)
    return l


def test_two_fits_are_one():
    a, b = life([dict(n_epoch=2)]), life(2 * [dict(n_epoch=1)])
    assert torch.equal(flat(a.model), flat(b.model)) and torch.equal(flat(a.afat.corruption), flat(b.afat.corruption))
    assert a.afat.df.equals(b.afat.df) and a.afat.df.epoch.tolist() == [0, 1]


def test_two_calls_draw_the_noise_of_one(monkeypatch):
    "A corruption model that is trained alone, call after call; also behind `AFAT.state_dict`"
    seen, real = [], afat.patch_cover
    monkeypatch.setattr(afat, 'patch_cover', lambda x, seed, *a: seen.append(seed) or real(x, seed, *a))
    m, data, a = tiny_vit(), (images(), torch.arange(4)), AFAT()
    fit_corruption(m, data, epochs=3, seed=5)
    c, _ = fit_corruption(m, data, seed=5)
    fit_corruption(m, data, c, seed=5)
    a.load_state_dict(AFAT(corruption=c).state_dict())
    fit_corruption(m, data, a.corruption, seed=5)
    assert seen == 2 * [5, 6, 7]


@pytest.mark.parametrize('asked', [dict(ste='clip'), dict(patch=14)])
def test_the_state_of_another_kind_of_corruption_model_is_refused(asked):
    l = learner(AFAT(occlude=0.25))
    l.fit(1)
    fresh = AFAT(**asked)
    with pytest.raises(ValueError, match='is for a fresh corruption model'):
        fresh.load_state_dict(l.afat.state_dict())
    assert fresh.corruption is None and fresh.rows == []


def resumable(path):
    return learner(AFAT(occlude=0.25, lam=1.0, corruption_lr=0.1), path=path)


def test_a_resumed_fit_with_a_fresh_adversary_says_so(tmp_path):
    l = resumable(tmp_path)
    with pytest.warns(UserWarning, match='fresh corruption model.*state_dict'):
        l.fit(2, start_epoch=1)
    for go in (lambda: resumable(tmp_path).fit(1), lambda: learner(AFAT(select='random')).fit(2, start_epoch=1)):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            go()


# --- the Learner's own loss
# -----------------------------------------------------------------------------------------------------

LOSSES = [
    (partial(F.cross_entropy, reduction='sum'), F.cross_entropy),
    (LabelSmoothingCrossEntropyFlat(reduction='sum'), LabelSmoothingCrossEntropyFlat()),
]


@pytest.mark.parametrize('summed,mean', LOSSES)
def test_what_is_added_follows_the_learners_loss(summed, mean):
    "A sum is so many times the mean: both terms, not one of them"

    def grads(f):
        learner([AFAT(occlude=0.25, lam=3.0, select='random'), w := Watch()], loss_func=f, lr=1e-3).fit(1)
        return w.f

    assert torch.allclose(grads(summed), 16 * grads(mean), rtol=1e-3, atol=1e-4)


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


def test_training_a_model_that_works_in_place():
    def go(m):
        l = learner([AFAT(occlude=0.25, lam=1.0), AWP(0.01)], model=m)
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


def test_only_training_trains_the_corruption_model(tmp_path):
    "Not a search for a learning rate, nor validation"
    l = learner(AFAT(occlude=0.25, lam=1.0, corruption=greedy()), path=tmp_path)
    was = copy.deepcopy(l.afat.corruption.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        l.lr_find(num_it=6, show_plot=False)
    l.validate()
    l.get_preds()
    assert all(torch.equal(v, was[k]) for k, v in l.afat.corruption.state_dict().items()) and no_hooks(l.model)
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


# --- copies that others make
# --------------------------------------------------------------------------------------------------------


def test_a_copy_that_is_made_during_a_step_is_a_model_of_its_own():
    "Between AFAT's event and the forward, when the model is watched"
    kept = []
    c = Callback(before_batch=lambda self: self.training and kept.append(copy.deepcopy(self.learn.model)))
    c.order = AFAT.order + 0.1
    l = learner([AFAT(occlude=0.25, lam=1.0), c])
    l.fit(1)
    m, x = kept[0].eval(), images(2)
    z = m(x)
    assert not torch.allclose(z, l.model.eval()(x))
    for p in m.parameters():
        p.data.mul_(0.5)
    assert not torch.allclose(m(x), z) and len(l.afat.df) == 1


# --- families
# ---------------------------------------------------------------------------------------------------------------


SMALL = dict(embed_dim=32, depth=2, num_heads=2)
FAMILIES = dict(
    xcit=('xcit_nano_12_p16_224', 32, dict(patch_size=8, cls_attn_layers=1, **SMALL), 2),
    swin=(
        'swin_tiny_patch4_window7_224',
        28,
        dict(patch_size=2, window_size=7, embed_dim=16, depths=(2, 1), num_heads=(2, 2)),
        3,
    ),
    levit=('levit_128s', 64, {}, None),
    fan=('fan_nano_p4_hybrid', 28, dict(embed_dim=32, depth=2, stem_dims=(8, 8)), 2),
)


@pytest.mark.parametrize('k', FAMILIES)
def test_families(k):
    torch.manual_seed(0)
    name, size, kw, blocks = FAMILIES[k]
    m = Normalized(timm.create_model(name, img_size=size, in_chans=1, num_classes=4, **kw), [0.5], [0.5])
    l = learner(AFAT(occlude=0.25, lam=1.0), model=m, lr=1e-3, dls=synth_dls(16, size=size, bs=8))
    assert blocks is None or len(patch_blocks(m)) == blocks
    l.fit(1)
    x = images(4, size)
    assert l.afat.corruption.grid == patch_grid(m, x) and no_hooks(m) and l.afat.df.align_loss[0] > 0
    m.eval()
    cos = attn_cos(m, x, Occlusion(share=0.5)(m, x, None))
    assert cos.shape == (4,) and (cos < 1 + 1e-6).all() and (k == 'levit' or (cos < 1).all())
    assert torch.allclose(attn_cos(m, x, x), torch.ones(4), atol=1e-4)


# --- two processes
# ----------------------------------------------------------------------------------------------------------

JOB = '''
def learner(dls): return Learner(dls, tiny_vit(num_classes=4), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=AFAT(occlude=.25, lam=1., corruption_lr=.1, length=None))
fits = [lambda l: l.fit(2, 1e-2)]
def keep(l): return [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (get_model(l.model),l.afat.corruption)]
'''  # noqa: E501


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Masks, alignment and ascent of two processes are those of one on the joined batch, and both have the same
    corruption model, to the bit"""
    pytest.importorskip('accelerate')
    for o, p, q in zip(*one_and_two(JOB, tmp_path)):
        assert torch.equal(p, q) and torch.allclose(o, p, atol=1e-4)


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


def rates_of(r, bs, cbs=()):
    "Learning rates of the steps of two epochs"
    learn = r.learner(synth_dls(32, bs=bs), tiny_vit(num_classes=4))
    r.fit(learn, 2, cbs=cbs)
    return learn.recorder.lrs


quick = afat_recipe('rvt_tiny_plus').but(randaug='', erase=0.0, patch_augment=False, warmup=0, cooldown=1, epochs=2)


def test_the_rate_of_the_recipe_is_that_of_a_step_not_of_a_batch():
    "At 8 images a step the peak is below `min_lr`: the whole schedule scales"
    assert rates_of(quick, 8, [GradientAccumulation(32)])[0] == pytest.approx(quick.peak_lr(32))
    lrs = rates_of(quick, 8)
    assert lrs[0] == pytest.approx(quick.peak_lr(8)) and lrs[-1] == pytest.approx(quick.min_lr * 8 / quick.bs)


def test_the_recipe_refuses_a_second_mixer_and_a_second_schedule():
    learn = quick.learner(synth_dls(64, bs=8), tiny_vit(num_classes=4))
    with pytest.raises(ValueError, match='mixes images'):
        quick.fit(learn, 1, cbs=MixUp())
    with pytest.raises(ValueError, match='schedule of the learning rate'):
        quick.fit(learn, 1, cbs=ParamScheduler(dict(lr=SchedLin(0, 1))))


@pytest.mark.parametrize('how', ['single', 'gradient'])
def test_effects_of_patches_where_blocks_write_where_their_last_output_is(how):
    m, x = tiny_vit(num_classes=4), torch.rand(2, 1, 28, 28)
    cover = patch_cover(x, 0)
    right = patch_effects(m, x, cover, (7, 7), how)
    assert right.abs().max() > 1e-4
    torch.testing.assert_close(patch_effects(reusing(m), x, cover, (7, 7), how), right)
