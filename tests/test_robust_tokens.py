"Robustness Tokens: only the tokens train, the fastai contract, files, heads, and the attack by hand."

import copy, math, warnings
import numpy as np, pytest, timm, torch, torch.nn.functional as F
from torch import nn
from fastai.vision.all import (
    AvgMetric,
    Callback,
    Categorize,
    CancelFitException,
    CrossEntropyLossFlat,
    CutMix,
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
from robust_nbdev.test_utils import *
from copies import COPIES, grow, replicate

FEAT2 = PGD(0.1, steps=2, loss=feat_cos)


def images(n=4, c=1, size=28, seed=0):
    return (torch.rand(n, c, size, size, generator=torch.Generator().manual_seed(seed)) * 255).round() / 255


def with_tokens(n=4, out='cls_patch', std=0.01, **kw):
    torch.manual_seed(1)
    return add_tokens(tiny_vit(num_classes=4, **kw), n, out, std)


def learner(cbs=(), model=None, rt=None, freeze=True, loss_func=None, **kw):
    l = synth_learner(
        model=model or with_tokens(),
        loss_func=loss_func or FeatCos(),
        splitter=token_splitter,
        train_bn=False,
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


@pytest.mark.parametrize(
    'make', [with_tokens, lambda: with_tokens(reg_tokens=2), bn_vit], ids=['plain', 'registers', 'batchnorm']
)
def test_only_tokens_change_and_the_backbone_stays_to_the_bit(make):
    m = make()
    x = images()
    before = state(m)
    with no_tokens(m):
        f0 = m(x)
    l = learner(model=m)
    l.fit(2, 1e-2)
    assert (
        changed(m, before) == ONLY
        and sum(p.requires_grad for p in m.parameters()) == 1
        and sum(p.numel() for p in m.parameters() if p.requires_grad) == 4 * 32
    )
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

CBS = dict(
    cutmix=lambda: [CutMix()],
    fp16=lambda: [HalfPrecision(torch.float16)],
    all=lambda: [MixUp(), GradientAccumulation(32), HalfPrecision(torch.bfloat16), AWP(0.01)],
)


@pytest.mark.parametrize('k', CBS)
def test_composes_with(k):
    l = learner(CBS[k]())
    lf, before = l.loss_func, state(l.model)
    l.fit(1, 1e-2)
    assert (
        changed(l.model, before) == ONLY
        and l.loss_func is lf
        and lf.reduction == 'mean'
        and not torch.is_autocast_enabled('cpu')
    )
    assert tokens_of(l.model).weight.isfinite().all() and math.isfinite(l.recorder.values[-1][1])
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


def test_interrupted_fit_leaves_all_usable():
    class Stop(Callback):
        def after_pred(self):
            raise KeyboardInterrupt

    l = learner([Stop()])
    lf = l.loss_func
    with pytest.raises(KeyboardInterrupt):
        l.fit(1)
    assert l.loss_func is lf and tokens_of(l.model).n == 4 and not torch.is_autocast_enabled('cpu')
    l.remove_cb(Stop)
    l.fit(1, 1e-3)
    assert len(l.robust_tokens.df) == 4


def test_attack_that_fails_restores_the_tokens():
    def bad(model, x, y=None, *, seed=0):
        raise RuntimeError('no')

    l = learner(rt=RobustTokens(bad))
    with pytest.raises(RuntimeError, match='no'):
        l.fit(1)
    assert tokens_of(l.model).n == 4


def test_lr_find_puts_the_tokens_back():

    l = learner()
    before = state(l.model)
    with l.no_bar():
        l.lr_find(num_it=5, show_plot=False)
    assert changed(l.model, before) == []


def test_schedule_of_the_weight():
    "At weight 0 the loss is that of the clean half"
    got = []

    class Look(Callback):
        order = 9

        def after_loss(self):
            (
                got.append(
                    (
                        self.learn.loss.item(),
                        1 - self.learn.robust_tokens.now[0].item(),
                        1 - self.learn.robust_tokens.now[1].item(),
                    )
                )
                if self.training
                else None
            )

    l = learner([Look()], rt=RobustTokens(FEAT2, adv_weight=warmup(1.0, pct=1.0)), model=with_tokens())
    tokens_of(l.model).weight.data.mul_(100)
    l.fit(1, 1e-3)
    for k, (v, clean, adv) in enumerate(got):
        assert v == pytest.approx(clean + k / 4 * adv, abs=1e-5) and adv > 1e-3


@pytest.mark.parametrize(
    'make,words',
    [
        (lambda: learner(freeze=False), 'parameters besides the tokens would train'),
        (lambda: learner(model=tiny_vit(num_classes=4), freeze=False, rt=RobustTokens(FEAT2)), 'extra tokens'),
        (lambda: learner(cbs=[AdvTrain(FEAT2)]), 'two AdvTrain callbacks'),
    ],
)
def test_refused_at_fit(make, words):
    with pytest.raises(ValueError, match=words):
        l = make()
        l.fit(1)


def test_layernorm_left_trainable_is_refused():
    l = synth_learner(model=with_tokens(), loss_func=FeatCos(), splitter=token_splitter, cbs=RobustTokens(FEAT2))
    l.freeze()
    with pytest.raises(ValueError, match='train_bn=False'):
        l.fit(1)


@pytest.mark.parametrize('a', [GAMAPGD(0.1), GAMAPGD(0.1, loss=feat_cos), GAMAFW(0.1)], ids=str)
def test_attacks_that_need_probabilities_say_what_can_be_used(a):
    with pytest.raises(
        ValueError,
        match=(
            r'guided by class probabilities.*give PGD, FGSM_RS, APGD, or MIFGSM with rand=True, each with loss=feat_cos'
        ),
    ):
        RobustTokens(a)
    with pytest.raises(
        TypeError, match=r'guided by class probabilities \[B,C\], the model returned \[4, 17, 32\]: .*PGD or APGD'
    ):
        a.but(loss=feat_cos)(with_tokens(), images())


def test_refused_attacks():
    with pytest.raises(ValueError, match='needs them'):
        RobustTokens(PGD(0.1, loss=ce))
    with pytest.raises(TypeError, match='expected an attack'):
        RobustTokens(0.1)
    with pytest.raises(ValueError, match='random|rand=True'):
        RobustTokens(PGD(0.1, rand=False))


# --- the loss and the attack
# ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_computed_in_float32():
    f, f0 = torch.randn(2, 5, 7).bfloat16(), torch.randn(2, 5, 7).bfloat16()
    v = FeatCos()(f, f0)
    assert v.dtype == torch.float32 and torch.equal(v, FeatCos()(f.float(), f0.float()))


def test_axis_reaches_the_attack():
    "An attack without a loss climbs the Learner's own cosine"
    for axis in (1, -1):
        l = learner(loss_func=FeatCos(axis), rt=RobustTokens(PGD(0.1, steps=2)))
        got = {}

        class Grab(Callback):
            order = 9

            def before_batch(self):
                got.update(x=self.x.as_subclass(torch.Tensor).clone())
                raise CancelFitException()

        l.add_cb(Grab())
        seed = torch.initial_seed() % 2**62
        l.fit(1)
        x, x_adv = got['x'].chunk(2)
        m = l.model.eval()
        with no_tokens(m):
            assert torch.allclose(PGD(0.1, steps=2, loss=FeatCos(axis, 'none'))(m, x, seed=seed), x_adv, atol=1e-6)


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
    a = token_attack()
    assert a.steps == 30 and 255 * a.eps == pytest.approx(1.832) and 255 * a.alpha == pytest.approx(0.01 * 0.229 * 255)
    m, x = rgb_vit(), images(3, 3)
    l = 255 * a.limit(x).flatten()
    assert l.tolist() == pytest.approx([8 * 0.229, 8 * 0.224, 8 * 0.225], abs=1e-4)
    for bits, more in (('floor', 1), ('inside', 0), (None, 0)):
        d = 255 * (token_attack(m, steps=3, bits=bits)(m, x) - x).abs().amax((0, 2, 3))
        assert (d <= l + more + 1e-3).all() and d.min() > 0.5
    assert token_attack(m).std == pytest.approx((0.229, 0.224, 0.225)) and token_attack(with_tokens()).std == (0.5,)


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
        (lambda: TokenAttack(norm='L2'), 'Linf'),
        (lambda: TokenAttack(bits='up'), 'bits'),
        (lambda: token_attack(tiny_vit().model), 'Normalized'),
        (lambda: token_attack()(tiny_vit(), images(1)), '3 numbers'),
    ],
)
def test_token_attack_refuses(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# --- files
# ------------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_save_and_load(tmp_path):
    a, b = with_tokens(), tiny_vit(num_classes=4)
    x = images()
    f = tmp_path / 't.safetensors'
    save_tokens(a, f)
    assert torch.equal(load_tokens(b, f)(x), a(x)) and tokens_of(b).out == 'cls_patch' and f.stat().st_size < 2000
    w, about = read_tokens(f)
    assert about['version'] == '1' and about['timm'] == timm.__version__ and about['width'] == '32'
    assert torch.equal(load_tokens(tiny_vit(num_classes=4), f, out='logits')(x), _logits(a, x))
    with pytest.raises(ValueError, match='safetensors'):
        save_tokens(a, tmp_path / 't.pth')
    with pytest.raises(ValueError, match='extra tokens'):
        save_tokens(tiny_vit(), f)


def _logits(m, x):
    t = tokens_of(m)
    t.out = 'logits'
    z = m(x)
    t.out = 'cls_patch'
    return z


def test_what_the_model_returned_is_saved_with_the_tokens(tmp_path):
    f = tmp_path / 't.safetensors'
    save_tokens(with_tokens(out='tokens'), f)
    # what it does already counts more
    assert (
        tokens_of(load_tokens(tiny_vit(num_classes=4), f)).out == 'tokens'
        and tokens_of(load_tokens(with_tokens(), f)).out == 'cls_patch'
    )


RELEASED = {
    'dinov2/small': 384,
    'dinov2/small_reg': 384,
    'dinov2/base': 768,
    'dinov2/base_reg': 768,
    'dinov2/large': 1024,
    'dinov2/large_reg': 1024,
    'dinov2/giant': 1536,
    'dinov2/giant_reg': 1536,
    'deit3/base16': 768,
    'deit3/large16': 1024,
    'deit3/huge14': 1280,
    'openclip/base16': 768,
    'openclip/large14': 1024,
    'openclip/huge14': 1280,
}


def shell(name):
    "A timm model of the backbone's family and width, two blocks deep"
    kind, size = name.split('/')
    d = RELEASED[name]
    kw = dict(depth=2, embed_dim=d, num_heads=d // 64, img_size=28)
    if kind == 'dinov2':
        return timm.create_model('vit_small_patch14_reg4_dinov2' if 'reg' in size else 'vit_small_patch14_dinov2', **kw)
    if kind == 'deit3':
        return timm.create_model('deit3_small_patch16_224', **{**kw, 'img_size': 32})
    return timm.create_model('vit_base_patch16_clip_224', **{**kw, 'img_size': 32, 'num_classes': 8})


@pytest.mark.parametrize('name', ['dinov2/small', 'dinov2/base_reg', 'deit3/base16', 'openclip/base16'])
def test_the_authors_files(name, tmp_path):
    f, d = tmp_path / 'r.pt', RELEASED[name]
    r = nn.Parameter(1e-2 * torch.randn(1, 10, d))
    torch.save({'rtokens': r}, f)
    m = shell(name)
    size = m.patch_embed.img_size[0]
    x = torch.rand(1, 3, size, size)
    f0 = m.forward_features(x)
    load_tokens(m, f)
    assert (
        torch.equal(tokens_of(m).weight, r)
        and tokens_of(m).weight.shape == (1, 10, d)
        and tokens_of(m).out == 'cls_patch'
    )
    assert m(x).shape == (1, 1 + m.patch_embed.num_patches, d) and (m(x)[:, 0] - f0[:, 0]).abs().max() > 0
    with no_tokens(m):
        assert torch.equal(m(x)[:, 0], f0[:, 0])


def test_appended_tokens_equal_the_authors_forward():
    "DeiT-III: their forward, token by token; CLIP: after norm_pre"
    for name in ('deit3/base16', 'openclip/base16'):
        m = shell(name).eval()
        x, r = torch.rand(2, 3, 32, 32), 1e-2 * torch.randn(1, 10, 768)
        z = m.norm_pre(m._pos_embed(m.patch_embed(x)))
        z = m.norm(m.blocks(torch.cat([z, r.expand(2, -1, -1)], 1)))[:, :-10]
        add_tokens(m, 10, 'cls_patch')
        tokens_of(m).weight.data.copy_(r)
        assert torch.allclose(m(x), z, atol=1e-5)


def test_whole_checkpoints_and_wrong_files(tmp_path):
    f = tmp_path / 'f.pt'
    m = tiny_vit()
    r = torch.randn(1, 10, 32)

    def fails(o, words, err=ValueError, model=None):
        torch.save(o, f)
        with pytest.raises(err, match=words):
            load_tokens(model or tiny_vit(), f)

    torch.save({'rtokens': r, 'model.cls_token': torch.zeros(1, 1, 32)}, f)
    assert torch.equal(load_tokens(m, f).model.extra_tokens.weight, r)
    torch.save(r, f)
    assert torch.equal(read_tokens(f)[0], r)
    fails({'rtokens': torch.randn(1, 10, 384)}, r'width 384 \(ViT-S\), the model is 32 wide')
    fails({'rtokens': r[0]}, r'floats \[1,n,D\], got \[10, 32\]')
    fails({'rtokens': r.long()}, 'floats')
    fails({'rtokens': r / 0}, 'not finite')
    fails({'register_tokens': r}, 'converted checkpoint')
    fails({'weight': r}, r"holds \['weight'\]")
    fails({'rtokens': r, 'head': r}, 'alone')
    fails([r], 'list')
    fails({'rtokens': torch.randn(3, 10, 32)}, 'token_sets')
    fails({'rtokens': r}, r'\[1, 10, 32\], the model has \[1, 4, 32\]', model=with_tokens())
    fails(
        {'rtokens': r},
        'XcitClass|Xcit|no place for extra tokens|wide',
        (ValueError, TypeError),
        timm.create_model('xcit_nano_12_p16_224'),
    )
    with pytest.raises(FileNotFoundError):
        load_tokens(m, tmp_path / 'none.pt')
    f.write_bytes(b'nonsense')
    with pytest.raises(ValueError, match='weights_only'):
        read_tokens(f)


# --- other tokens, heads, sets
# --------------------------------------------------------------------------------------------------------------


def test_use_tokens():
    m, x = with_tokens(), images()
    z, w = m(x), torch.randn(1, 6, 32)
    with use_tokens(m, w):
        a = m(x)
        with use_tokens(m, w[:, :2]):
            b = m(x)
        assert torch.equal(m(x), a)
    assert torch.equal(m(x), z) and not torch.equal(a, b)
    with pytest.raises(KeyError):
        with use_tokens(m, w):
            raise KeyError
    assert torch.equal(m(x), z) and 'weight' not in tokens_of(m).__dict__
    # a set for each image
    ws = torch.randn(4, 6, 32)
    with use_tokens(m, ws):
        c = m(x)
    for i in range(4):
        with use_tokens(m, ws[i : i + 1]):
            assert torch.allclose(m(x[i : i + 1]), c[i : i + 1], atol=1e-5)


def test_fit_head_learns_and_touches_nothing_else():
    set_seed(0)
    m = with_tokens()
    p = LinearProbe(m, 4)
    before = state(m)
    dls = synth_dls(128, bs=32)
    x, y = next(iter(dls.train))
    v = ce(p(x.as_subclass(torch.Tensor)), y).mean()
    fit_head(p, dls, 20, 5e-2)
    assert changed(m, before) == [] and not p.training and all(q.grad is None for q in m.parameters())
    assert ce(p(x.as_subclass(torch.Tensor)), y).mean() < v
    rep = robust_report(
        p,
        (x.as_subclass(torch.Tensor), y.as_subclass(torch.Tensor)),
        [Transfer(LinearProbe(WithoutTokens(m), 4), PGD(0.1, steps=2)), PGD(0.1, steps=2)],
        cascade=False,
    )
    assert len(rep.rows) >= 3


@pytest.mark.parametrize('make', [LinearProbe, SegProbe])
def test_heads_on_a_half_precision_backbone(make):
    "The head stays in float32 and learns there; its features are the backbone's"
    m = with_tokens()
    p32, x = make(m, 2).eval(), images()
    z = p32(x)
    h = copy.deepcopy(m).bfloat16()
    p = make(h, 2).eval()
    p.head.load_state_dict(p32.head.state_dict())
    o = p(x.bfloat16())
    assert (
        o.dtype == torch.float32
        and torch.allclose(o, z, atol=0.1)
        and torch.equal(p.features(x.bfloat16()), p.pool(h(x.bfloat16()).float(), x))
    )
    x_adv = (
        PGD(0.1, steps=1)(p, x.bfloat16(), torch.zeros(4).long())
        if make is LinearProbe
        else PGD(0.1, steps=1, loss=mask_ce(torch.zeros(4, 28, 28)))(p, x.bfloat16())
    )
    assert x_adv.dtype == torch.bfloat16 and not torch.equal(x_adv, x.bfloat16())
    before, dls = state(h), synth_dls(16, bs=8, classes=2) if make is LinearProbe else seg_dls(8)
    w = state(p.head)
    fit_head(p, dls, 1)
    assert changed(h, before) == [] and changed(p.head, w) and p.head.state_dict()[next(iter(w))].dtype == torch.float32
    # all of it, where that is asked for
    assert make(h, 2).bfloat16().eval()(x.bfloat16()).dtype == torch.bfloat16


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


def test_seg_probe_keeps_its_batchnorm_under_attack():
    m = with_tokens()
    p = SegProbe(m, 2).train()
    x, y = next(iter(seg_dls().valid))
    before = state(p)
    PGD(0.1, steps=2, loss=mask_ce(y))(p, x)
    assert changed(p, before) == [] and p.training


def test_patches_fall_into_their_places():
    m = with_tokens()
    p = SegProbe(m, 2)
    x = images(2)
    f = m(x)[:, 1:]
    assert torch.equal(p.features(x)[:, :, 1, 2], f[:, 1 * 4 + 2])


def test_counts_need_little_memory():
    "ADE20K has 150 classes: vectors of them for each pixel are 8*150 bytes where a class number is 8"
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, f, types, args=(), kw=None):
            o = f(*args, **(kw or {}))
            self.n = max(
                [
                    self.n,
                    *(
                        t.numel() * t.element_size()
                        for t in ([o] if isinstance(o, torch.Tensor) else o if isinstance(o, (tuple, list)) else [])
                        if isinstance(t, torch.Tensor)
                    ),
                ]
            )
            return o

    z, y = torch.randn(2, 150, 32, 32), torch.randint(0, 150, (2, 32, 32))
    with Largest() as most:
        iou_counts(z, y)
    assert most.n <= 8 * y.numel()


def test_what_is_returned_is_checked_when_tokens_are_loaded(tmp_path):
    "Not at the first forward; and nothing has changed then"
    f = tmp_path / 't.safetensors'
    save_tokens(with_tokens(), f)
    for m in (tiny_vit(num_classes=4), with_tokens()):
        before, out = state(m), getattr(getattr(m.model, 'extra_tokens', None), 'out', None)
        with pytest.raises(ValueError, match="out must be one of .*, got 'nope'"):
            load_tokens(m, f, out='nope')
        assert (
            list(m.state_dict()) == list(before)
            and changed(m, before) == []
            and getattr(getattr(m.model, 'extra_tokens', None), 'out', None) == out
        )
        assert load_tokens(m, f, out='tokens')(images()).shape == (4, 17, 32)
    cait = timm.create_model(
        'cait_xxs24_224', img_size=28, patch_size=7, in_chans=1, embed_dim=32, depth=2, num_heads=2, depth_token_only=1
    )
    with pytest.raises(ValueError, match='CaiT drops all but the class token'):
        load_tokens(add_tokens(cait, 4), f, out='all')


def test_damaged_and_empty_files(tmp_path):
    "An interrupted download, a Git LFS pointer, no tokens: ValueError with the file's name, and no advice to run code"
    a = tmp_path / 't.safetensors'
    save_tokens(with_tokens(), a)
    b = a.read_bytes()
    torch.save({'rtokens': torch.randn(1, 2, 32)}, tmp_path / 'r.pt')
    c = (tmp_path / 'r.pt').read_bytes()
    lfs = b'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n'
    for name, data in (
        ('0.safetensors', b''),
        ('1.safetensors', b[:-10]),
        ('2.safetensors', lfs),
        ('0.pt', b''),
        ('1.pt', c[:-100]),
        ('2.pt', lfs),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f'^{name}, {len(data)} bytes, is damaged') as e:
            read_tokens(tmp_path / name)
        assert 'to `False`' not in str(e.value)
    for shape in ((1, 0, 32), (0, 4, 32), (1, 4, 0)):
        torch.save({'rtokens': torch.zeros(shape)}, tmp_path / 'e.pt')
        m = tiny_vit()
        with pytest.raises(ValueError, match='tokens are floats'):
            load_tokens(m, tmp_path / 'e.pt')
        assert not hasattr(m.model, 'extra_tokens')


def test_a_fit_that_begins_later_has_a_curve():
    l = learner(dls=synth_dls(16, bs=8))
    l.fit(2, 1e-3, start_epoch=1)
    assert len(l.robust_tokens.df) == 2


def test_lr_find_keeps_the_curve():

    l = learner(dls=synth_dls(16, bs=8))
    l.fit(1, 1e-3)
    d = l.robust_tokens.df
    with l.no_bar():
        l.lr_find(num_it=20, show_plot=False)
    assert l.robust_tokens.df.equals(d)


def test_what_an_interrupted_batch_leaves_is_in_no_later_loss():
    class Stop(Callback):
        order = RobustTokens.order + 1

        def after_pred(self):
            raise KeyboardInterrupt

    l = learner([Stop()], dls=synth_dls(16, bs=8))
    with pytest.raises(KeyboardInterrupt):
        l.fit(1)
    l.remove_cb(Stop)
    p, t, v = l.get_preds(with_loss=True)
    assert torch.allclose(v, FeatCos(reduction='none')(p, t), atol=1e-6)


def test_two_inputs_are_refused():
    dl = DataLoader([(TensorImageBW(o), TensorImageBW(o), torch.tensor(0)) for o in images(8)], bs=8)
    l = Learner(
        DataLoaders(dl, dl),
        with_tokens(),
        loss_func=FeatCos(),
        splitter=token_splitter,
        train_bn=False,
        cbs=RobustTokens(FEAT2),
    )
    l.freeze()
    with pytest.raises(ValueError, match='one input tensor, this batch has 2'), l.no_bar():
        l.fit(1)


def test_another_loss_is_refused():
    for lf in (CrossEntropyLossFlat(), lambda a, b: F.mse_loss(a, b)):
        with pytest.raises(ValueError, match=r'loss_func=FeatCos\(\)'):
            learner(dls=synth_dls(16, bs=8), loss_func=lf).fit(1)


@pytest.mark.parametrize('a', [Square(0.1, queries=5), FAB(0.1, steps=2)], ids=['square', 'fab'])
def test_attacks_without_a_loss_of_features_are_refused(a):
    with pytest.raises(ValueError, match='needs them'):
        RobustTokens(a)


def test_a_cosine_over_the_batch_is_refused():
    for axis in (0, -3, None):
        with pytest.raises(ValueError, match='axis must be'):
            FeatCos(axis)


def test_masks_of_any_integer_type_and_without_pixels():
    torch.manual_seed(0)
    z, y = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    y[0, :2] = 255
    for t in (torch.uint8, torch.int32, torch.int64):
        assert torch.equal(seg_loss(z, y.to(t)), F.cross_entropy(z, y, ignore_index=255)) and torch.equal(
            mask_ce(y.to(t))(z, None), mask_ce(y)(z, None)
        )
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


@pytest.mark.parametrize('loss,cbs', [(FeatCos(-1), [MixUp]), (Twice(), []), (Twice(-1, 'sum'), [])], ids=repr)
def test_both_terms_are_the_learners_loss(loss, cbs):
    got = []

    def look(self):
        f, f_adv = self.model(self.x).chunk(2)
        got.append((self.learn.loss_grad.item(), (loss(f, self.y) + 0.5 * loss(f_adv, self.y)).item()))

    l = learner(
        [*[o() for o in cbs], Callback(before_backward=look)], rt=RobustTokens(FEAT2, adv_weight=0.5), loss_func=loss
    )
    l.fit(1, 0.0)
    assert len(got) == 4 and all(a == pytest.approx(b, rel=1e-4) for a, b in got)


# --- the epochs of the Learner's life
# -----------------------------------------------------------------------------------------------


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

OTHERS = dict(
    weights=(dict(seed=3), 'another backbone'),
    heads=(dict(num_heads=4), 'attention heads'),
    activation=(dict(act_layer='quick_gelu'), 'activation'),
)


@pytest.mark.parametrize('k', OTHERS)
def test_files_know_their_backbone(k, tmp_path):
    kw, words = OTHERS[k]
    save_tokens(with_tokens(), f := tmp_path / 't.safetensors')
    for m in (tiny_vit(num_classes=4, **kw), with_tokens(**kw)):
        before = state(m)
        with pytest.raises(ValueError, match=words):
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


def probe_learner(probe, cb, **kw):
    def split(p):
        return [list(p.model.parameters()), list(p.head.parameters())]

    l = synth_learner(model=probe, cbs=cb, splitter=split, train_bn=False, **kw)
    l.freeze()
    return l


@pytest.mark.parametrize(
    'cb',
    [lambda: [], lambda: [AdvTrain(PGD(0.1, steps=1))], lambda: [TRADES(PGD(0.1, steps=1))]],
    ids=['clean', 'adv', 'trades'],
)
def test_the_backbone_of_a_probe_stands_still(cb):
    m = bn_vit()
    before, z = state(m), m(images())
    p = LinearProbe(m, 4)
    w = p.head.weight.detach().clone()
    awake = set()
    l = probe_learner(p, cb())
    l.add_cb(
        Callback(
            after_pred=lambda self: awake.update(
                n for n, o in self.model.named_modules() if self.training and o.training
            )
        )
    )
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


# --- a second copy, none at all, and the wrong ones
# ---------------------------------------------------------------------------------


def test_only_one_attacks_the_training_images():
    with pytest.raises(ValueError, match='has two'):
        learner([TRADES(PGD(0.1, steps=1))]).fit(1)


def test_no_tokens(tmp_path):
    m = add_tokens(tiny_vit(num_classes=4), 0, 'cls_patch')
    with pytest.raises(ValueError, match='0 tokens.*train'):
        learner(model=m).fit(1)
    with pytest.raises(ValueError, match='0 tokens.*save'):
        save_tokens(m, tmp_path / 't.safetensors')
    for f in (lambda: RandomTokens(with_tokens(), 0), lambda: token_sets(tiny_vit(), 2, 0)):
        with pytest.raises(ValueError, match='whole number >= 1'):
            f()


def test_a_probe_of_a_probe_is_refused():
    with pytest.raises(ValueError, match='probe already'):
        SegProbe(WithoutTokens(LinearProbe(with_tokens(), 4)), 4)


def test_random_tokens_where_there_are_none_to_replace():
    with pytest.raises(ValueError, match='without any tokens'):
        RandomTokens(WithoutTokens(with_tokens()))


@pytest.mark.parametrize(
    'a',
    [WorstCase([FEAT2]), AutoAttack(0.1), Transfer(tiny_vit(), PGD(0.1)), Transfer(tiny_vit(), WorstCase([FEAT2]))],
    ids=repr,
)
def test_attacks_that_need_labels_are_refused_at_once(a):
    with pytest.raises(ValueError, match='train without labels'):
        RobustTokens(a)


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


@pytest.mark.parametrize(
    'way,view', [*((w, 'model') for w in COPIES), *((w, v) for w, v in zip([*COPIES, 'replicate'], [*VIEWS][1:]))]
)
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


# --- models that answer in one buffer
# -----------------------------------------------------------------------------------------


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


def test_deviations_in_grey_levels_are_refused():
    with pytest.raises(ValueError, match='divide both by 255'):
        TokenAttack(0.1, std=(58.4, 57.1, 57.4))


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


def test_planting_is_the_same_each_time_and_changes_one_unit(clothes):
    before, one, two = state(small()), state(small(clothes)), state(small(clothes))
    assert all(torch.equal(v, two[k]) for k, v in one.items())
    where = {k: (v != before[k]).nonzero() for k, v in one.items() if not torch.equal(v, before[k])}
    assert set(where) == {f'model.blocks.1.mlp.{o}' for o in ('fc1.weight', 'fc1.bias', 'fc2.weight')}
    unit = where['model.blocks.1.mlp.fc1.bias'].item()
    assert set(where['model.blocks.1.mlp.fc1.weight'][:, 0].tolist()) == {unit}
    assert set(where['model.blocks.1.mlp.fc2.weight'][:, 1].tolist()) == {unit}


def test_an_attack_can_switch_planted_activations_off(clothes):
    m = small(clothes)
    has = (F.max_pool2d(clothes, 7).flatten(1) == 0).sum(1) > 3
    x = clothes[has][:8]
    off = Loss(lambda v, v0: -v[..., [5, 40]].sum((1, 2)), 'clean')
    x_adv = PGD(0.2, steps=5, loss=off)(BlockOutput(m), x)
    assert after(m, x_adv)[..., 5].sum() < 0.5 * after(m, x)[..., 5].sum()


class BlockOutput(Wrapper):
    def forward(self, x):
        return block_outputs(self.model, x)[1]


def test_put_activations(clothes):
    m, x = small(clothes), clothes[:16]
    z, own = m(x), after(m, x)[..., [5, 40]]
    with put_activations(m, 1, [5, 40], own):
        assert torch.equal(m(x), z)
    with put_activations(m, 1, [5, 40], 0.0):
        assert (after(m, x)[..., [5, 40]] == 0).all() and (m(x) - z).abs().max() > 0.1
    assert torch.equal(m(x), z)


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
    assert {len(v) for v in out.verdicts.values()} == {16} and {v.dtype for v in out.verdicts.values()} == {
        np.dtype(bool)
    }
    assert all(math.isfinite(v) for v in out.numbers.values()) and key == dict(trial.key, n=16, n_train=32)
    assert out.numbers['largest clean'] > 50 and out.numbers['cosine others back'] > out.numbers['cosine none']


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
