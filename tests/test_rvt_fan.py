"RVT and FAN: sizes as published, timm's verbs, and everything of this library that reads a transformer."

import pytest, timm, torch, torch.nn.functional as F
from torch import nn
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.attacks import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.rvt_fan import *
from robust_nbdev.test_utils import *

small = pytest.mark.parametrize('name', ('two_stages', 'fan_nano_p4_hybrid'))


def net(name, seed=0, **kw):
    torch.manual_seed(seed)
    kw = {**dict(img_size=28, in_chans=1, num_classes=4), **kw}
    if name == 'two_stages':
        name, small = 'rvt_nano_plus', dict(dims=(16, 32), depths=(2, 1), heads=(2, 4))
    elif 'rvt' in name:
        small = dict(dims=(32,), depths=(2,))
    else:
        small = dict(embed_dim=32, depth=2, stem_dims=(8, 8))
    return timm.create_model(name, **{**small, **kw}).eval()


def images(n=4, size=28, c=1, seed=0):
    return torch.rand(n, c, size, size, generator=torch.Generator().manual_seed(seed))


@small
def test_blocks_maps_and_scale(name):
    m, x = net(name), images()
    z, before = m(x), state_of(m)
    outs, z1 = block_outputs(m, x, logits=True)
    maps, z2 = attn_maps(m, x, logits=True)
    assert torch.equal(z1, z) and torch.equal(z2, z) and len(outs) == len(maps) == len(vit_blocks(m))
    for o in maps:
        assert torch.allclose(o.sum(-1), torch.ones(()), atol=1e-5)
    with attn_scale(m, 1.0):
        assert torch.allclose(m(x), z, atol=1e-6)
    with attn_scale(m, 2.0):
        assert not torch.allclose(m(x), z)
    pre = attn_maps(m, x, pre_softmax=True)
    with attn_scale(m, 0.5):
        assert torch.allclose(attn_maps(m, x, pre_softmax=True)[0], pre[0] / 2, atol=1e-6)
    assert state_of(m) == before and torch.equal(m(x), z)


@pytest.mark.parametrize('name', ('rvt_nano', 'fan_nano_p4_hybrid'))
def test_maps_do_not_depend_on_fused_attention(name):
    m, x = net(name), images()
    a = attn_maps(m, x)
    for o in m.modules():
        if hasattr(o, 'fused_attn'):
            o.fused_attn = not o.fused_attn
    assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(a, attn_maps(m, x)))


def shaken(m):
    "Every parameter and statistic moved away from where it starts, so that none is neutral"
    g = torch.Generator().manual_seed(0)
    for p in m.parameters():
        p.data += 0.3 * torch.rand(p.shape, generator=g)
    for n, b in m.named_buffers():
        if 'running' in n:
            b += torch.rand(b.shape, generator=g)
    return m


def linear(m, x):
    return x @ m.weight.T + m.bias


def conv_tokens(c, x, hw):
    picture = x.transpose(1, 2).unflatten(2, hw)
    y = F.conv2d(picture, c.weight, c.bias, padding=c.weight.shape[-1] // 2, groups=c.groups)
    return y.flatten(2).transpose(1, 2)


def norm_tokens(b, x):
    return (x - b.running_mean) / (b.running_var + b.eps).sqrt() * b.weight + b.bias


def ln(m, x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt() * m.weight + m.bias


@torch.no_grad()
def test_rvt_block_by_hand():
    m = shaken(net('rvt_nano', img_size=(20, 12)))
    b = m.blocks[0]
    x = torch.randn(2, 15, 32)
    hw = (5, 3)
    f = b.mlp
    y = x + b.attn(ln(b.norm1, x))
    t = ln(b.norm2, y)
    t = F.gelu(norm_tokens(f.bn1, conv_tokens(f.fc1, t, hw)))
    t = F.gelu(norm_tokens(f.bn2, conv_tokens(f.dw, t, hw)))
    t = norm_tokens(f.bn3, conv_tokens(f.fc2, t, hw))
    assert torch.allclose(b(x), y + t, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_fan_block_by_hand():
    b = shaken(net('fan_nano_p4_hybrid')).blocks[0]
    x = torch.randn(2, 15, 32)
    hw = (5, 3)
    c = b.mlp
    f = c.mlp
    y = x + b.gamma1 * b.attn(ln(b.norm1, x))
    t = ln(b.norm2, y)
    h = linear(f.fc1, t)
    local = conv_tokens(f.local.conv2, norm_tokens(f.local.bn, F.gelu(conv_tokens(f.local.conv1, h, hw))), hw)
    out = c.gate(t)[:, None] * ln(c.norm, linear(f.fc2, h + f.gamma * local))
    assert torch.allclose(b(x, *hw), y + b.gamma2 * out, atol=1e-3, rtol=1e-3)


def test_only_the_stages_have_it():
    stem = net('fan_nano_p4_hybrid').patch_embed
    norms = [o for o in stem.stages.modules() if isinstance(o, nn.LayerNorm)]
    assert len(norms) == 3
    assert all(isinstance(o, StageNorm) for o in norms)
    assert not isinstance(stem.stem[1], StageNorm)


def test_class_attention_norms_all_tokens_and_depth_drops_as_published():
    m = net('fan_nano_p4_hybrid', drop_path_rate=0.3)
    assert all(o.tokens_norm for o in m.cls_attn_blocks)
    assert [b.drop_path.drop_prob for b in m.blocks] == [0.3, 0.3]
    r = net('rvt_nano', depths=(4,), drop_path_rate=0.4)
    assert [getattr(b.drop_path, 'drop_prob', 0.0) for b in r.blocks] == pytest.approx([0, 0.1, 0.2, 0.3])
    s = timm.create_model('rvt_small').patch_embed.proj[0]
    assert (s.kernel_size, s.stride, s.padding) == ((7, 7), (2, 2), (2, 2))


@small
def test_verbs_of_timm(name):
    m, x = net(name), images()
    assert torch.allclose(m.forward_head(m.forward_features(x)), m(x), atol=1e-6)
    assert m.forward_head(m.forward_features(x), pre_logits=True).shape[-1] == m.num_features
    fs = m.forward_intermediates(x, intermediates_only=True, output_fmt='NLC')
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(fs, block_outputs(m, x, prefix=False)))
    m.set_grad_checkpointing(True)
    m.train()
    m(x).sum().backward()
    m.set_grad_checkpointing(False)
    m.eval()
    for n, width in ((7, 7), (0, m.num_features)):
        m.reset_classifier(n)
        assert m(x).shape == (4, width)
    assert set(m.group_matcher()) & {'blocks'}


def test_each_stage_has_pictures_of_its_own_grid():
    m, x = net('two_stages'), images()
    tokens = m.forward_intermediates(x, intermediates_only=True)
    final, pictures = m.forward_intermediates(x, output_fmt='NCHW')
    named = m.forward_intermediates(x, output_fmt='NCHW', output_dict=True)
    assert [o.shape[1] for o in tokens] == [49, 49, 16] and [o.shape[2:] for o in pictures] == [(7, 7), (7, 7), (4, 4)]
    for o, p, q in zip(tokens, pictures, named['image_intermediates']):
        assert torch.equal(p.flatten(2).mT, o)
        assert torch.equal(p, q)
    assert torch.equal(final, m.forward_features(x)) and [f['reduction'] for f in m.feature_info] == [4, 4, 8]
    with pytest.raises(ValueError, match="output_fmt must be 'NLC' or 'NCHW'"):
        m.forward_intermediates(x, output_fmt='NHWC')


@small
def test_features_only_as_timm_has_it(name):
    "Channels and reductions are those of `feature_info`, the values those of the blocks: the last, or those named"
    kw = dict(seed=1, features_only=True)
    m, x = net(name, out_indices=2, **kw), images(2)
    info = m.feature_info
    for o, chans, reduction in zip(m(x), info.channels(), info.reduction()):
        assert o.shape[:2] == (2, chans) and o.shape[-1] == -(-28 // reduction)
    whole = net(name, seed=1)
    n = len(whole.blocks)
    (one,) = net(name, out_indices=[n - 1], **kw)(x)
    last = block_outputs(whole, x, prefix=False)[n - 1]
    assert torch.allclose(one.flatten(2).mT, last, atol=1e-5)
    assert len(net(name, out_indices=[0], **kw).model.blocks) == 1


def test_test_images_are_cut_as_the_authors_cut_them():
    cut = lambda k: timm.get_pretrained_cfg(k).crop_pct
    assert cut('rvt_small_plus') == 0.9 and cut('fan_small_12_p4_hybrid') == cut('fan_nano_p4_hybrid') == 1.0


def test_refuses_what_has_no_place():
    with pytest.raises(TypeError, match='no place for extra tokens'):
        add_tokens(net('rvt_nano'), 2)
    with pytest.raises(TypeError, match='xcit_stem'):
        xcit_stem(net('fan_nano_p4_hybrid'), 8)


def test_attacks_see_it():
    m, x, y = Normalized(net('two_stages'), [0.5], [0.5]).eval(), images(), torch.tensor([0, 1, 2, 3])
    before, fool = state_of(m), PatchFool(steps=2, block=1)
    for a in (fool, RandomOcclusion(), ARDPRM(0.1, steps=2, prm=0.5, ard=0.5)):
        o = a(m, x, y)
        assert 0 <= o.min() and o.max() <= 1 and (not a.eps or (o - x).abs().max() <= a.eps + 1e-6)
    changed = ((fool(m, x, y) != x).unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).any(-1)).flatten(1).sum(1)
    assert changed.tolist() == [1] * 4 and state_of(m) == before


def test_images_that_patches_do_not_tile_are_refused():
    "FAN's strides would leave the last rows and columns unseen, and the grid would be counted wrong"
    m = net('fan_nano_p4_hybrid')
    for h, w in ((34, 28), (28, 30)):
        with pytest.raises(ValueError, match='multiple of 4'):
            m(torch.rand(1, 1, h, w))
    assert [o.shape[1] for o in block_outputs(m, torch.rand(1, 1, 36, 24), prefix=False)][0] == 9 * 6


@pytest.mark.parametrize('patch', [2, 14])
def test_the_stem_has_the_patches_that_it_says(patch):
    small = dict(dims=(8,), depths=(1,), heads=(2,), num_classes=2)
    m = timm.create_model('rvt_base', img_size=(patch * 10, patch * 3), patch_size=patch, **small).eval()
    assert m.patch_embed(torch.rand(1, 3, patch * 10, patch * 3)).shape == (1, 30, 8)


def test_patches_that_the_stem_cannot_make():
    for patch in (3, 18, 22):
        with pytest.raises(ValueError, match='patch_size'):
            timm.create_model('rvt_base', img_size=patch * 10, patch_size=patch)


def test_no_decay():
    assert any(k.endswith('tau') for k in no_decay_names(net('fan_nano_p4_hybrid')))


def test_batchnorm_is_in_the_feed_forward_but_for_the_base_model():
    n = lambda k: sum(isinstance(o, nn.BatchNorm2d) for o in net(k).modules())
    assert n('rvt_nano') == 1 + 3 * 2
    with torch.device('meta'):
        base = timm.create_model('rvt_base')
    assert sum(isinstance(o, nn.BatchNorm2d) for o in base.modules()) == 1


def test_a_mask_is_not_dropped_in_silence():
    m = ScaledAttention(8, 2, 4)
    x = torch.rand(1, 4, 8)
    assert torch.equal(m(x), m(x, attn_mask=None, is_causal=False))
    for kw in (dict(attn_mask=torch.ones(4, 4)), dict(is_causal=True)):
        with pytest.raises(ValueError, match='no mask'):
            m(x, **kw)
