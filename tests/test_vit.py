"""`vit`: every family, against the plain model; nothing left behind; fused on and off; gradients of the scale;
splitters and decay (R25, R34-R37)."""

import copy, io, pickle
from contextlib import nullcontext
from functools import partial
import pytest, timm, torch
from torch import nn
import torch.nn.functional as F
from fastai.basics import (
    Adam,
    CrossEntropyLossFlat,
    DataLoader,
    DataLoaders,
    Learner,
    OptimWrapper,
    SGD,
    noop,
    ranger,
)
from fastai.callback.schedule import *
from timm.optim import param_groups_weight_decay
from robust_nbdev.test_utils import tiny_vit
from robust_nbdev.core import Normalized, attack_mode, unwrap
from robust_nbdev.vit import *

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2)
SPEC = dict(
    vit=('vit_tiny_patch16_224', {}),
    deit_distilled=('deit_tiny_distilled_patch16_224', {}),
    deit3=('deit3_small_patch16_224', dict(init_values=0.5)),
    dinov2_reg4=('vit_small_patch14_reg4_dinov2', dict(init_values=0.5)),
    gap=('vit_base_patch16_rpn_224', dict(init_values=0.5)),
    qknorm=('vit_tiny_patch16_224', dict(qk_norm=True)),
    clip=('vit_base_patch16_clip_224', {}),
    map=('vit_base_patch16_siglip_224', {}),
    xcit_nano=('xcit_nano_12_p8_224', dict(eta=0.5)),
    cait_xxs=('cait_xxs24_224', dict(init_values=0.5)),
    swin_tiny=(
        'swin_tiny_patch4_window7_224',
        dict(img_size=32, patch_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4),
    ),
)
LEVIT = ('levit_128s', dict(img_size=32, embed_dim=(32, 48), depth=(1, 1), num_heads=(2, 3), key_dim=8, stem_type='s8'))
VITS = [k for k in SPEC if not k.startswith(('xcit', 'cait', 'swin'))]
TOKENS = VITS + ['cait_xxs']


def build(k, **kw):
    "A tiny model with weights large enough for attention that is far from uniform"
    name, special = LEVIT if k == 'levit' else SPEC[k]
    size = {} if k.startswith(('swin', 'levit')) else SMALL
    torch.manual_seed(0)
    m = timm.create_model(name, **{'num_classes': 3, **size, **special, **kw}).eval()
    for n, p in m.named_parameters():
        if ('qkv' in n or '.q.' in n or '.k.' in n) and p.ndim == 2:
            p.data.mul_(12)
        if n.startswith('head') and p.ndim == 2:
            p.data.mul_(10)
        # timm begins with branches that add nothing
        if k == 'levit' and n.endswith('bn.weight'):
            p.data.fill_(2.0)
        if 'token' in n or 'bias_table' in n:
            p.data.normal_(std=0.5)
    return m


def images(n=2, h=32, w=32):
    return torch.rand(n, 3, h, w, generator=torch.Generator().manual_seed(1))


def snapshot(m):
    "All that could be left on a model"
    return dict(
        keys=list(m.state_dict()),
        dicts=[(n, sorted(o.__dict__)) for n, o in m.named_modules()],
        hooks=[
            (n, len(o._forward_hooks), len(o._forward_pre_hooks), len(o._backward_hooks)) for n, o in m.named_modules()
        ],
        modes=[o.training for o in m.modules()],
        grads=[p.requires_grad for p in m.parameters()],
        ids=[id(p) for p in m.parameters()],
        fused=[(n, o.fused_attn) for n, o in m.named_modules() if hasattr(o, 'fused_attn')],
        grad=[p.grad is None for p in m.parameters()],
        values=[p.sum().item() for p in m.parameters()],
    )


def fuse(m, on):
    for o in m.modules():
        if hasattr(o, 'fused_attn'):
            o.fused_attn = on
    return m


class Stop(BaseException):
    "As an interrupt: no Exception"


class Bomb(nn.Module):
    def __init__(self, err):
        super().__init__()
        self.err = err

    def forward(self, *a, **k):
        raise self.err


def bombed(m, err):
    "The model, raising in the middle of its second block's attention"
    drop = [o for o in vit_blocks(m)[1].modules() if hasattr(o, 'proj_drop')][0]
    old, drop.proj_drop = drop.proj_drop, Bomb(err)

    def undo():
        drop.proj_drop = old

    return undo


FEW = ('vit', 'dinov2_reg4', 'xcit_nano', 'cait_xxs', 'swin_tiny')
fam, few = [pytest.mark.parametrize('k', o) for o in (SPEC, FEW)]


# ---- blocks, outputs
@fam
def test_block_outputs(k):
    m = build(k)
    x = images()
    z0 = m(x)
    before = snapshot(m)
    outs, z = block_outputs(m, x, logits=True)
    assert torch.equal(z, z0) and len(outs) == len(vit_blocks(m))
    assert all(o.ndim == 3 and o.requires_grad for o in outs)
    assert snapshot(m) == before
    n = Normalized(m)
    for a, b in zip(block_outputs(n, x), block_outputs(m, (x - n.mean) / n.std)):
        assert torch.equal(a, b)
    if k in VITS:
        ref = m.forward_intermediates(x, intermediates_only=True, output_fmt='NLC')
        for a, b in zip(ref, block_outputs(m, x, prefix=False)):
            assert torch.equal(a, b)
    for o in block_outputs(m, x, prefix=False):
        assert o.shape[1] in (16, 64)


@pytest.mark.parametrize('k,err', [*((k, ValueError('x')) for k in FEW), ('vit', Stop())])
def test_nothing_left_after_exception(k, err):
    m = build(k)
    x = images()
    before, z0 = snapshot(m), m(x)
    for call in (
        lambda: block_outputs(m, x),
        lambda: attn_maps(m, x),
        lambda: scaled(m, x, 0.5),
        lambda: scaled(m, x, torch.rand(len(vit_blocks(m)))),
    ):
        undo = bombed(m, err)
        with pytest.raises(type(err)):
            call()
        undo()
        assert snapshot(m) == before
    assert torch.equal(m(x), z0)
    assert torch.overrides._get_current_function_mode() is None


def scaled(m, x, s):
    with attn_scale(m, s):
        return m(x)


@pytest.mark.parametrize(
    'name',
    [
        'eva02_tiny_patch14_224',
        'swinv2_tiny_window8_256',
    ],
)
def test_unsupported_named(name):
    with torch.device('meta'):
        m = timm.create_model(name)
    for f in (
        vit_blocks,
        vit_splitter,
        add_tokens,
        lambda m: attn_maps(m, images()),
        lambda m: block_outputs(m, images()),
        lambda m: attn_scale(m, 1.0).__enter__(),
    ):
        with pytest.raises(TypeError, match=type(m).__name__):
            f(m)


def test_differential_attention_refused():
    m = timm.create_model('vit_dwee_patch16_reg1_gap_256', depth=1, embed_dim=32, num_heads=2, img_size=32)
    with pytest.raises(TypeError, match='differential'):
        attn_maps(m, images())
    with pytest.raises(TypeError, match='differential'):
        attn_scale(m, 0.5).__enter__()


@pytest.mark.parametrize('name,heads', [('vit_small_patch16_18x2_224', 4), ('vit_base_patch16_224', 2)])
def test_other_blocks(name, heads):
    "Parallel attention (more heads), and attention and MLP in one block"
    from timm.models.vision_transformer import ParallelScalingBlock

    kw = {} if heads == 4 else dict(block_fn=ParallelScalingBlock)
    torch.manual_seed(0)
    m = timm.create_model(name, **{**SMALL, **kw}, num_classes=3).eval()
    x = images()
    z = m(x)
    before = snapshot(m)
    maps = attn_maps(m, x)
    assert maps[0].shape == (2, heads, 17, 17)
    with attn_scale(m, torch.ones(3, 2)):
        assert torch.equal(m(x), z)
    pre = attn_maps(m, x, pre_softmax=True)[0]
    s = torch.ones(3, 2)
    s[0, 1] = 0.25
    for on in (True, False):
        with attn_scale(fuse(m, on), s):
            p = attn_maps(m, x, pre_softmax=True)[0]
        assert torch.allclose(p[:, 0], pre[:, 0], atol=1e-6) and torch.allclose(p[:, 1], pre[:, 1] * 0.25, atol=1e-6)
    assert snapshot(fuse(m, True)) == before


# ---- attention maps (R34)
def test_attn_maps_are_the_ones_used():
    "Unfused ViT: values times maps, through the projection, is the attention's output"
    m = build('vit')
    x = images()
    seen = {}
    a = m.blocks[0].attn
    h = a.register_forward_hook(lambda mod, i, o: seen.update(i=i[0], o=o))
    maps = attn_maps(m, x)
    h.remove()
    v = a.qkv(seen['i']).reshape(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)[2]
    assert torch.allclose(a.proj((maps[0] @ v).transpose(1, 2).reshape(2, 17, 32)), seen['o'], atol=1e-5)


def test_swin_windows():
    m = build('swin_tiny')
    maps = attn_maps(m, images())
    assert [tuple(o.shape) for o in maps] == [(2, 4, 2, 16, 16)] * 2 + [(2, 1, 4, 16, 16)] * 2
    one = attn_maps(m, images()[1:])
    for a, b in zip(maps, one):
        assert torch.allclose(a[1:], b, atol=1e-5)  # windows belong to their image


# ---- attention scale
def heads(m):
    return [
        [o for o in b.modules() if hasattr(o, 'attn_drop') or hasattr(o, 'attention_biases')][0] for b in vit_blocks(m)
    ]


@pytest.mark.parametrize('k', [*FEW, 'qknorm'])
def test_scale_fused_equals_unfused_and_matters(k):
    m = build(k)
    x = images()
    z0 = m(x)
    s = torch.linspace(0.2, 2, len(vit_blocks(m)))
    a, b = [scaled(fuse(m, on), x, s) for on in (True, False)]
    assert torch.allclose(a, b, atol=1e-5) and (a - z0).abs().max() > 1e-4
    with attn_scale(m, s):
        with attn_scale(m, 1 / s):
            assert torch.allclose(m(x), z0, atol=1e-4)  # nested scales multiply
        assert torch.allclose(m(x), b, atol=1e-6)


@pytest.mark.parametrize('k', ['xcit_nano', 'cait_xxs', 'swin_tiny'])
def test_scale_gradient(k):
    m = build(k).double()
    x = images().double()
    hs = [a.num_heads for a in heads(m)]
    y = torch.tensor([0, 2])
    loss = lambda s: F.cross_entropy(scaled(m, x, s), y)
    n = len(hs)
    s = (torch.rand(n, dtype=torch.float64) + 0.5).requires_grad_()
    (g,) = torch.autograd.grad(loss(s), s)
    fd = torch.stack(
        [(loss(s.detach() + e) - loss(s.detach() - e)) / 2e-6 for e in torch.eye(n).double() * 1e-6]
    ).detach()
    assert torch.allclose(g, fd, atol=1e-7, rtol=1e-4) and (g != 0).all()
    per = [torch.ones(h, dtype=torch.float64, requires_grad=True) for h in hs]
    assert all((o != 0).any() for o in torch.autograd.grad(loss(per), per))


@pytest.mark.parametrize(
    'k,fused', [*((k, True) for k in ('vit', 'xcit_nano', 'cait_xxs', 'swin_tiny', 'levit')), ('swin_tiny', False)]
)
def test_scale_per_image(k, fused):
    "Each image of a batch as if it were alone with its own scales, per block and per head; the gradient too"
    m = fuse(build(k).double(), fused)
    x = images(3).double()
    n = len(vit_blocks(m))
    s = torch.rand(n, 3, dtype=torch.float64) + 0.2
    s.requires_grad_()
    with attack_mode(m):
        z = scaled(m, x, s[..., None])
        (g,) = torch.autograd.grad(z.square().sum(), s)
        for i in range(3):
            one = scaled(m, x[i : i + 1], s[:, i])
            (gi,) = torch.autograd.grad(one.square().sum(), s)
            assert (
                torch.allclose(one[0], z[i], atol=1e-10)
                and torch.allclose(gi[:, i], g[:, i], atol=1e-8)
                and (gi[:, i] != 0).all()
            )
    hs = [
        1 + torch.arange(a.num_heads, dtype=torch.float64).expand(3, -1) * torch.tensor([[0.1], [0.2], [0.3]])
        for a in heads(m)
    ]
    with torch.no_grad():
        z = scaled(m, x, hs)
        for i in range(3):
            assert torch.allclose(scaled(m, x[i : i + 1], [h[i] for h in hs])[0], z[i], atol=1e-10)
        with pytest.raises(ValueError, match='3 images met a batch of 2'):
            scaled(m, x[:2], hs)
    assert torch.equal(m(x), m(x)) and all(not o._forward_hooks and not o._forward_pre_hooks for o in m.modules())


def test_levit():
    "Stages with their downsampling: outputs, maps, a scale of 1, the product; conv variants refused"
    m = build('levit').double()
    x = images().double()
    with attack_mode(m):
        outs, z = block_outputs(m, x, logits=True)
        pre = attn_maps(m, x, pre_softmax=True)
        assert (
            [type(b).__name__ for b in vit_blocks(m)] == ['LevitBlock', 'LevitDownsample', 'LevitBlock']
            and [tuple(o.shape) for o in outs] == [(2, 16, 32), (2, 4, 48), (2, 4, 48)]
            and [tuple(o.shape) for o in pre] == [(2, 2, 16, 16), (2, 4, 4, 16), (2, 3, 4, 4)]
        )
        assert torch.equal(z, m(x)) and torch.equal(scaled(m, x, 1.0), z) and patch_grid(m, x) == (4, 4)
        for i, a in enumerate(heads(m)):
            s = torch.ones(3).double()
            s[i] = 0.3
            bias = a.get_attention_biases(x.device)
            with attn_scale(m, s):
                assert torch.allclose(attn_maps(m, x, pre_softmax=True)[i] - bias, (pre[i] - bias) * 0.3, atol=1e-8)
    with pytest.raises(TypeError, match='levit_conv'):
        vit_blocks(timm.create_model('levit_conv_128s', img_size=64))


def test_scale_refused():
    m = build('vit')
    before = snapshot(m)
    with pytest.raises(ValueError, match='shape'):
        with attn_scale(m, torch.ones(3, 2, 5)):
            pass
    assert snapshot(m) == before


@pytest.mark.parametrize('k', ['cait_xxs', 'swin_tiny'])
def test_checkpointing(k):
    "Outputs and maps have the same gradients with it; a scale, which the recomputation might miss, is refused"
    m = build(k)
    x = images().requires_grad_()

    def grads():
        outs, maps = block_outputs(m, x), attn_maps(m, x)
        return [
            torch.autograd.grad(
                sum(o.square().mean() for o in t), [x, *vit_blocks(m)[0].parameters()], allow_unused=True
            )
            for t in (outs, maps)
        ]

    a = grads()
    m.set_grad_checkpointing(True)
    b = grads()
    for s, t in zip(a, b):
        for o, p in zip(s, t):
            assert (o is None and p is None) or torch.allclose(o, p, atol=1e-5)
    with pytest.raises(ValueError, match='checkpointing'):
        with attn_scale(m, 0.5):
            pass


# ---- extra tokens
@pytest.mark.parametrize('k', TOKENS)
def test_tokens(k):
    m = build(k)
    x = images()
    z0, f0, before = m(x), m.forward_features(x), snapshot(m)
    outs0 = block_outputs(m, x)
    assert add_tokens(m, n=5) is m
    with torch.no_grad():
        m.extra_tokens.weight.normal_()
    z = m(x)
    assert z.shape == z0.shape and (z - z0).abs().max() > 1e-4
    assert torch.equal(m(x), z) and m.forward_features(x).shape == f0.shape
    assert torch.equal(m.forward_head(m.forward_features(x)), z)
    outs, z2 = block_outputs(m, x, logits=True)
    assert torch.equal(z2, z) and [o.shape for o in outs] == [o.shape for o in outs0]
    final, mid = m.forward_intermediates(x, norm=True)
    assert torch.equal(final, m.forward_features(x)) and all(o.shape == (2, 32, 4, 4) for o in mid)
    with no_tokens(m):
        assert torch.equal(m(x), z0) and torch.equal(m.forward_features(x), f0)
        assert all(torch.equal(a, b) for a, b in zip(block_outputs(m, x), outs0))
    with pytest.raises(Stop):
        with no_tokens(m):
            raise Stop
    assert torch.equal(m(x), z)
    assert remove_tokens(m) is m and snapshot(m) == before and torch.equal(m(x), z0)


@pytest.mark.parametrize('k', ['dinov2_reg4', 'clip', 'map'])
def test_tokens_by_hand(k):
    "Append after norm_pre, run the blocks, cut, normalise: what the paper does"
    m = build(k)
    x = images()
    add_tokens(m, n=7, std=0.5)
    t = m.extra_tokens.weight
    with no_tokens(m):
        h = m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(x))))
        h = torch.cat([h, t.expand(2, -1, -1)], 1)
        for b in m.blocks:
            h = b(h)
        ref = m.forward_head(m.norm(h[:, :-7]))
        full = m.norm(h)
    assert torch.allclose(m(x), ref, atol=1e-6)
    m.extra_tokens.out = 'all'
    assert torch.allclose(m(x), full, atol=1e-5)
    assert torch.allclose(m.forward_features(x), full[:, :-7], atol=1e-5)  # only the model's own output has them
    assert all(o.shape == (2, 32, 4, 4) for o in m.forward_intermediates(x, norm=True, intermediates_only=True))


@pytest.mark.parametrize(
    'k,out', [('gap', 'cls_patch'), ('cait_xxs', 'cls_patch'), ('dinov2_reg4', 'cls_patch'), ('vit', 'tokens')]
)
def test_tokens_out(k, out):
    m = build(k)
    x = images()
    f0 = m.forward_features(x)
    r = getattr(m, 'num_reg_tokens', 0)
    p = m.num_prefix_tokens
    want = torch.cat([f0[:, : p - r], f0[:, p:]], 1) if out == 'cls_patch' else f0
    add_tokens(Normalized(m, mean=[0.0] * 3, std=[1.0] * 3), n=4, out=out)
    assert m(x).shape == want.shape
    with no_tokens(m):
        assert torch.equal(m(x), want)
    m.extra_tokens.out = 'nonsense'
    with pytest.raises(ValueError, match='nonsense'):
        m(x)


@pytest.mark.parametrize('k', ['vit', 'cait_xxs'])
def test_tokens_gradients(k):
    "Gradients reach tokens and image; checkpointed and plain training agree"
    m = add_tokens(build(k), n=3, std=0.5)
    x = images().requires_grad_()
    g = torch.autograd.grad(m(x).square().sum(), [m.extra_tokens.weight, x, *m.blocks.parameters()])
    assert all(o.abs().sum() > 0 for o in g[:2])
    m.set_grad_checkpointing(True)
    h = torch.autograd.grad(m(x).square().sum(), [m.extra_tokens.weight, x, *m.blocks.parameters()])
    for a, b in zip(g, h):
        assert torch.allclose(a, b, atol=1e-5)


def saved(m):
    b = io.BytesIO()
    torch.save(m, b)
    b.seek(0)
    return b


def test_tokens_refused_arguments():
    m = build('vit')
    for bad in (dict(n=-1), dict(n=1.5), dict(out='feature')):
        with pytest.raises(ValueError):
            add_tokens(m, **bad)
    with pytest.raises(ValueError, match='nothing to remove'):
        remove_tokens(m)
    with pytest.raises(ValueError, match='CaiT'):
        add_tokens(build('cait_xxs'), out='all')
    with no_tokens(m):
        m(images())  # a plain model passes through


# ---- rectangles, sizes (R35)
@pytest.mark.parametrize('k,hw', [('deit_distilled', (24, 56)), ('dinov2_reg4', (48, 32))])
def test_rectangles_dynamic(k, hw):
    m = build(k, dynamic_img_size=True)
    x = images(2, *hw)
    z0 = m(x)
    r, c = hw[0] // 8, hw[1] // 8
    assert patch_grid(m, x) == (r, c)
    assert all(o.shape == (2, r * c, 32) for o in block_outputs(m, x, prefix=False))
    N = r * c + m.num_prefix_tokens
    assert attn_maps(m, x)[0].shape == (2, 2, N, N)
    add_tokens(m, n=3)
    assert attn_maps(m, x)[0].shape == (2, 2, N + 3, N + 3) and m(x).shape == z0.shape
    assert all(o.shape == (2, 32, r, c) for o in m.forward_intermediates(x, intermediates_only=True))
    with no_tokens(m):
        assert torch.equal(m(x), z0)


def test_rectangles_fixed_and_other_families():
    x = images(2, 48, 32)
    m = build('vit', img_size=(48, 32))
    add_tokens(m, n=3)
    assert m(x).shape == (2, 3) and patch_grid(m, x) == (6, 4)
    m = build('xcit_nano')
    x = images(2, 40, 56)
    assert (
        block_outputs(m, x, prefix=False)[0].shape == (2, 35, 32)
        and patch_grid(m, x) == (5, 7)
        and attn_maps(m, x)[-1].shape == (2, 2, 1, 36)
    )
    m = build('swin_tiny', img_size=(48, 32))
    x = images(2, 48, 32)
    assert (
        block_outputs(m, x)[0].shape == (2, 96, 16)
        and patch_grid(m, x) == (12, 8)
        and attn_maps(m, x)[0].shape == (2, 6, 2, 16, 16)
    )
    m = build('vit', dynamic_img_size=True, dynamic_img_pad=True)
    x = images(2, 33, 33)
    add_tokens(m, n=3)
    assert patch_grid(m, x) == (5, 5) and block_outputs(m, x, prefix=False)[0].shape == (2, 25, 32)


# ---- adapters
class Bottleneck(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, d // 4), nn.Linear(d // 4, d)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, h):
        assert h.ndim == 3
        self.n = h.shape[1]
        return h + self.b(F.relu(self.a(h)))


@few
def test_adapters(k):
    m = build(k)
    x = images()
    z0, before = m(x), snapshot(m)
    ads = add_after_mlp(m, Bottleneck)
    assert torch.equal(m(x), z0) and len(ads) == len(vit_blocks(m)) and all(not o.training for o in ads.modules())
    for i, a in enumerate(ads):
        a.b.bias.data.normal_()
        assert (m(x) - z0).abs().max() > 1e-5, i
        a.b.bias.data.zero_()
    t = copy.deepcopy(m)
    t.adapters[0].b.bias.data.normal_()
    assert torch.equal(m(x), z0) and not torch.equal(t(x), z0)
    t = pickle.loads(pickle.dumps(t))
    remove_adapters(t)
    assert torch.equal(t(x), z0)
    outs = block_outputs(m, x)
    ads[-1].b.bias.data.fill_(1.0)
    assert torch.allclose(block_outputs(m, x)[-1], outs[-1] + 1, atol=1e-5)  # observers see behind the adapter
    with pytest.raises(ValueError, match='already'):
        add_after_mlp(m, Bottleneck)
    remove_adapters(m)
    assert snapshot(m) == before and torch.equal(m(x), z0)
    with pytest.raises(ValueError, match='nothing to remove'):
        remove_adapters(m)


@pytest.mark.parametrize('k,first', [('vit', 'tokens'), ('cait_xxs', 'adapters')])
def test_adapters_and_tokens(k, first):
    m = build(k)
    x = images()
    before = snapshot(m)
    for o in ('tokens', 'adapters') if first == 'tokens' else ('adapters', 'tokens'):
        add_tokens(m, n=3, std=0.5) if o == 'tokens' else add_after_mlp(m, Bottleneck)
    z = m(x)
    assert m.adapters[0].n == (20 if k == 'vit' else 19)
    m.adapters[0].b.bias.data.normal_()
    assert not torch.equal(m(x), z)
    remove_tokens(m)
    remove_adapters(m)
    assert snapshot(m) == before


# ---- compiled (R36)
def test_compiled():
    torch._dynamo.reset()
    m = build('vit')
    x = images()
    z0 = m(x)
    c = torch.compile(Normalized(m, mean=[0.0] * 3, std=[1.0] * 3), backend='eager')
    assert torch.allclose(c(x), z0, atol=1e-6)
    assert len(block_outputs(c, x)) == 3 and len(attn_maps(c, x)) == 3
    assert torch.allclose(scaled(c, x, 0.3), scaled(m, x, 0.3), atol=1e-6) and not torch.allclose(
        scaled(c, x, 0.3), z0, atol=1e-4
    )
    assert torch.allclose(c(x), z0, atol=1e-6)
    for f in (add_tokens, lambda c: add_after_mlp(c, Bottleneck)):
        with pytest.raises(ValueError, match='torch.compile'):
            f(c)
    torch._dynamo.reset()
    z = add_tokens(m, n=3, std=0.5)(x)
    c = torch.compile(m, backend='eager')
    for _ in range(2):
        assert torch.allclose(c(x), z, atol=1e-6)
        with no_tokens(c):
            assert torch.allclose(c(x), z0, atol=1e-6)
    assert not any('subclass' in o for o in torch._dynamo.utils.counters['graph_break'])
    m.compile(backend='eager')
    m(x)
    assert torch.allclose(scaled(m, x, 0.3), scaled(unwrap(c), x, 0.3), atol=1e-6) and len(block_outputs(m, x)) == 3
    torch._dynamo.reset()


# ---- groups (R25) and decay
def dls():
    dl = DataLoader([(torch.rand(3, 32, 32), i % 3) for i in range(8)], bs=4)
    return DataLoaders(dl, dl)


@pytest.mark.parametrize('k,wrap', [('deit_distilled', True), ('cait_xxs', True), ('swin_tiny', False)])
def test_splitter(k, wrap):
    m = build(k)
    model = Normalized(m) if wrap else m
    a, b = vit_splitter(model)
    names = {id(p): n for n, p in m.named_parameters()}
    assert all(names[id(p)].startswith('head') for p in b) and sum(names[id(p)].startswith('head') for p in b) == sum(
        n.startswith('head') for n in names.values()
    )
    assert len(a) + len(b) == len(list(m.parameters())) and not {id(p) for p in a} & {id(p) for p in b}
    if k in TOKENS:
        add_tokens(model, n=2)
    add_after_mlp(model, Bottleneck)
    learn = Learner(
        dls(),
        model,
        loss_func=CrossEntropyLossFlat(),
        splitter=vit_splitter,
        train_bn=False,
        opt_func=partial(SGD, mom=0.0),
    )
    learn.freeze()
    train = {n.split('.')[0] for n, p in m.named_parameters() if p.requires_grad}
    assert (
        train <= {'head', 'head_dist', 'extra_tokens', 'adapters'}
        and 'adapters' in train
        and ('extra_tokens' in train) == (k in TOKENS)
    )
    before = {n: p.clone() for n, p in m.named_parameters()}
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1.0)
    moved = {n.split('.')[0] for n, p in m.named_parameters() if not torch.equal(p, before[n])}
    assert moved <= train and 'head' in moved
    learn.unfreeze()
    assert all(p.requires_grad for p in m.parameters())
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(1, slice(1e-4, 1e-2))


@fam
def test_no_decay_is_timm_and_more(k):
    m = build(k)
    timm_no = {id(p) for p in param_groups_weight_decay(m, 1.0, no_weight_decay_list=m.no_weight_decay())[0]['params']}
    ours = {id(p) for p in no_decay_split(m)[1]}
    extra = {n for n, p in m.named_parameters() if id(p) in ours - timm_no}
    # XCA lists it, timm's helper looks at the top module alone
    assert timm_no <= ours and all('temperature' in n for n in extra)
    assert no_decay_names(Normalized(m)) == {f'model.{n}' for n in no_decay_names(m)}


def shrunk(model, fits=1, opt_func=SGD, wd=0.1, before=noop, **kw):
    for p in model.parameters():
        p.data.fill_(1.0)
    learn = Learner(
        dls(),
        model,
        loss_func=lambda z, y: 0 * sum(p.sum() for p in model.parameters()),
        opt_func=opt_func,
        wd=wd,
        lr=0.1,
        **kw,
    )
    before(learn)
    with learn.no_bar(), learn.no_logging():
        for _ in range(fits):
            learn.fit(1)
    return {n for n, p in model.named_parameters() if p.mean() < 0.9975}


def test_no_decay_moves_nothing_else():
    m = build('xcit_nano')
    decay = {n for n, _ in m.named_parameters()} - no_decay_names(m)
    assert shrunk(copy.deepcopy(m), opt_func=Adam, cbs=NoDecay()) == decay
    assert shrunk(copy.deepcopy(m), opt_func=Adam) > decay


def test_an_optimiser_inside_another_spares_the_same():
    m = build('xcit_nano')
    learn = Learner(dls(), m, loss_func=CrossEntropyLossFlat(), opt_func=ranger, cbs=NoDecay())
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-4)
    decays = {id(p) for p in m.parameters() if learn.opt.state[p].get('do_wd', True)}
    assert decays == {id(p) for p in no_decay_split(m)[0]}


def test_no_decay_with_freeze_groups_and_refit():
    m = build('vit')
    decay = {n for n, _ in m.named_parameters()} - no_decay_names(m)

    def fr(learn):
        learn.freeze()
        learn.unfreeze()

    assert shrunk(copy.deepcopy(m), fits=2, cbs=NoDecay(), splitter=vit_splitter, before=fr) == decay
    assert shrunk(
        copy.deepcopy(m), cbs=NoDecay(), splitter=vit_splitter, before=lambda l: l.freeze(), train_bn=False
    ) == {'head.weight'}
    assert shrunk(add_tokens(copy.deepcopy(m), n=2), cbs=NoDecay(), splitter=vit_splitter) == decay
    learn = Learner(dls(), m, loss_func=CrossEntropyLossFlat(), cbs=NoDecay())
    with learn.no_bar(), learn.no_logging():
        learn.validate()  # opt is None
    learn = Learner(
        dls(), m, loss_func=CrossEntropyLossFlat(), cbs=NoDecay(), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)
    )
    with pytest.raises(TypeError, match='no_decay_split'), learn.no_bar(), learn.no_logging():
        learn.fit(1)


# ---- copies of models with parts: a replica answers with its own
def replica(model):
    """As `torch.nn.parallel.replicate` makes one for each GPU: new modules with tensors of their own, the same hooks;
    they require gradients as the parameters do, else torch multiplies by other kernels, which round differently"""
    mods = list(model.modules())
    new = dict(zip(mods, [o._replicate_for_data_parallel() for o in mods]))
    for o, r in new.items():
        for k, c in o._modules.items():
            r._modules[k] = new.get(c)
        for k, t in (o._parameters | o._buffers).items():
            setattr(r, k, None if t is None else t.detach().clone().requires_grad_(t.requires_grad))
    return new[model]


PARTS = dict(
    tokens=lambda m: add_tokens(m, 3, std=0.5),
    adapters=lambda m: add_after_mlp(m, Bottleneck),
    scales=lambda m: add_scales(m, 0.5),
)


def moved(mod, name):
    "Another weight for a module: a parameter of its own, or, in a replica, a tensor"
    t = getattr(mod, name)
    new = t.detach() + torch.randn(t.shape)
    setattr(mod, name, nn.Parameter(new) if name in mod._parameters else new)


CHANGES = dict(
    tokens=lambda m: moved(m.extra_tokens, 'weight'),
    adapters=lambda m: moved(m.adapters[0].b, 'bias'),
    scales=lambda m: setattr(m.attn_scales, 's', m.attn_scales.s * 4),
)


def shallow(m):
    c = copy.copy(m)
    c._modules = {
        k: copy.deepcopy(o) if k in ('extra_tokens', 'adapters', 'attn_scales') else o for k, o in m._modules.items()
    }
    return c


COPIES = dict(
    replica=replica,
    shallow=shallow,
    deepcopy=copy.deepcopy,
    pickle=lambda m: pickle.loads(pickle.dumps(m)),
    save=lambda m: torch.load(saved(m), weights_only=False),
)
WHERE = [
    (k, p)
    for k in ('vit', 'cait_xxs', 'xcit_nano', 'swin_tiny', 'levit')
    for p in PARTS
    if p != 'tokens' or k in TOKENS
]


def with_part(k, part):
    m = build(k)
    PARTS[part](m)
    return m


@pytest.mark.parametrize(
    'k,part,how',
    [*(('vit', 'tokens', h) for h in COPIES), *((*w, h) for w, h in zip(WHERE[1:], 3 * [*COPIES]))],
)
@torch.no_grad()
def test_copies_answer_with_their_own(k, part, how):
    torch.manual_seed(1)
    m, x = with_part(k, part), images()
    z = m(x)
    c = COPIES[how](m)
    assert torch.equal(c(x), z) and torch.equal(c(x), z)
    CHANGES[part](c)
    assert (
        (c(x) - z).abs().max() > 1e-5
        and torch.equal(m(x), z)
        and (c.forward_head(c.forward_features(x)) - z).abs().max() > 1e-5
    )


@pytest.mark.parametrize('k,part', [('cait_xxs', 'tokens'), ('vit', 'adapters'), ('xcit_nano', 'scales')])
@torch.no_grad()
def test_weights_as_an_argument(k, part):
    a, x = with_part(k, part), images()
    b = copy.deepcopy(a)
    torch.manual_seed(1)
    CHANGES[part](b)
    assert torch.allclose(
        torch.func.functional_call(a, dict(b.named_parameters()) | dict(b.named_buffers()), (x,)), b(x), atol=1e-6
    )
    stacked = torch.func.stack_module_state([a, b])
    base = copy.deepcopy(a).to('meta')
    zs = torch.func.vmap(lambda *state: torch.func.functional_call(base, state, (x,)))(*stacked)
    assert torch.allclose(zs, torch.stack([a(x), b(x)]), atol=1e-5)


@torch.no_grad()
def test_compiled_in_one_graph():
    torch._dynamo.reset()
    m, x = with_part('vit', 'tokens'), images()
    PARTS['adapters'](m)
    PARTS['scales'](m)
    c = torch.compile(m, backend='eager', fullgraph=True)
    assert torch.allclose(c(x), m(x), atol=1e-6)
    torch._dynamo.reset()


def test_a_replicas_block_that_was_not_introduced_is_loud():
    c = replica(with_part('vit', 'tokens'))
    with pytest.raises(RuntimeError, match='replica'):
        c.blocks(torch.rand(2, 17, 32))


# ---- the traps of an added token: heads, masks
@pytest.mark.parametrize(
    'mask',
    [
        torch.ones(17, 17, dtype=torch.bool).tril(),
        torch.randn(2, 1, 17, 17, generator=torch.Generator().manual_seed(0)),
    ],
)
def test_masks_are_for_the_models_own_tokens(mask):
    m, x = build('vit'), images()
    z = m(x, attn_mask=mask)
    t = add_tokens(m, 2, std=0.5)
    wide = F.pad(mask, (0, 2, 0, 2), value=1 if mask.dtype == torch.bool else 0)
    assert (
        torch.equal(t(x, attn_mask=mask), t(x, attn_mask=wide))
        and torch.equal(t(x, mask), t(x, attn_mask=mask))
        and not torch.equal(t(x, attn_mask=mask), t(x))
    )
    assert torch.equal(t.forward_intermediates(x, attn_mask=mask)[0], t.forward_features(x, attn_mask=mask))
    with no_tokens(t):
        assert torch.equal(t(x, attn_mask=mask), z)


# ---- a model that works in place
class InPlaceBlocks(nn.Module):
    "Adds to its input in place, as a frugal residual does"

    def __init__(self, blk):
        super().__init__()
        self.blk = blk

    def forward(self, x):
        return x.add_(self.blk(x) - x)


@pytest.mark.parametrize('mode', [torch.inference_mode, nullcontext])
def test_outputs_of_blocks_that_write_into_their_input(mode):
    m, x = build('vit'), images()
    bad = copy.deepcopy(m)
    x0 = x.clone()
    bad.blocks = nn.Sequential(*[InPlaceBlocks(b) for b in bad.blocks])
    with mode():
        a, b = block_outputs(m, x), block_outputs(bad, x)
    for o, p in zip(a, b):
        assert torch.allclose(o, p, atol=1e-5)
    assert torch.equal(x, x0)


# --- compiled code made around the model


class Sees(nn.Module):
    "Compiled code around a model, made before what follows"

    def __init__(self, model):
        super().__init__()
        self.code = torch.compile(model, backend='eager')

    def forward(self, x):
        return self.code(x)


def test_code_compiled_around_a_model_sees_what_is_in_use():
    m = add_tokens(tiny_vit(num_classes=4), 2, 'logits')
    x = torch.rand(3, 1, 28, 28)
    around = Sees(m)
    with torch.no_grad():
        before = around(x)
        with attn_scale(m, 5.0):
            inside, plain = around(x), m(x)
        after = around(x)
    assert torch.allclose(inside, plain, atol=1e-6) and torch.allclose(after, before, atol=1e-6)
    assert not torch.allclose(inside, before, atol=1e-4)
