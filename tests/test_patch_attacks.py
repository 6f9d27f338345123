"""`attacks`, patches: Patch-Fool against a plain re-telling of the paper, attention fused or not, shapes, compile,
invariances, messages (R34, R35, R36, F07)."""

import copy
import pytest, timm, torch, torch.nn.functional as F
from torch import nn
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.vit import add_tokens
from robust_nbdev.test_utils import *


def vit(size=32, patch=8, depth=3, chans=3, name='vit_tiny_patch16_224', seed=0, norm=True, **kw):
    "Random weights, large enough that attention is not flat and a patch matters"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        m = timm.create_model(
            name,
            img_size=size,
            patch_size=patch,
            in_chans=chans,
            num_classes=4,
            embed_dim=24,
            depth=depth,
            num_heads=2,
            **kw,
        ).eval()
        with torch.no_grad():
            for n, p in m.named_parameters():
                if p.ndim > 1:
                    p.copy_(torch.randn_like(p) * (0.02 if 'pos' in n else 1.5 / p[0].numel() ** 0.5))
    return Normalized(m, mean=[0.5] * chans, std=[0.2, 0.25, 0.3][:chans]).eval() if norm else m


def images(b=4, c=3, h=32, w=None, seed=0, dtype=torch.float32):
    return torch.rand(b, c, h, w or h, generator=torch.Generator().manual_seed(seed)).to(dtype)


def own(m, x):
    with torch.no_grad():
        return m(x).argmax(1)


def fooled(m, x, y):
    return own(m, x) != y


def patches_changed(a, b, ph, pw=None):
    "-> [B,n] bool"
    pw = pw or ph
    d = (a != b).any(1)
    return F.max_pool2d(d.float()[:, None], (ph, pw), (ph, pw), ceil_mode=True).flatten(1) > 0


def set_fused(m, on):
    for o in m.modules():
        if hasattr(o, 'fused_attn'):
            o.fused_attn = on


def flags(m):
    return [o.fused_attn for o in m.modules() if hasattr(o, 'fused_attn')]


quick = PatchFool(steps=4)

# the method


def probs(net, xn):
    "Attention of each block, by a hook on the dropout that the plain path goes through"
    maps, hs = [], [b.attn.attn_drop.register_forward_hook(lambda m, i, o: maps.append(o)) for b in net.blocks]
    z = net(xn)
    for h in hs:
        h.remove()
    return maps, z


def retold(model, x, y, steps, code=False, weight=0.002, lr=0.22):
    "The paper, for one image, in normalised space, with torch's Adam and StepLR"
    net, mean, std = model.model, model.mean, model.std
    norm = lambda o: (o - mean) / std
    set_fused(net, False)
    L, p = len(net.blocks), net.patch_embed.patch_size[0]
    a = probs(net, norm(x))[0][min(4, L - 1)].mean(1).mean(1)[:, net.num_prefix_tokens :]
    k = a.argmax().item()
    cols = x.shape[-1] // p
    r, c = k // cols * p, k % cols * p
    mask = torch.zeros_like(x)
    mask[..., r : r + p, c : c + p] = 1
    d = nn.Parameter(norm(uniform(image_seed(x), x)))
    opt = torch.optim.Adam([d], lr=lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, 10, 0.95)
    lo, hi = norm(torch.zeros_like(x)), norm(torch.ones_like(x))
    for i in range(steps):
        maps, z = probs(net, norm(x) * (1 - mask) + d * mask)
        if z.argmax(1) != y:
            break
        g = torch.autograd.grad(F.cross_entropy(z, y), d, retain_graph=True)[0]
        total = g.clone()
        for l in range(1, L // 2) if L >= 4 else [0]:
            ga = torch.autograd.grad(
                maps[l].mean(1)[..., net.num_prefix_tokens + k].log().mean(), d, retain_graph=True
            )[0]
            dot = (ga * g).sum()
            if dot < 0:
                ga = ga - dot / (g.norm() if code else g.norm() ** 2) * g
            total += weight * ga
        d.grad = -total
        opt.step()
        sched.step()
        d.data = torch.max(torch.min(d.data, hi), lo)
    return x * (1 - mask) + (d.detach() * std + mean) * mask, k


@pytest.mark.parametrize('depth,how', [(2, 'paper-code'), (6, 'projection')])
def test_agrees_with_the_paper_retold(depth, how):
    m, x = vit(depth=depth).double(), images(3, dtype=torch.float64)
    y = own(m, x)
    a = PatchFool(steps=12, weight=0.5, lr=0.05, pcgrad=how, block=4)  # a weight that shows
    out = a(m, x, y)
    for i in range(3):
        ref, k = retold(copy.deepcopy(m), x[i : i + 1], y[i : i + 1], 12, how == 'paper-code', 0.5, 0.05)
        assert patches_changed(out[i : i + 1], x[i : i + 1], 8)[0].nonzero().tolist() == [[k]]
        assert (out[i] - ref[0]).abs().max() < 1e-9, i


@pytest.mark.parametrize('k', [2, 16])
def test_only_the_chosen_patches_change(k):
    m, x = vit(), images()
    y = own(m, x)
    for a in (quick.but(patches=k), quick.but(patches=k, select='random')):
        out = a(m, x, y)
        assert patches_changed(out, x, 8).sum(1).tolist() == [k] * len(x) and 0 <= out.min() and out.max() <= 1


def test_first_fooling_point_is_returned():
    m, x = vit(), images(8)
    y = own(m, x)
    short, long = PatchFool(steps=10)(m, x, y), PatchFool(steps=20)(m, x, y)
    won = fooled(m, short, y)
    assert won.any() and torch.equal(short[won], long[won]) and fooled(m, long, y).sum() >= won.sum()


@pytest.mark.parametrize(
    'a,f,b',
    [
        (PatchFool(steps=5), 6, 5 * 4),
        (PatchFool(steps=5, weight=0.0), 6, 5),
        (RandomOcclusion(draws=3), 3, 0),
    ],
    ids=repr,
)
def test_passes_are_counted(a, f, b, monkeypatch):
    """Depth 8: per step one forward, one backward for the loss and one for each of blocks 1 to 3; one more forward to
    choose"""
    m, x, n = vit(depth=8), images(2), dict(f=0, b=0)
    # nothing fools this model
    with torch.no_grad():
        m.model.head.weight.zero_()
        m.model.head.bias.copy_(torch.arange(4.0))
    real = torch.autograd.grad

    def grad(*args, **kw):
        n['b'] += 1
        return real(*args, **kw)

    monkeypatch.setattr(torch.autograd, 'grad', grad)
    m.register_forward_hook(lambda *o: n.update(f=n['f'] + 1))
    # `own` is a forward too
    a(m, x, own(m, x))
    n['f'] -= 1
    assert (n['f'], n['b']) == (f, b)


def test_stops_when_all_are_fooled():
    m, x, n = vit(), images(3), []
    m.register_forward_hook(lambda *o: n.append(1))
    # wrong from the start
    PatchFool(steps=50)(m, x, (own(m, x) + 1) % 4)
    assert len(n) <= 10


# strength


def test_targeted():
    m, x = vit(), images(12)
    t = (own(m, x) + 1) % 4
    a = PatchFool(steps=20)
    out = a(m, x, target=t, targeted=True)
    assert (own(m, out) == t).sum() > (own(m, RandomOcclusion(share=1 / 16, fill='noise')(m, x)) == t).sum()


# nothing is left behind; batch mates do not matter


@pytest.mark.parametrize(
    'a',
    [
        quick.but(patches=2),
        RandomOcclusion(share=0.2, fill='noise', draws=3),
    ],
    ids=repr,
)
def test_invariances(a):
    m, x = vit().double(), images(6, dtype=torch.float64)
    y = own(m, x)
    m.train()
    before = state_of(m)
    with torch.no_grad():
        out = a(m, x, y)
    assert state_of(m) == before and all(p.grad is None for p in m.parameters()) and not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(a(m, x, y), out)
    assert torch.equal(a(m, x, y), out) and not torch.equal(a(m, x, y, seed=1), out)
    alone = torch.cat([a(m, x[i : i + 1], y[i : i + 1]) for i in range(6)])
    back = a(m, x.flip(0), y.flip(0)).flip(0)
    assert (alone - out).abs().max() < 1e-4 and (back - out).abs().max() < 1e-4
    assert (a(m, x, y, seed=image_seed(x, 0)) - out).abs().max() < 1e-4


# R34, F07: attention fused or not, families


def test_fused_and_plain_attention_agree():
    a, m, x = PatchFool(steps=4, weight=0.5, patches=2), vit(depth=4).double(), images(dtype=torch.float64)
    y = own(m, x)
    outs = []
    for on in (True, False):
        set_fused(m, on)
        before, z, f = state_of(m), m(x), flags(m)
        outs.append(a(m, x, y))
        assert flags(m) == f == [on] * 4 and state_of(m) == before and torch.equal(m(x), z)
    assert (outs[0] - outs[1]).abs().max() < 1e-6 and (outs[0] != x).any()


MODELS = dict(
    no_class_token=lambda: vit(class_token=False, global_pool='avg'),
    registers=lambda: vit(reg_tokens=4, no_embed_class=True, qk_norm=True, norm=False),
    dist=lambda: vit(name='deit_tiny_distilled_patch16_224'),
    extra=lambda: add_tokens(vit(), 7),
    cait=lambda: vit(name='cait_xxs24_224'),
    one_block=lambda: vit(depth=1),
    wrapped=lambda: Logits(Tup(nn.DataParallel(vit()) if not torch.cuda.is_available() else vit()), 0),
)


class Tup(Wrapper):
    def forward(self, x):
        return (self.model(x),)


@pytest.mark.parametrize('name', list(MODELS))
def test_families(name):
    m, x = MODELS[name](), images()
    y = own(m, x)
    before, z = state_of(m), m(x)
    out = quick(m, x, y)
    k = patches_changed(out, x, 8)
    want = patch_attention(m, x)[-1].exp().mean(1).argmax(1)
    assert (
        k.sum(1).tolist() == [1] * 4
        and torch.equal(k.int().argmax(1), want)
        and state_of(m) == before
        and torch.equal(m(x), z)
    )


def test_models_without_patch_attention_are_named():
    kw = dict(img_size=32, embed_dim=12, depths=(1, 1), num_heads=(1, 1), window_size=4, num_classes=4)
    m, x = timm.create_model('swin_tiny_patch4_window7_224', **kw).eval(), images(2)
    before, y = state_of(m), own(m, x)
    with pytest.raises(TypeError, match='SwinTransformer has no attention between all patches.*RandomOcclusion'):
        quick(m, x, y)
    assert state_of(m) == before


# R35: sizes


DYNAMIC = dict(dynamic_img_size=True)


@pytest.mark.parametrize(
    'h,w,n,kw',
    [
        (30, 20, 12, dict(size=(30, 20), patch=(5, 10))),
        (16, 64, 16, dict(size=32, patch=8, **DYNAMIC)),
        (33, 38, 25, dict(size=32, patch=8, **DYNAMIC, dynamic_img_pad=True)),
    ],
)
def test_images_of_any_size(h, w, n, kw):
    m, x = vit(**kw), images(3, h=h, w=w)
    ph, pw = kw['patch'] if isinstance(kw['patch'], tuple) else (kw['patch'],) * 2
    k = patches_changed(quick(m, x, own(m, x)), x, ph, pw)
    assert k.shape[1] == n and k.sum(1).tolist() == [1] * 3
    assert torch.equal(k.int().argmax(1), patch_attention(m, x)[2].exp().mean(1).argmax(1))


def test_occlusion_sizes():
    m, x = vit(dynamic_img_size=True), images(3, h=24, w=40)
    assert patches_changed(RandomOcclusion(share=0.2)(m, x), x, 8).sum(1).tolist() == [3] * 3  # the model's patch
    assert patches_changed(RandomOcclusion(share=0.5, patch=(12, 20))(m, x), x, 12, 20).sum(1).tolist() == [2] * 3
    assert torch.equal(RandomOcclusion(share=1.0)(m, x), torch.zeros_like(x)) and torch.equal(
        RandomOcclusion(share=0.0)(m, x), x
    )
    assert torch.allclose(RandomOcclusion(share=1.0, fill='mean')(m, x), x.mean((2, 3), keepdim=True).expand_as(x))
    # 2 x 3 cells, the last ones cut off
    odd = RandomOcclusion(share=0.3, patch=16)(nn.Flatten(), x)
    assert patches_changed(odd, x, 16).sum(1).tolist() == [2] * 3


def test_occlusion_draws_every_patch_equally_often():
    x = images(1, c=1, h=8).expand(1, 1, 8, 8)
    n = sum(
        patches_changed(RandomOcclusion(share=0.25, patch=4)(nn.Flatten(), x, seed=s), x, 4)[0].int()
        for s in range(100)
    )
    assert n.sum() == 100 and (n - 25).abs().max() < 20


# R36: compiled models


@pytest.mark.parametrize('inner', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_after_a_first_run(inner):
    torch._dynamo.reset()
    m, x, runs = vit(depth=2), images(), []
    y = own(m, x)
    attacks = quick, RandomOcclusion(draws=2), PGD(0.05, steps=2)
    want = [a(m, x, y) for a in attacks]

    def backend(gm, ex):
        runs.append(1)
        return gm.forward

    if inner:
        m.model.compile(backend=backend)
        c = m
    else:
        c = torch.compile(m, backend=backend)
    with torch.no_grad():
        z = c(x)
    assert runs
    for a, o in zip((*attacks, quick), (*want, want[0])):
        assert (a(c, x, y) - o).abs().max() < 1e-4
    with torch.no_grad():
        assert torch.allclose(c(x), z, atol=1e-6)
    torch._dynamo.reset()


# values and messages


@pytest.mark.parametrize(
    'cls,kw,say',
    [
        (PatchFool, dict(steps=2.5), 'whole number'),
        (PatchFool, dict(lr=float('nan')), 'lr must be a number >= 0'),
        (PatchFool, dict(select='best'), "'attention', 'random'"),
        (RandomOcclusion, dict(share=1.5), 'from 0 to 1'),
        (RandomOcclusion, dict(patch=0), 'side in pixels'),
        (RandomOcclusion, dict(draws=0), '>= 1'),
    ],
)
def test_bad_fields(cls, kw, say):
    with pytest.raises(ValueError, match=say):
        cls(**kw)


def test_too_many_patches():
    with pytest.raises(ValueError, match='patches=17, but the model cuts an image into 16'):
        PatchFool(patches=17)(vit(), images(), torch.zeros(4).long())
