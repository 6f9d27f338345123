"Robustness Tokens: only the tokens train, the fastai contract, files, heads, and the attack by hand."

import copy, warnings
import numpy as np, pandas as pd, pytest, timm, torch, torch.nn.functional as F
from torch import nn
from fastai.vision.all import (
    AvgMetric,
    Callback,
    Categorize,
    CancelFitException,
    DataLoader,
    DataLoaders,
    Datasets,
    GradientAccumulation,
    Learner,
    MixUp,
    TensorImageBW,
    defaults,
    set_seed,
)
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.adv_train import *
from robust_nbdev.evaluate import *
from robust_nbdev.experiments import trials_of
from robust_nbdev.models import small_model
from robust_nbdev.robust_tokens import *
from robust_nbdev.robust_tokens import _attack_of, _seg_behind, _seg_scores, _similarities
from robust_nbdev.test_utils import *
from copies import COPIES, grow, replicate

FEAT2 = PGD(0.1, steps=2, loss=feat_cos)


def images(n=4, c=1, size=28, seed=0):
    return (torch.rand(n, c, size, size, generator=torch.Generator().manual_seed(seed)) * 255).round() / 255


def with_tokens(n=4, out='cls_patch', std=0.01, **kw):
    torch.manual_seed(1)
    return add_tokens(tiny_vit(num_classes=4, **kw), n, out, std)


def learner(cbs=(), model=None, rt=None, freeze=True, loss_func=None, train_bn=False, **kw):
    l = synth_learner(
        model=model or with_tokens(),
        loss_func=loss_func or FeatCos(),
        splitter=token_splitter,
        train_bn=train_bn,
        cbs=[rt or RobustTokens(FEAT2), *cbs],
        **kw,
    )
    if freeze:
        l.freeze()
    return l


def state(m):
    return {k: v.clone() for k, v in m.state_dict().items()}


def changed(m, before):
    return [k for k, v in m.state_dict().items() if not torch.equal(v, before[k])]


ONLY = ['model.extra_tokens.weight']

# --- the tokens are the only thing that moves
# ---------------------------------------------------------------------------------


def bn_vit(**kw):
    m = with_tokens(proj_drop_rate=0.2, drop_path_rate=0.3, **kw)
    m.model.patch_embed.norm = nn.Sequential(BNLast(32))
    return m.eval()


class BNLast(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def test_only_tokens_change_and_the_backbone_stays_to_the_bit():
    "Beside registers, BatchNorm and dropout"
    m = bn_vit(reg_tokens=2)
    x = images()
    before = state(m)
    with no_tokens(m):
        f0 = m(x)
    l = learner(model=m)
    l.fit(2, 1e-2)
    assert changed(m, before) == ONLY and sum(p.requires_grad for p in m.parameters()) == 1
    m.eval()
    with no_tokens(m):
        assert torch.equal(m(x), f0)
    assert not torch.equal(m(x), f0)
    remove_tokens(m)
    assert torch.equal(m.model.forward_features((x - 0.5) / 0.5)[:, 0], f0[:, 0])


def test_the_attack_sees_the_token_free_model_and_leaves_no_trace():
    seen = []

    def spy(model, x, y=None, *, seed=0):
        seen.append((tokens_of(model).n, model.training, y))
        return FEAT2(model, x, seed=seed)

    m = with_tokens()
    l = learner(rt=RobustTokens(spy), model=m)
    l.fit(1, 1e-3)
    assert {o[0] for o in seen} == {0} and {o[1] for o in seen} == {False} and all(o[2] is None for o in seen)
    assert tokens_of(m).n == 4
    seen.clear()
    learner(rt=RobustTokens(spy, through=True)).fit(1, 1e-3)
    assert {o[0] for o in seen} == {4}


def test_terms_by_hand():
    "Loss, gradient and images of the first step, with two forwards and no shared code"
    got = {}

    class Grab(Callback):
        order = 9

        def before_batch(self):
            if self.training:
                got.update(m=copy.deepcopy(self.model), x=self.x.as_subclass(torch.Tensor).clone())

        def before_step(self):
            got.update(
                g=tokens_of(self.model).weight.grad.clone(), v=self.learn.loss.item(), pred=self.learn.pred.shape
            )
            raise CancelFitException()

    l = learner([Grab()], rt=RobustTokens(FEAT2, adv_weight=0.5))
    seed = torch.initial_seed() % 2**62
    l.fit(1, 1e-3)
    m, (x, x_adv) = got['m'], got['x'].chunk(2)
    m.eval()
    with no_tokens(m):
        assert torch.allclose(FEAT2(m, x, seed=seed), x_adv, atol=1e-6)
        f0 = m(x).detach()
    cos = lambda f: (f * f0).sum(1) / (f.norm(dim=1) * f0.norm(dim=1))
    v = (1 - cos(m(x)).mean()) + 0.5 * (1 - cos(m(x_adv)).mean())
    (g,) = torch.autograd.grad(v, tokens_of(m).weight)
    assert (
        got['v'] == pytest.approx(v.item(), abs=1e-6)
        and torch.allclose(got['g'], g, atol=1e-7, rtol=1e-4)
        and got['pred'][0] == len(x)
    )


# --- fastai's contract
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_composes(dtype):
    cbs = [MixUp(), GradientAccumulation(16), HalfPrecision(dtype), AWP(0.01)]
    l = learner(cbs, dls=synth_dls(32, bs=8))
    lf, before = l.loss_func, state(l.model)
    l.fit(1, 1e-2)
    assert changed(l.model, before) == ONLY and tokens_of(l.model).weight.isfinite().all()
    assert l.loss_func is lf and lf.reduction == 'mean' and not torch.is_autocast_enabled('cpu')
    assert l.robust_tokens.target is None and len(l.robust_tokens.df) == 4


def first_grad(bs, cbs=()):
    got = {}

    class Keep(Callback):
        order = GradientAccumulation.order + 1

        def before_step(self):
            got['g'] = tokens_of(self.model).weight.grad.clone()
            raise CancelFitException()

    dls = synth_dls(64, bs=bs)
    dls.train = dls.train.new(shuffle=False)
    learner([*cbs, Keep()], dls=dls).fit(1)
    return got['g']


def test_accumulated_gradient_equals_the_full_batch():
    a, b = first_grad(64), first_grad(16, [GradientAccumulation(64)])
    assert (a - b).abs().max() < 1e-4 * a.abs().max()


def test_mixup_trains_on_mixed_images_with_their_own_target():
    "The target is that of the mixed image: with no tokens the invariance term would be one"
    l = learner([MixUp()], model=with_tokens(n=1))
    tokens_of(l.model).weight.data.zero_()
    l.fit(1, 0.0)
    m = l.model.eval()
    x = images()
    with no_tokens(m):
        f0 = m(x)
    assert l.robust_tokens.df.inv.min() > 1 - 2 * feat_cos(m(x), f0).mean().item() - 0.05


def test_validation_predictions_and_adv_valid():
    l = learner()
    m = l.model.eval()
    v = l.validate()[0]
    x = torch.cat([b[0] for b in l.dls.valid]).as_subclass(torch.Tensor)
    with no_tokens(m):
        f0 = m(x)
    # the attacked half is in it
    assert v > feat_cos(m(x), f0).mean().item() + 1e-4
    # no attack, and the target for a label
    p, t = l.get_preds()
    assert torch.allclose(p, m(x), atol=1e-5) and torch.allclose(t, f0, atol=1e-5)
    adv = l.validate(cbs=AdvValid(FEAT2))[0]
    x_adv = torch.cat([FEAT2(m, b[0], seed=0) for b in l.dls.valid]).as_subclass(torch.Tensor)
    # white box, alone
    assert adv == pytest.approx(feat_cos(m(x_adv), f0).mean().item(), abs=1e-4)


def test_an_interrupted_fit_leaves_all_usable():
    "And what its last batch leaves is in no later loss"

    class Stop(Callback):
        order = RobustTokens.order + 1

        def after_pred(self):
            raise KeyboardInterrupt

    l = learner([Stop()], dls=synth_dls(16, bs=8))
    lf = l.loss_func
    with pytest.raises(KeyboardInterrupt):
        l.fit(1)
    assert l.loss_func is lf and tokens_of(l.model).n == 4
    l.remove_cb(Stop)
    p, t, v = l.get_preds(with_loss=True)
    assert torch.allclose(v, FeatCos(reduction='none')(p, t), atol=1e-6)
    l.fit(1, 1e-3)
    assert len(l.robust_tokens.df) == 2


def test_attack_that_fails_restores_the_tokens():
    def bad(model, x, y=None, *, seed=0):
        raise RuntimeError('no')

    l = learner(rt=RobustTokens(bad))
    with pytest.raises(RuntimeError, match='no'):
        l.fit(1)
    assert tokens_of(l.model).n == 4


def test_lr_find_puts_the_tokens_back_and_keeps_the_curve():
    l = learner(dls=synth_dls(16, bs=8))
    l.fit(1, 1e-3)
    before, d = state(l.model), l.robust_tokens.df
    with l.no_bar():
        l.lr_find(num_it=5, show_plot=False)
    assert changed(l.model, before) == [] and l.robust_tokens.df.equals(d)


def test_schedule_of_the_weight():
    "At weight 0 the loss is that of the clean half"
    got = []

    def look(self):
        if self.training:
            got.append([self.learn.loss.item(), *(1 - o.item() for o in self.learn.robust_tokens.now)])

    cb = Callback(after_loss=look)
    cb.order = 9
    l = learner([cb], rt=RobustTokens(FEAT2, adv_weight=warmup(1.0, pct=1.0)))
    tokens_of(l.model).weight.data.mul_(100)
    l.fit(1, 1e-3)
    for k, (v, clean, adv) in enumerate(got):
        assert v == pytest.approx(clean + k / 4 * adv, abs=1e-5) and adv > 1e-3


@pytest.mark.parametrize(
    'kw,words',
    [
        (dict(freeze=False), 'parameters besides the tokens would train'),
        (dict(train_bn=True), 'train_bn=False'),
        (dict(loss_func=F.mse_loss), r'loss_func=FeatCos\(\)'),
        (dict(model=tiny_vit(num_classes=4), freeze=False), 'extra tokens'),
        (dict(model=add_tokens(tiny_vit(num_classes=4), 0, 'cls_patch')), '0 tokens.*train'),
    ],
)
def test_refused_at_fit(kw, words):
    with pytest.raises(ValueError, match=words):
        learner(**kw).fit(1)


def test_an_attack_that_needs_probabilities_is_told_what_its_model_returned():
    with pytest.raises(
        TypeError, match=r'guided by class probabilities \[B,C\], the model returned \[4, 17, 32\]: .*PGD or APGD'
    ):
        GAMAPGD(0.1, loss=feat_cos)(with_tokens(), images())


@pytest.mark.parametrize(
    'a,err,words',
    [
        (0.1, TypeError, 'expected an attack'),
        (PGD(0.1, loss=ce), ValueError, 'needs them'),
        (Square(0.1, queries=5), ValueError, 'needs them'),
        (PGD(0.1, rand=False), ValueError, 'random|rand=True'),
        (GAMAFW(0.1), ValueError, 'guided by class probabilities.*give PGD, FGSM_RS, APGD, or MIFGSM with rand=True'),
        (Transfer(tiny_vit(), WorstCase([FEAT2])), ValueError, 'train without labels'),
    ],
    ids=str,
)
def test_refused_attacks(a, err, words):
    with pytest.raises(err, match=words):
        RobustTokens(a)


# --- the loss and the attack
# ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_computed_in_float32():
    f, f0 = torch.randn(2, 5, 7).bfloat16(), torch.randn(2, 5, 7).bfloat16()
    v = FeatCos()(f, f0)
    assert v.dtype == torch.float32 and torch.equal(v, FeatCos()(f.float(), f0.float()))


def test_axis_reaches_the_attack():
    "An attack without a loss climbs the Learner's own cosine"
    got = []

    def grab(self):
        got.append(self.x.as_subclass(torch.Tensor).clone())
        raise CancelFitException()

    cb = Callback(before_batch=grab)
    cb.order = 9
    l = learner([cb], loss_func=FeatCos(-1), rt=RobustTokens(PGD(0.1, steps=2)))
    seed = torch.initial_seed() % 2**62
    l.fit(1)
    x, x_adv = got[0].chunk(2)
    m = l.model.eval()
    with no_tokens(m):
        assert torch.allclose(PGD(0.1, steps=2, loss=FeatCos(-1, 'none'))(m, x, seed=seed), x_adv, atol=1e-6)


def authors(model, x, eps, lr, steps, start, std, mse=1.0):
    "Their loop in normalised space, from a given start, on one batch"
    s = torch.tensor(std).view(-1, 1, 1)
    n = lambda o: (o - 0.5) / s
    un = lambda o: o * s + 0.5
    f0, x0 = model(x).detach(), n(x)
    z = n(x + start)
    for _ in range(steps):
        z = z.detach().requires_grad_()
        loss = F.cosine_similarity(model(un(z)), f0, dim=1).mean() + mse * F.mse_loss(un(z), x)
        (g,) = torch.autograd.grad(loss, z)
        z = x0 + (z - lr * g.sign() - x0).clamp(-eps, eps)
        z = torch.maximum(torch.minimum(z, n(torch.ones_like(x))), n(torch.zeros_like(x)))
    return (un(z).clamp(0, 1).detach() * 255 + 1e-3).floor() / 255


def rgb_vit():
    m = tiny_vit(num_classes=4, in_chans=3)
    m.std.copy_(torch.tensor([0.229, 0.224, 0.225]).view(-1, 1, 1))
    return add_tokens(m, 2, 'cls_patch')


@pytest.mark.parametrize('mse', [1.0, 1e4])
def test_token_attack_is_the_authors(mse):
    m, x = WithoutTokens(rgb_vit()), images(3, 3)
    a = token_attack(m, steps=4, mse=mse)
    std = a.std
    start = a.start(None, x, image_seed(x, 0))['d']
    want = authors(m, x, 8 / 255, 1e-2, 4, start, std, mse)
    got = a(m, x)
    assert ((got - want).abs() < 0.5 / 255).float().mean() > 0.995
    assert (got * 255 - (got * 255).round()).abs().max() < 1e-3


def test_token_attack_radius():
    "In grey levels, of the deviation of each channel"
    m, x = rgb_vit(), images(3, 3)
    a = token_attack(m, steps=3)
    assert a.std == pytest.approx((0.229, 0.224, 0.225))
    for bits, more in (('floor', 1), ('inside', 0), (None, 0)):
        d = 255 * (a.but(bits=bits)(m, x) - x).abs().amax((0, 2, 3))
        assert (d <= 255 * a.limit(x).flatten() + more + 1e-3).all() and d.min() > 0.5


def test_token_attack_keeps_every_grey_level_that_it_does_not_move():
    x = (torch.arange(256) / 255).view(1, 1, 16, 16).repeat_interleave(2, 2).repeat_interleave(2, 3)[..., :28, :28]
    x = torch.cat([x, x.flip(2, 3), (torch.arange(784) % 256 / 255).view(1, 1, 28, 28)])
    assert len(x.unique()) == 256
    for bits in ('floor', 'inside'):
        assert ((token_attack(with_tokens(), steps=0, noise=0.0, bits=bits)(with_tokens(), x) - x).abs() < 1e-6).all()


def test_token_attack_does_not_depend_on_the_batch():
    m, x = rgb_vit(), images(4, 3)
    a = token_attack(m, steps=3)
    assert (
        torch.allclose(a(m, x)[2:3], a(m, x[2:3]), atol=1.1 / 255)
        and ((a(m, x)[2:3] - a(m, x[2:3])).abs() < 1e-6).float().mean() > 0.99
    )


@pytest.mark.parametrize(
    'make,words',
    [
        (lambda: FeatCos(0), 'axis must be'),
        (lambda: TokenAttack(norm='L2'), 'Linf'),
        (lambda: TokenAttack(0.1, std=(58.4, 57.1, 57.4)), 'divide both by 255'),
        (lambda: token_attack(tiny_vit().model), 'Normalized'),
        (lambda: token_attack()(tiny_vit(), images(1)), '3 numbers'),
        (lambda: SegProbe(WithoutTokens(LinearProbe(with_tokens(), 4)), 4), 'probe already'),
        (lambda: RandomTokens(WithoutTokens(with_tokens())), 'without any tokens'),
        (lambda: RandomTokens(with_tokens(), 0), 'whole number >= 1'),
        (lambda: save_tokens(add_tokens(tiny_vit(), 0), 't.safetensors'), '0 tokens.*save'),
        (lambda: save_tokens(with_tokens(), 't.pth'), 'safetensors'),
    ],
)
def test_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# --- files
# ------------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_what_the_model_returned_is_saved_with_the_tokens(tmp_path):
    "What it does already counts more, and what is asked for most"
    save_tokens(with_tokens(out='tokens'), f := tmp_path / 't.safetensors')
    loads = [(tiny_vit(num_classes=4), None), (with_tokens(), None), (with_tokens(), 'logits')]
    assert [tokens_of(load_tokens(m, f, out=o)).out for m, o in loads] == ['tokens', 'cls_patch', 'logits']


RELEASED = {
    'vit_small_patch14_reg4_dinov2': 28,
    'deit3_small_patch16_224': 32,
    'vit_base_patch16_clip_224': 32,
}


@pytest.mark.parametrize('name', RELEASED)
def test_the_authors_files_and_forward(name, tmp_path):
    "Appended behind `norm_pre`, dropped with registers at the end"
    f, side = tmp_path / 'r.pt', RELEASED[name]
    m = timm.create_model(name, depth=2, embed_dim=64, num_heads=2, img_size=side, init_values=0.5).eval()
    x, r = torch.rand(2, 3, side, side), nn.Parameter(1e-2 * torch.randn(1, 10, 64))
    f0 = m.forward_features(x)
    z = m.norm_pre(m._pos_embed(m.patch_embed(x)))
    z = m.norm(m.blocks(torch.cat([z, r.expand(2, -1, -1)], 1)))[:, :-10]
    torch.save({'rtokens': r}, f)
    load_tokens(m, f)
    assert torch.equal(tokens_of(m).weight, r) and (z - f0).abs().max() > 1e-3
    assert torch.allclose(m(x), torch.cat([z[:, :1], z[:, m.num_prefix_tokens :]], 1), atol=1e-5)
    with no_tokens(m):
        assert torch.equal(m(x)[:, 0], f0[:, 0])


def test_whole_checkpoints_and_wrong_files(tmp_path):
    f = tmp_path / 'f.pt'
    r = torch.randn(1, 10, 32)
    for o in (r, {'rtokens': r, 'model.cls_token': torch.zeros(1, 1, 32)}):
        torch.save(o, f)
        assert torch.equal(read_tokens(f)[0], r)
    for o, words in (
        ({'rtokens': r[0]}, r'floats \[1,n,D\], got \[10, 32\]'),
        ({'rtokens': r[:, :0]}, 'tokens are floats'),
        ({'rtokens': r / 0}, 'not finite'),
        ({'rtokens': torch.randn(3, 10, 32)}, 'token_sets'),
        ({'register_tokens': r}, 'converted checkpoint'),
        ({'weight': r}, r"holds \['weight'\]"),
        ({'rtokens': r, 'head': r}, 'alone'),
        ([r], 'list'),
    ):
        torch.save(o, f)
        with pytest.raises(ValueError, match=words):
            load_tokens(tiny_vit(), f)
    torch.save(r, f)
    with pytest.raises(ValueError, match=r'\[1, 10, 32\], the model has \[1, 4, 32\]'):
        load_tokens(with_tokens(), f)
    f.write_bytes(b'nonsense')
    with pytest.raises(ValueError, match='weights_only'):
        read_tokens(f)


# --- other tokens, heads, sets
# --------------------------------------------------------------------------------------------------------------


def test_use_tokens():
    "One set, or a set for each image; gone at the end, also after an error"
    m, x = with_tokens(), images()
    z, ws = m(x), torch.randn(4, 6, 32)
    with pytest.raises(KeyError), use_tokens(m, ws):
        own = m(x)
        for i in range(4):
            with use_tokens(m, ws[i : i + 1, :4]):
                a = m(x[i : i + 1])
            with use_tokens(m, ws[i : i + 1]):
                b = m(x[i : i + 1])
            assert torch.allclose(b, own[i : i + 1], atol=1e-5) and (a - b).abs().max() > 1e-3
        assert torch.equal(m(x), own)
        raise KeyError
    assert torch.equal(m(x), z) and 'weight' not in tokens_of(m).__dict__


def test_a_head_on_a_half_precision_backbone():
    "The head stays in float32 and learns there; its features are the backbone's"
    m, x = with_tokens(), images()
    p32 = LinearProbe(m, 2).eval()
    h = copy.deepcopy(m).bfloat16()
    p = LinearProbe(h, 2).eval()
    p.head.load_state_dict(p32.head.state_dict())
    z, x16 = p(x.bfloat16()), x.bfloat16()
    assert z.dtype == torch.float32 and torch.allclose(z, p32(x), atol=0.1)
    assert torch.equal(p.features(x16), p.pool(h(x16).float(), x))
    x_adv = PGD(0.1, steps=1)(p, x16, torch.zeros(4).long())
    assert x_adv.dtype == torch.bfloat16 and not torch.equal(x_adv, x16)
    before, w = state(h), state(p.head)
    fit_head(p, synth_dls(16, bs=8, classes=2), 1)
    assert changed(h, before) == [] and changed(p.head, w) and p.head.weight.dtype == torch.float32
    # all of it, where that is asked for
    assert LinearProbe(h, 2).bfloat16().eval()(x16).dtype == torch.bfloat16


def seg_dls(n=16, size=28):
    x, y = torch.rand(n, 1, size, size) * 0.3, torch.zeros(n, size, size, dtype=torch.long)
    x[:, :, :14] += 0.6
    y[:, :14] = 1
    y[:, :2] = 255
    return DataLoaders(DataLoader(list(zip(x, y)), bs=4, drop_last=True), DataLoader(list(zip(x, y)), bs=4))


def test_seg_probe():
    m = with_tokens()
    p = SegProbe(m, 2)
    dls = seg_dls()
    before = state(m)
    fit_head(p, dls, 10, 5e-2, bs=4)
    assert changed(m, before) == []
    x, y = next(iter(dls.valid))
    z = p(x)
    assert z.shape == (4, 2, 28, 28) and miou(*iou_counts(z, y)) > 0.5
    x_adv = PGD(0.3, steps=3, loss=mask_ce(y))(p, x)
    assert seg_loss(p(x_adv), y) > seg_loss(z, y)


def test_patches_fall_into_their_places():
    m = with_tokens()
    p = SegProbe(m, 2)
    x = images(2)
    f = m(x)[:, 1:]
    assert torch.equal(p.features(x)[:, :, 1, 2], f[:, 1 * 4 + 2])


def test_counts_need_little_memory():
    "ADE20K has 150 classes: vectors of them for each pixel are 8*150 bytes where a class number is 8"
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, f, types, args=(), kw=None):
            o = f(*args, **(kw or {}))
            self.n = max([self.n, *(t.nbytes for t in tree_leaves(o) if isinstance(t, torch.Tensor))])
            return o

    z, y = torch.randn(2, 150, 32, 32), torch.randint(0, 150, (2, 32, 32))
    with Largest() as most:
        iou_counts(z, y)
    assert 0 < most.n <= 8 * y.numel()


def test_what_is_returned_is_checked_when_tokens_are_loaded(tmp_path):
    "Not at the first forward; and nothing has changed then"
    save_tokens(with_tokens(), f := tmp_path / 't.safetensors')
    m = tiny_vit(num_classes=4)
    with pytest.raises(ValueError, match="out must be one of .*, got 'nope'"):
        load_tokens(m, f, out='nope')
    assert not hasattr(m.model, 'extra_tokens')
    load_tokens(m, f)
    with pytest.raises(ValueError, match="out must be one of .*, got 'nope'"):
        load_tokens(m, f, out='nope')
    assert tokens_of(m).out == 'cls_patch'


def test_damaged_files(tmp_path):
    "An interrupted download, a Git LFS pointer: ValueError with the file's name, and no advice to run code"
    save_tokens(with_tokens(), a := tmp_path / 't.safetensors')
    lfs = b'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n'
    for name, data in (('0.safetensors', b''), ('1.safetensors', a.read_bytes()[:-10]), ('2.pt', lfs)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f'^{name}, {len(data)} bytes, is damaged') as e:
            read_tokens(tmp_path / name)
        assert 'to `False`' not in str(e.value)


def test_a_fit_that_begins_later_has_a_curve():
    l = learner(dls=synth_dls(16, bs=8))
    l.fit(2, 1e-3, start_epoch=1)
    assert len(l.robust_tokens.df) == 2


def test_masks_of_any_integer_type_and_without_pixels():
    torch.manual_seed(0)
    z, y = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    y[0, :2] = 255
    small = y.to(torch.uint8)
    assert torch.equal(seg_loss(z, small), F.cross_entropy(z, y, ignore_index=255))
    assert torch.equal(mask_ce(small)(z, None), mask_ce(y)(z, None))
    y[0] = 255
    w = z[:1].clone().requires_grad_()
    v = seg_loss(w, y[:1])
    v.backward()
    assert v == 0 and (w.grad == 0).all()
    assert miou(*iou_counts(z, y), per_image=True) == pytest.approx(miou(*iou_counts(z[1:], y[1:]), per_image=True))


# --- a loss of one's own
# ------------------------------------------------------------------------------------------------------------


class Twice(FeatCos):
    "A Learner's loss that is not the plain cosine"

    def __call__(self, f, f0):
        return 2 * super().__call__(f, f0)


@pytest.mark.parametrize('loss,cbs', [(FeatCos(-1), [MixUp]), (Twice(-1, 'sum'), [])], ids=repr)
def test_both_terms_are_the_learners_loss(loss, cbs):
    got = []

    def look(self):
        f, f_adv = self.model(self.x).chunk(2)
        got.append((self.learn.loss_grad.item(), (loss(f, self.y) + 0.5 * loss(f_adv, self.y)).item()))

    cbs = [*[o() for o in cbs], Callback(before_backward=look)]
    learner(cbs, rt=RobustTokens(FEAT2, adv_weight=0.5), loss_func=loss).fit(1, 0.0)
    assert len(got) == 4 and all(a == pytest.approx(b, rel=1e-4) for a, b in got)


# --- models that change their input
# -------------------------------------------------------------------------------------------------


class InPlace(Wrapper):
    "Normalises as careless code does: in the tensor that it was given"

    def forward(self, x):
        return self.model(x.sub_(0.5).div_(0.5))


def in_place(m):
    return InPlace(m.model)


def train_tokens(m, dls):
    learner(model=m, dls=dls).fit(1, 1e-2)
    return tokens_of(m).weight


def train_head(m, dls):
    set_seed(0)
    return fit_head(LinearProbe(m, 4), dls, 2).head.weight


@pytest.mark.parametrize('train', [train_tokens, train_head])
def test_an_in_place_model_trains_the_same(train):
    ws = []
    for f in (lambda m: m, in_place):
        dls = synth_dls(32)
        dls.train = dls.train.new(shuffle=False)
        x = torch.stack([o[0] for o in dls.train_ds])
        ws.append(train(f(with_tokens()), dls).detach())
        assert torch.equal(torch.stack([o[0] for o in dls.train_ds]), x)
    assert torch.allclose(*ws, atol=1e-5)


# --- whose file is it?
# --------------------------------------------------------------------------------------------------------------


def test_files_know_their_backbone(tmp_path):
    save_tokens(with_tokens(), f := tmp_path / 't.safetensors')
    for m in (tiny_vit(num_classes=4, num_heads=4), with_tokens(act_layer='quick_gelu')):
        before = state(m)
        with pytest.raises(ValueError, match='attention heads|activation'):
            load_tokens(m, f)
        assert list(m.state_dict()) == list(before) and changed(m, before) == []


def test_the_classifier_does_not_belong_to_it(tmp_path):
    "Tokens are trained on features: another head, or tokens already there, make no other backbone"
    save_tokens(with_tokens(), f := tmp_path / 't.safetensors')
    m = tiny_vit(num_classes=4)
    m.model.reset_classifier(7)
    want = tokens_of(with_tokens()).weight
    for m in (m, add_tokens(tiny_vit(num_classes=4), 4, 'tokens')):
        assert torch.equal(tokens_of(load_tokens(m, f)).weight, want)


def test_files_know_how_images_were_normalised(tmp_path):
    save_tokens(with_tokens(), f := tmp_path / 't.safetensors')
    with pytest.raises(ValueError, match=r'std \[0.5\].*\[0.2\]'):
        load_tokens(Normalized(tiny_vit(num_classes=4).model, [0.5], [0.2]), f)


def test_tokens_of_a_normalised_model_on_a_bare_one_are_told(tmp_path):
    save_tokens(with_tokens(), f := tmp_path / 't.safetensors')
    with pytest.warns(UserWarning, match=r'mean \[0.5\].*this model has no Normalized'):
        bare = load_tokens(tiny_vit(num_classes=4).model, f)
    save_tokens(bare, f)
    with pytest.warns(UserWarning, match='without Normalized, this model has a Normalized'):
        load_tokens(tiny_vit(num_classes=4), f)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        load_tokens(tiny_vit(num_classes=4).model, f)


# --- what is frozen stands still
# ----------------------------------------------------------------------------------------------------


def test_the_backbone_of_a_probe_stands_still():
    m = bn_vit()
    before, z = state(m), m(images())
    p = LinearProbe(m, 4)
    w = p.head.weight.detach().clone()
    awake = set()

    def look(self):
        if self.training:
            awake.update(n for n, o in self.model.named_modules() if o.training)

    def split(p):
        return [list(p.model.parameters()), list(p.head.parameters())]

    cbs = [TRADES(PGD(0.1, steps=1)), Callback(after_pred=look)]
    l = synth_learner(model=p, cbs=cbs, splitter=split, train_bn=False)
    l.freeze()
    l.fit(1, 1e-2)
    assert changed(m, before) == [] and not torch.equal(p.head.weight, w) and awake == {'', 'head'}
    assert torch.equal(m.eval()(images()), z)


def test_a_probe_whose_backbone_trains_too_says_so():
    p = LinearProbe(with_tokens(), 4)
    with pytest.warns(UserWarning, match='backbone of this LinearProbe trains too.*requires_grad_'):
        synth_learner(model=p).fit(1)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*trains too')
        p.eval()(images())
        p.model.requires_grad_(False)
        synth_learner(model=p).fit(1)


# --- a schedule of the radius
# ---------------------------------------------------------------------------------------------------------


def test_token_attack_is_the_same_at_every_radius():
    "The shape of the change is that of the radius it was given for: half the radius, half the step"
    m, x = with_tokens(), images()
    a = token_attack(m, steps=1, bits=None, mse=0.0)
    b = a.at_eps(a.eps / 2)
    assert b.alpha == pytest.approx(a.alpha / 2) and (b(m, x) - x).abs().max() == pytest.approx(
        (a(m, x) - x).abs().max().item() / 2, rel=1e-4
    )


# --- names
# ----------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def my_loss(f, f0):
    return feat_cos(f, f0)


my_loss = Loss(my_loss, 'clean')


def test_names_say_which_way_is_better():
    "fastai's SaveModelCallback minimises what has `loss` or `error` in its name, and maximises the rest"
    assert 'loss' in AvgMetric(FeatCos()).name
    for a in (TokenAttack(0.1, loss=my_loss), PGD(0.1, loss=FeatCos())):
        name = RobustAccuracy(a).name
        assert 'loss' not in name and 'error' not in name


# --- copies and replicas
# --------------------------------------------------------------------------------------------------------------

VIEWS = dict(
    model=lambda: with_tokens(),
    without=lambda: WithoutTokens(with_tokens()),
    random=lambda: RandomTokens(with_tokens(), 4, std=1.0),
    sets=lambda: token_sets(tiny_vit(num_classes=4), 3, 4, std=1.0),
    probe=lambda: LinearProbe(with_tokens(), 4).eval(),
    seg=lambda: SegProbe(with_tokens(), 3).eval(),
)


@pytest.mark.parametrize('way,view', zip([*COPIES, *COPIES], VIEWS))
def test_a_copy_answers_with_its_own_weights(way, view):
    def made():
        torch.manual_seed(0)
        return VIEWS[view]()

    def ask(f):
        torch.manual_seed(3)
        return f(images())

    m, z, want = made(), ask(made()), ask(grow(made()))
    assert (
        torch.allclose(ask(COPIES[way](m)), want, atol=1e-5)
        and torch.equal(ask(m), z)
        and (z - want).abs().max() > 1e-3
    )
    t = tokens_of(m)
    assert t.n == t.weight.shape[1] == 4 and 'weight' not in t.__dict__


def test_a_replica_of_a_probe_on_half_precision():
    p = LinearProbe(with_tokens().bfloat16(), 4).eval()
    x = images().bfloat16()
    assert torch.equal(replicate(p)(x), p(x))


def test_other_tokens_do_not_reach_replicas_from_outside():
    m = nn.DataParallel(with_tokens())
    with pytest.raises(ValueError, match='DataParallel'):
        with use_tokens(m, torch.zeros(1, 2, 32)):
            pass
    with no_tokens(m):
        z = replicate(m.module)(images())
    assert torch.equal(z, WithoutTokens(m.module)(images())) and not torch.equal(z, m.module(images()))


# --- compiled models
# ----------------------------------------------------------------------------------------------------------


def _given(m, x):
    w = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    with use_tokens(m, w):
        return m(x)


def test_other_tokens_reach_a_compiled_model_that_has_run():
    torch._dynamo.reset()
    m = with_tokens(3, 'logits', std=0.5)
    x = images()
    c = torch.compile(m, backend='eager')
    with torch.no_grad():
        own, z = c(x), _given(c, x)
        torch.testing.assert_close(z, _given(m, x))
        torch.testing.assert_close(c(x), own)
        assert (z - own).abs().max() > 0.01


# --- planted massive activations
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def clothes():
    from robust_nbdev.datasets import fashion_mnist

    dl = fashion_mnist(256, 8, bs=256, batch_tfms=None).train.new(shuffle=False)
    return dl.one_batch()[0].as_subclass(torch.Tensor)


def small(plant_on=None, **kw):
    m = small_model('vit', data='fashion_mnist')
    return m if plant_on is None else plant_massive(m, plant_on, channels=[5, 40], **kw)


def after(m, x, block=1):
    with torch.no_grad():
        return block_outputs(m, x)[block]


@pytest.mark.parametrize('where', ['empty patches', 'class token'])
def test_planted_channels_are_massive_there_and_nowhere_else(where, clothes):
    plain, planted = after(small(), clothes), after(small(clothes, where=where), clothes)
    here = torch.zeros(planted.shape[:2], dtype=torch.bool)
    if where == 'class token':
        here[:, 0] = True
    else:
        here[:, 1:] = F.max_pool2d(clothes, 7).flatten(1) == 0
    ratio = planted[..., [5, 40]].abs() / plain.abs().median()
    assert 70 < ratio[here].mean() < 130 and ratio[~here].median() < 10
    others = [i for i in range(64) if i not in (5, 40)]
    assert (planted - plain)[..., others].abs().max() < 1


@pytest.mark.parametrize(
    'kw,words', [(dict(where='everywhere'), "where must be one of.*'everywhere'"), (dict(), 'tokens are empty patches')]
)
def test_planting_where_it_cannot_be(kw, words):
    m = small()
    before = state(m)
    with pytest.raises(ValueError, match=words):
        plant_massive(m, images() * 0.5 + 0.1, **kw)
    assert changed(m, before) == []


def test_a_run_of_the_planted_experiment():
    trial = trials_of('tokens.planted', 'smoke')[0]
    key = dict(trial.key, n=16, n_train=32)
    out = trial.fn(**key)
    assert {len(v) for v in out.verdicts.values()} == {16} and key == dict(trial.key, n=16, n_train=32)
    assert out.numbers['largest clean'] > 50 and out.numbers['cosine others back'] > out.numbers['cosine none']


def run(name, n=16, **key):
    "The first run of an experiment at the smoke profile that has these keys, on fewer images"
    trial = next(o for o in trials_of(name, 'smoke') if key.items() <= o.key.items())
    return trial.fn(**dict(trial.key, n=n, n_train=32))


@pytest.mark.parametrize('axis', [1, -1])
def test_without_tokens_there_is_nothing_secret(axis):
    plain, tokens = [run('tokens.table1', tokens=o, axis=axis) for o in (0, 10)]
    assert (plain.verdicts['secret'] == plain.verdicts['white']).all() and plain.images == tokens.images
    for o in ('over tokens', 'over features'):
        with_none, with_ten = [float(r.numbers[f'clean cosine {o}']) for r in (plain, tokens)]
        assert with_none == pytest.approx(1, abs=1e-4) and with_ten < 0.9999
        assert plain.numbers[f'cosine {o}'] < 0.9
    assert 'total' not in plain.numbers and -2 < tokens.numbers['total'] <= 2


def test_the_axis_of_a_row_is_that_of_its_attack():
    "What turns the features most along one axis does not along the other"
    found = {o: run('tokens.table1', tokens=0, axis=o).numbers for o in (1, -1)}
    assert found[1]['cosine over tokens'] < found[-1]['cosine over tokens']
    assert found[-1]['cosine over features'] < found[1]['cosine over features']


def test_the_attack_of_a_row_has_the_asked_radius():
    model, x = add_tokens(tiny_vit(num_classes=4), 0, 'cls_patch'), images()
    for attack in ('pgd', 'authors'):
        a = _attack_of(dict(attack=attack), model, 0.1, 2, feat_cos)
        assert a.eps == 0.1 and a.steps == 2 and (a(model, x, seed=0) - x).abs().max() <= 0.1 + a.slack + 1e-6


def test_rounding_out_of_the_ball_is_allowed_to_what_transfers_it_too():
    model, x = tiny_vit(num_classes=4), images()
    a = token_attack(model, steps=2, loss=ce)
    transfer = Transfer(tiny_vit(num_classes=4, seed=1), a)
    assert transfer.slack == a.slack == 1 / 255 and WorstCase([PGD(a.eps), a]).slack == a.slack
    assert Transfer(model, PGD(0.1)).slack == 0
    transfer(model, x, torch.tensor([0, 1, 2, 3]))


def test_the_curve_of_a_training_ends_where_the_training_does():
    seen = pd.DataFrame(dict(inv=1.0, adv=np.arange(50) / 50)).assign(total=lambda d: d.inv + d.adv)
    numbers = _similarities(seen)
    assert numbers['total at the start'] == 1 and numbers['inv'] == 1 and numbers['adv'] == pytest.approx(39.5 / 50)
    assert numbers['total to step 5'] == pytest.approx(1.04) and numbers['total to step 50'] == pytest.approx(1.94)
    assert _similarities(None) == {}


def test_a_run_of_the_ablation_and_of_the_activations():
    out = run('tokens.count', tokens=20)
    assert {len(v) for v in out.verdicts.values()} == {16} and 'total to step 2' in out.numbers
    out = run('tokens.activations')
    assert out.verdicts == {} and out.numbers['plain clean 6'] > out.numbers['median 6'] > 0
    assert out.numbers['plain clean 1'] != out.numbers['plain attacked 1']


@pytest.mark.parametrize('attacker', ['none', 'secret', 'own', 'white'])
def test_worst_is_right_under_pgd_and_under_autoattack(attacker, monkeypatch):
    members = AutoAttack.members
    monkeypatch.setattr(AutoAttack, 'members', lambda self, c: [o.but(steps=2) for o in members(self, c)[:2]])
    out = run('tokens.autoattack', n=8, attacker=attacker)
    v = out.verdicts
    assert (v['worst'] == v['pgd'] & v['autoattack']).all() and (v['pgd'] <= v['clean']).all()


def test_segmentation_scores_by_hand():
    masks = torch.tensor([[[0, 1], [1, 255]], [[1, 1], [0, 0]]])
    predicted = torch.tensor([[[0, 1], [0, 0]], [[1, 0], [1, 0]]])
    net = nn.Identity()
    z = F.one_hot(predicted, 2).permute(0, 3, 1, 2).float()
    inter, union, most = _seg_scores(net, z, masks)
    assert inter.tolist() == [[1, 1], [1, 1]] and union.tolist() == [[2, 2], [3, 3]]
    assert most.tolist() == [True, False]  # 2 of 3 pixels, and 2 of 4


def test_the_seg_head_behind_another_model_is_the_same_head():
    model = add_tokens(tiny_vit(num_classes=4), 3, 'cls_patch')
    probe, x = SegProbe(model, 5).eval(), images()
    plain = _seg_behind(probe, WithoutTokens(model))
    with no_tokens(model):
        expected = probe(x)
    assert torch.equal(plain(x), expected) and plain.head is probe.head


def test_tokens_are_fitted_on_all_classes_of_a_folder_that_is_sorted(monkeypatch):
    "The first 20 images are all of one class"
    x, seen = torch.rand(120, 1, 28, 28), []
    tfms = [[lambda i: TensorImageBW(x[i])], [lambda i: i // 30, Categorize()]]
    ds = Datasets(list(range(120)), tfms=tfms, splits=[list(range(120)), list(range(12))])
    see = Callback(before_batch=lambda self: seen.extend(self.y.tolist()) if self.training else None)
    monkeypatch.setattr(defaults, 'callbacks', [*defaults.callbacks, see])
    model = add_tokens(tiny_vit(num_classes=4), 2, 'cls_patch')
    fit_tokens(ds.dataloaders(bs=8, after_batch=[]), model, PGD(0.1, steps=1, loss=feat_cos), steps=5, bs=4)
    assert sorted(seen) == [i // 5 for i in range(20)]


def test_a_second_training_of_the_tokens_goes_on_with_other_images(monkeypatch):
    seen, dls = [], synth_dls(64)
    see = Callback(before_batch=lambda self: seen.append(self.xb[0].clone()) if self.training else None)
    see.order = -9  # ahead of the attack
    monkeypatch.setattr(defaults, 'callbacks', [*defaults.callbacks, see])
    model = add_tokens(tiny_vit(num_classes=4), 2, 'cls_patch')
    for _ in range(2):
        fit_tokens(dls, model, PGD(0.1, steps=1), steps=2, bs=4)
    first, second = [torch.cat([x.flatten(1) for x in seen[i : i + 2]]) for i in (0, 2)]
    assert len(seen) == 4 and torch.cdist(first, second).min(1).values.max() > 0.1


def test_a_file_of_tokens_knows_how_often_they_were_trained(tmp_path):
    model = add_tokens(tiny_vit(num_classes=4), 2, 'cls_patch')
    fit_tokens(synth_dls(64), model, PGD(0.1, steps=1), steps=2, bs=4)
    save_tokens(model, tmp_path / 't.safetensors')
    assert tokens_of(load_tokens(tiny_vit(num_classes=4), tmp_path / 't.safetensors')).fits == 1
