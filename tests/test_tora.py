"TORA-ViT: the gate by hand, the two phases, the fastai contract, files, and a backbone left unchanged."

import copy, io, pickle
from dataclasses import fields
import pytest, timm, torch, torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from fastai.vision.all import (
    Callback,
    CancelFitException,
    CrossEntropyLossFlat,
    GradientAccumulation,
    MixUp,
)
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.attacks import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.evaluate import *
from robust_nbdev.tora import *
from robust_nbdev.test_utils import *
from copies import COPIES, grow
from two_processes import one_and_two

PGD1 = PGD(0.1, steps=1)


def images(n=4, c=1, size=28, seed=0):
    return (torch.rand(n, c, size, size, generator=torch.Generator().manual_seed(seed)) * 255).round() / 255


def make(kind='tora', d=2, noise=0.0, model=None, **kw):
    torch.manual_seed(1)
    m = model or tiny_vit(num_classes=4)
    m = {
        'tora': tora_vit,
        'adapter_fusion': adapter_fusion,
        'single_adapter': single_adapter,
        'head_only': lambda m, d: head_only(m),
    }[kind](m, d=d, **kw)
    for p in m.parameters():
        if p.requires_grad:
            p.data += noise * torch.randn_like(p)
    return m


def learner(model=None, cbs=(), cb=None, **kw):
    return synth_learner(model=model or make(), cbs=[cb or TORA(PGD1), *cbs], **kw)


def state(m):
    return {k: v.clone() for k, v in m.state_dict().items()}


def changed(m, before):
    return [k for k, v in m.state_dict().items() if not torch.equal(v, before[k])]


KINDS = dict(
    tora={},
    key=dict(gate='key'),
    folded=dict(folded=True),
    adapter_fusion=dict(kind='adapter_fusion'),
    single_adapter=dict(kind='single_adapter'),
    head_only=dict(kind='head_only'),
)

# --- the model
# ------------------------------------------------------------------------------------------------------------------


NETS = [dict(reg_tokens=2, init_values=0.1, pre_norm=True), dict(fc_norm=True, qk_norm=True)]


@pytest.mark.parametrize('k,net', [('tora', NETS[0]), ('tora', NETS[1]), ('head_only', NETS[0])])
def test_step_0_is_the_pretrained_model(k, net):
    x, m = images(), tiny_vit(num_classes=4, **net)
    m.model.cls_token.data.normal_()
    m.model.head.weight.data.normal_()
    z = m(x)
    n = sum(p.numel() for p in m.parameters())
    t = make(k, model=m)
    assert t is m and not t.training
    for fused in (False, True):
        for b in t.model.blocks:
            b.attn.fused_attn = fused
        assert (t(x) - z).abs().max() < 1e-5
    assert sum(p.numel() for p in m.parameters() if not p.requires_grad) == n


@pytest.mark.parametrize('k', ['tora', 'single_adapter', 'head_only'])
def test_remove_brings_the_model_back_to_the_bit(k):
    x, m = images(), tiny_vit(num_classes=4)
    next(m.parameters()).requires_grad_(False)
    before, z = state_of(m), m(x)
    t = make(model=m, noise=0.1, **KINDS[k])
    assert not torch.equal(t(x), z)
    remove_tora(m)
    assert torch.equal(m(x), z) and repr(state_of(m)) == repr(before)
    with pytest.raises(ValueError, match='nothing to remove'):
        remove_tora(m)


@pytest.mark.parametrize(
    'call,err,words',
    [
        (lambda: tora_vit(tiny_vit(class_token=False, global_pool='avg')), TypeError, 'class token'),
        (lambda: tora_vit(tiny_vit(num_classes=0)), ValueError, 'one head'),
        (lambda: tora_vit(timm.create_model('deit_tiny_distilled_patch16_224', depth=1)), ValueError, 'one head'),
        (lambda: tora_vit(add_tokens(tiny_vit(), 2)), ValueError, 'already'),
        (lambda: tora_vit(tiny_vit(), d=0.5), ValueError, 'whole number'),
        (lambda: tora_vit(tiny_vit(), num_classes=3), TypeError, 'from its name'),
        (lambda: head_only(torch.compile(tiny_vit(), backend='eager')), ValueError, 'torch.compile'),
        (lambda: OneHead(OneHead(make(), 'acc'), 'rob'), ValueError, "OneHead of 'acc' already"),
        (lambda: make().model.forward_head(torch.rand(4, 18, 32), pre_logits=True), ValueError, 'use_head'),
        (lambda: make().model(images(), is_causal=True), ValueError, 'attn_mask'),
        (lambda: make().model.forward_intermediates(images()), ValueError, 'block_outputs'),
    ],
)
def test_models_that_are_refused(call, err, words):
    with pytest.raises(err, match=words):
        call()


def test_by_name_inside_normalized():
    m = tora_vit('vit_tiny_patch16_224', pretrained=False, num_classes=5, img_size=32)
    assert isinstance(m, Normalized) and m(images(2, 3, 32)).shape == (2, 5) and m.model.tora.about['d'] == 12


@pytest.mark.parametrize(
    'how,split',
    [('adapter', True), ('mean', True), ('mean', False), ('key', False), ('both', True), ('diagonal', False)],
)
def test_fusion_against_loops(how, split):
    "Entry by entry, with no shared code"
    torch.manual_seed(0)
    b = Branches(6, 3, split=split, reading=Reading(gate=how))
    for p in b.parameters():
        p.data.normal_()
    z = torch.randn(1, 5, 6)
    ks = ([0, 2, 3, 4], [1, 2, 3, 4]) if split else ([0, 1, 2, 3, 4],) * 2
    N = len(ks[0])
    deltas = [[b.sides[s].up(torch.relu(b.sides[s].down(z[0, j]))) for j in o] for s, o in zip(('acc', 'rob'), ks)]
    feats = [[z[0, j] + d for j, d in zip(o, dd)] for o, dd in zip(ks, deltas)]
    W = {k: getattr(b.gate, k).weight for k in 'qkv'}
    want = z.clone()
    for i in range(5):
        s = torch.stack(
            [torch.stack([(W['q'] @ z[0, i]) @ (W['k'] @ f) / 6**0.5 for f in fs]) for fs in feats]
        )  # [2,N]
        own = max(i - 1, 0) if split else i
        g = {
            'adapter': s.softmax(0) / N,
            'key': s.softmax(1) / 2,
            'both': s.flatten().softmax(0).view(2, N),
            'diagonal': s.softmax(0) * F.one_hot(torch.tensor(own), N),
            'mean': s.softmax(0).mean(1, keepdim=True) * F.one_hot(torch.tensor(own), N),
        }[how]
        want[0, i] += sum(g[x, j] * (W['v'] @ deltas[x][j]) for x in (0, 1) for j in range(N))
    assert torch.allclose(b(z), want, atol=1e-4, rtol=1e-4)


# --- size
# -----------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_the_robust_class_token_is_no_patch():
    """[ROB] stands beside [ACC]: patches, their attention and their pictures begin behind both, and are those of the
    plain model at first"""
    from robust_nbdev.explorer import class_attention

    m, x = tiny_vit(num_classes=4, reg_tokens=2), images()

    def look(m):
        return [
            torch.stack(block_outputs(m, x, prefix=False)),
            torch.stack(patch_attention(m, x))[:, :, -16:],
            class_attention(m, x),
        ]

    want = look(m)
    tora_vit(m, d=2)
    assert prefix_tokens(m) == prefix_tokens(copy.deepcopy(m)) == 4
    for a, b in zip(look(m), want):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-4)
    assert prefix_tokens(remove_tora(m)) == 3
    assert prefix_tokens(adapter_fusion(m)) == 3  # one class token for both heads


# --- training
# -------------------------------------------------------------------------------------------------------------------


class Parts(Callback):
    "Which parts each optimiser step moved"

    order = 90

    def before_fit(self):
        self.seen = []

    def before_step(self):
        self.was = state(self.model)

    def after_step(self):
        self.seen.append(
            {next((o for o in ('gate', 'acc', 'rob', 'one') if o in k), k) for k in changed(self.model, self.was)}
        )


@pytest.mark.parametrize('k', ['tora', 'adapter_fusion'])
def test_phases_move_what_they_should_and_the_backbone_stays_to_the_bit(k):
    m = make(noise=0.05, **KINDS[k])
    before, bid = state(m), backbone_id(m)
    l = learner(m, [Parts()])
    l.fit_tora(1, 0)
    assert l.parts.seen == [{'gate', 'rob'}, {'gate', 'acc'}] * 2
    mid = state(m)
    l.fit_tora(0, 1)
    assert l.parts.seen == [{'gate'}] * 4 and l.tora.phase == 'gate'
    assert (
        all('.gate.' in o for o in changed(m, mid))
        and all('tora.' in o or 'adapters.' in o for o in changed(m, before))
        and backbone_id(m) == bid
    )
    remove_tora(m)
    assert all(torch.equal(v, before[n]) for n, v in m.state_dict().items())


@pytest.mark.parametrize('k', ['single_adapter', 'head_only'])
def test_baselines_train_on_the_joint_loss(k):
    m = make(k)
    bid = backbone_id(m)
    l = learner(m, [Parts()])
    l.fit_tora(0, 1)
    assert l.parts.seen == [{'one'} if k == 'single_adapter' else {'acc', 'rob'}] * 4 and backbone_id(m) == bid


class Grab(Callback):
    "The step number `at`: model, images, loss, gradients; then stop"

    order = 9

    def __init__(self, at=0):
        self.at = at

    def before_batch(self):
        if self.training and self.train_iter == self.at:
            self.m, self.xs, self.y = (
                copy.deepcopy(self.model),
                self.learn.x.as_subclass(torch.Tensor).clone(),
                self.learn.y.as_subclass(torch.Tensor).clone(),
            )

    def before_step(self):
        if self.train_iter == self.at:
            self.g, self.v = (
                {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()},
                self.learn.loss.item(),
            )
            raise CancelFitException()


LOSSES = dict(weights=dict(weight=torch.tensor([1.0, 2.0, 5.0, 0.1])), sum=dict(reduction='sum'), plain={})


@pytest.mark.parametrize('lam,k', [(0.3, 'weights'), (0.3, 'sum'), (0.0, 'plain')])
def test_gate_loss_by_hand(lam, k):
    "Two losses of the Learner's own kind; at lam 0 one of clean images, and no attack was paid for"
    l = learner(make(noise=0.1), [g := Grab()], TORA(PGD1, lam), loss_func=CrossEntropyLossFlat(**LOSSES[k]))
    l.fit_tora(0, 1)
    losses = [F.cross_entropy(z, g.y, **LOSSES[k]) for z in g.m.eval()(g.xs).split(len(g.y))]
    want = losses[0] if lam == 0 else (1 - lam) * losses[0] + lam * losses[1]
    assert g.v == pytest.approx(want.item(), rel=1e-5) and len(losses) == (1 if lam == 0 else 2)
    if lam == 0:
        assert any(torch.equal(o, g.xs[0]) for o, _ in l.dls.train.dataset)
    ps = {n: p for n, p in g.m.named_parameters() if '.gate.' in n}
    for n, w in zip(ps, torch.autograd.grad(want, list(ps.values()))):
        assert torch.allclose(g.g[n], w, atol=1e-6 * (len(g.y) if k == 'sum' else 1), rtol=1e-3)
    assert all(v is None for n, v in g.g.items() if '.gate.' not in n)


@pytest.mark.parametrize('at,side', [(0, 'rob'), (1, 'acc')])
def test_adapter_losses_by_hand(at, side):
    "The robust side sees images attacked through its own head; the accuracy side clean ones; each loss is that head's"
    m = make(noise=0.1)
    dls = synth_dls(64)
    dls.train = dls.train.new(shuffle=False)
    clean = [b for b in dls.train]
    l = learner(m, [g := Grab(at)], dls=dls)
    seed = torch.initial_seed() % 2**62
    l.fit_tora(1, 0)
    x, y = [o.as_subclass(torch.Tensor) for o in clean[at]]
    head = OneHead(g.m.eval(), side)
    want_x = PGD1(head, x, y, seed=seed) if side == 'rob' else x
    assert torch.allclose(g.xs, want_x, atol=1e-6) and g.v == pytest.approx(
        F.cross_entropy(head(want_x), y).item(), abs=1e-5
    )
    other = {'rob': 'acc', 'acc': 'rob'}[side]
    assert all(v is None for n, v in g.g.items() if other in n) and all(
        v is not None for n, v in g.g.items() if side in n or '.gate.' in n
    )


@pytest.mark.parametrize('phase,k', [('adapters', 3), ('gate', 3)])
def test_cost_is_the_minimum(phase, k):
    """Phase 1: (2k+3)F on an attacked batch, 3F on a clean one; phase 2: 2k forwards and backwards of the attack, and
    one joint batch"""
    got = []

    class Count(Callback):
        order = -5

        def before_batch(self):
            if self.training:
                self.c = Counted(self.model.model)
                self.model.model = self.c

        def after_batch(self):
            if self.training:
                self.model.model = self.c.model
                got.append((self.c.forwards, self.c.backwards))

    l = learner(make(), [Count()], TORA(PGD(0.1, steps=k)))
    b = l.dls.bs
    l.fit_tora(int(phase == 'adapters'), int(phase == 'gate'))
    assert got == ([((k + 1) * b, k * b), (b, 0)] * 2 if phase == 'adapters' else [((k + 2) * b, k * b)] * 4)


CBS = dict(
    fp16=lambda: [HalfPrecision(torch.float16)],
    overfit=lambda: [CatchOverfit(gap=2)],
    all=lambda: [MixUp(), GradientAccumulation(16), HalfPrecision(torch.bfloat16), AWP(0.01), EMA(0.9)],
)


@pytest.mark.parametrize('k', CBS)
def test_composes_with(k):
    m = make(noise=0.05)
    bid, before = backbone_id(m), state(m)
    l = learner(m, CBS[k](), dls=synth_dls(32, bs=8))
    lf = l.loss_func
    l.fit_tora(1, 1)
    assert backbone_id(m) == bid and changed(m, before) and all(p.isfinite().all() for p in m.parameters())
    assert l.loss_func is lf and lf.reduction == 'mean' and not torch.is_autocast_enabled('cpu')
    assert m.model.tora.train_out == 'joint' and l.tora.held is None and l.tora.extra is None
    assert all(len(b._forward_hooks) == 1 and len(b._forward_pre_hooks) <= 2 for b in m.model.blocks)


def test_interrupt_leaves_everything_usable():
    class Stop(Callback):
        order = 9

        def before_batch(self):
            if self.training and self.train_iter == 2:
                raise KeyboardInterrupt

    m = make(noise=0.05)
    l = learner(m, [Stop()])
    x = images()
    m.eval()
    z = m(x)
    with pytest.raises(KeyboardInterrupt):
        l.fit_tora(1, 0)
    m.eval()
    assert torch.isfinite(m(x)).all() and m.model.tora.active == 'joint'
    # which any fit, validation or prediction begins with
    m.model.tora.train_out = 'rob'
    l.tora('before_fit')
    assert m.model.tora.train_out == 'joint'
    l.remove_cb(Stop)
    l.fit_tora(1, 1)
    assert m.model.tora.train_out == 'joint' and l.validate()


def test_each_phase_can_be_resumed(tmp_path):
    "Three epochs in one go, and one and two with a file between, give the same weights; both phases"
    for phase in ('adapters', 'gate'):

        def new():
            # three batches: an odd number, so the sides of the second epoch begin the other way round
            dls = synth_dls(24, bs=8)
            dls.train = dls.train.new(shuffle=False)
            return learner(make(noise=0.05), dls=dls, cb=TORA(PGD1, 0.5), path=tmp_path, splitter=tora_splitter)

        n = dict(adapter_epochs=3, gate_epochs=0) if phase == 'adapters' else dict(adapter_epochs=0, gate_epochs=3)

        class KeepPart(Callback):
            order = 95

            def after_epoch(self):
                if self.epoch == 0:
                    self.learn.save('part')

        whole = new()
        whole.add_cb(KeepPart())
        whole.fit_tora(**n)
        rest = new().load('part')
        rest.fit_tora(**n, start_epoch=1)
        assert all(
            torch.allclose(a, b, atol=1e-6)
            for a, b in zip(whole.model.state_dict().values(), rest.model.state_dict().values())
        )
    with pytest.raises(ValueError, match='one phase'):
        new().fit_tora(2, 2, start_epoch=1)


def test_momentum_that_could_not_be_loaded_is_not_lost_without_a_word(tmp_path):
    learn = learner(path=tmp_path)
    learn.fit_tora(1, 0)
    learn.save('part')
    other = learner(path=tmp_path)
    with pytest.warns(UserWarning, match='optimizer'):
        other.load('part')
    with pytest.raises(ValueError, match='splitter=tora_splitter'):
        other.fit_tora(2, 0, start_epoch=1)


def test_a_lam_does_not_depend_on_the_one_before():
    m = make(noise=0.05)
    dls = synth_dls(32)
    dls.train = dls.train.new(shuffle=False)
    # no random start, which every epoch has its own of
    l = learner(m, dls=dls, cb=TORA(FGSM(0.1)))
    g0, got = gates_of(m), []
    for lams in ((0.9,), (0.1, 0.9)):
        for lam in lams:
            set_gates(m, g0)
            l.fit_tora(0, 1, lam=lam)
        got.append(gates_of(m))
    assert all(torch.equal(a, b) for a, b in zip(got[0].values(), got[1].values()))


def test_wrong_use_is_told():
    half = make()
    half.model.blocks[0].norm1.weight.requires_grad_(True)
    for f, err, words in (
        (lambda: learner(tiny_vit(num_classes=4)).fit(1), ValueError, 'no TORA parts'),
        (lambda: synth_learner(model=make()).fit_tora(1, 1), ValueError, 'needs the callback'),
        (lambda: learner(half).fit(1), ValueError, '1 parameters of the backbone.*such as model.blocks.0.norm1.weight'),
        (lambda: TORA(PGD1, 2), ValueError, 'between 0 and 1'),
        (lambda: TORA(PGD1, phase='x'), ValueError, "'adapters' or 'gate'"),
        (lambda: learner().fit_tora(0, 1, lam=-1), ValueError, 'between 0 and 1'),
        (lambda: gate_maps(make('head_only'), images()), ValueError, 'no gates'),
    ):
        with pytest.raises(err, match=words):
            f()


JOB = '''
def learner(dls): return Learner(dls, tora_vit(tiny_vit(num_classes=4), d=2), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=TORA(PGD(.05, steps=1)))
fits = [lambda l: l.fit_tora(1, 0, lr=.1), lambda l: l.fit_tora(0, 1, lr=.1)]
def keep(l): return {k:v.detach() for k,v in get_model(l.model).named_parameters()}
'''  # noqa: E501


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Each step trains one head, and every process waits for the gradients of all: two processes train what one trains
    on the joined batch"""
    pytest.importorskip('accelerate')
    one, a, b = one_and_two(JOB, tmp_path)
    start = dict(tora_vit(tiny_vit(num_classes=4), d=2).named_parameters())
    for k, v in one.items():
        assert torch.equal(a[k], b[k]) and torch.allclose(v, a[k], atol=1e-4), k
    assert all(
        not torch.equal(one[f'model.tora.heads.{o}.bias'], start[f'model.tora.heads.{o}.bias']) for o in ('acc', 'rob')
    )


# --- gates and files
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('k,shape', [('tora', (18, 17)), ('adapter_fusion', (17, 1))])
def test_gate_maps(k, shape):
    m, x = make(noise=0.2, **KINDS[k]), images(3)
    before = repr(state_of(m))
    maps = gate_maps(m, x)
    assert len(maps) == 2 and all(o.shape == (3, 2, *shape) for o in maps)
    assert gate_pictures(m, x).shape == (2, 3, 2, 4, 4) and repr(state_of(m)) == before
    z = WithGates(m)(x)
    assert torch.allclose(z[:, :4], m(x), atol=1e-6)
    w = z[:, 4:] + 100
    assert (w >= 0).all() and (w <= 1 + 1e-4).all()


def test_what_is_added_to_the_class_token_does_not_decay():
    assert {'model.tora.shift.acc', 'model.tora.shift.rob'} <= no_decay_names(make())


@pytest.mark.parametrize('k', ['key', 'folded', 'adapter_fusion', 'single_adapter'])
def test_files(k, tmp_path):
    m, x, f = make(noise=0.2, **KINDS[k]), images(), tmp_path / 'a.safetensors'
    save_adapters(m, f)
    assert f.stat().st_size < 4 * sum(p.numel() for o in tora_parts(m).values() for p in o) + 8000
    plain = load_adapters(tiny_vit(num_classes=4), f)
    assert torch.equal(plain(x), m(x)) and plain.model.tora.about == m.model.tora.about
    assert torch.equal(load_adapters(make(**KINDS[k]), f)(x), m(x))


def test_files_for_another_gate_are_refused(tmp_path):
    "The same names and shapes, but another function; a folded gate is the same one"
    f = tmp_path / 'a.safetensors'
    save_adapters(make(noise=0.1, gate='key'), f)
    other = make()
    before = state(other)
    with pytest.raises(ValueError, match='gate.*key.*remove_tora'):
        load_adapters(other, f)
    assert not changed(other, before)
    m = make(noise=0.1)
    save_adapters(m, f)
    assert torch.allclose(load_adapters(make(folded=True), f)(images()), m(images()), atol=1e-5)


def test_files_that_do_not_fit(tmp_path):
    from safetensors.torch import save_file

    m, f = make(noise=0.1), tmp_path / 'a.safetensors'
    save_adapters(m, f)
    for other, w in (
        (tiny_vit(num_classes=5), 'another backbone'),
        (tiny_vit(num_classes=4, act_layer='quick_gelu'), 'activation'),
        (make(d=3), 'does not fit'),
        (make('adapter_fusion'), 'does not fit'),
    ):
        before = state(other)
        with pytest.raises(ValueError, match=w):
            load_adapters(other, f)
        assert not changed(other, before)
    with pytest.raises(ValueError, match='.safetensors'):
        save_adapters(m, tmp_path / 'a.pth')
    with pytest.raises(ValueError, match='no TORA parts'):
        save_adapters(tiny_vit(), f)

    def fails(words):
        with pytest.raises(ValueError, match=words):
            load_adapters(tiny_vit(num_classes=4), f)

    f.write_bytes(f.read_bytes()[:200])
    fails('damaged')
    save_file({'a': torch.ones(2)}, str(f))
    fails('not written by save_adapters')
    m.model.adapters[0].gate.q.weight.data[0] = float('nan')
    save_adapters(m, f)
    fails('not finite')


# --- copies and replicas
# ----------------------------------------------------------------------------------------------------------


def saved(m):
    f = io.BytesIO()
    torch.save(m, f)
    f.seek(0)
    return torch.load(f, weights_only=False)


def shallow(m):
    c = copy.copy(m)
    c._modules, c._parameters = [{k: copy.deepcopy(v) for k, v in o.items()} for o in (m._modules, m._parameters)]
    return grow(c)


WAYS = dict(
    **COPIES,
    copy=shallow,
    compile=lambda m: torch.compile(grow(copy.deepcopy(m)), backend='eager'),
)
VIEWS = dict(model=lambda m: m, head=lambda m: OneHead(m, list(m.model.tora.heads)[-1]), network=lambda m: m.model)


@pytest.mark.parametrize(
    'k,way', [*(('tora', w) for w in WAYS if w != 'pickle'), ('single_adapter', 'pickle'), ('head_only', 'copy')]
)
def test_a_copy_answers_with_its_own_weights(k, way):
    x, m, big = images(), make(noise=0.2, **KINDS[k]), grow(make(noise=0.2, **KINDS[k]))
    for view in [*VIEWS.values()][: 1 if way == 'compile' else None]:
        a = view(m)
        z = a(x)
        want = view(big)(x)
        assert torch.allclose(WAYS[way](a)(x), want, atol=1e-5)
        assert torch.equal(a(x), z) and (z - want).abs().max() > 1e-2


@pytest.mark.parametrize('k,copied', [('tora', copy.deepcopy), ('head_only', saved)])
def test_parts_are_removed_from_a_copy_alone(k, copied):
    x, m, plain = images(), make(noise=0.2, **KINDS[k]), tiny_vit(num_classes=4)
    z, c = m(x), remove_tora(copied(m))
    assert torch.equal(c(x), plain(x)) and type(c.model) is type(plain.model)
    assert all(p.requires_grad for p in c.parameters()) and not all(p.requires_grad for p in m.parameters())
    c.model.reset_classifier(3)
    assert c(x).shape == (4, 3) and torch.equal(m(x), z)


# --- timm's other ways to the logits
# -------------------------------------------------------------------------------------------------


def block_half(n, dtype):
    "A mask in which no token sees the last half of the patches"
    keep = torch.ones(n, n, dtype=torch.bool)
    keep[:, -8:] = False
    return keep if dtype == torch.bool else torch.zeros(n, n).masked_fill(~keep, -1e4)


@pytest.mark.parametrize(
    'k,dtype,fused',
    [('tora', torch.bool, True), ('tora', torch.float32, False), ('head_only', torch.bool, True)],
)
def test_a_given_mask_holds(k, dtype, fused):
    "At the start the masked model is the pretrained one with that mask; and the user's mask always matters"
    plain, mask, x = tiny_vit(num_classes=4).model, block_half(17, dtype), images()
    plain.cls_token.data.normal_()
    plain.head.weight.data.normal_()
    for b in plain.blocks:
        b.attn.fused_attn = fused
        b.attn.qkv.weight.data.normal_(0, 0.5)
    for o in (mask, mask[None, None].expand(4, 1, -1, -1)):
        z = plain(x, attn_mask=o)
        m = make(model=copy.deepcopy(plain), **KINDS[k])
        assert torch.allclose(m(x, attn_mask=o), z, atol=1e-5) and (m(x) - z).abs().max() > 1e-2


# --- what is frozen stands still
# ----------------------------------------------------------------------------------------------------


class BNLast(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def hybrid():
    "A ViT with BatchNorm in its stem and dropout of every kind"
    m = tiny_vit(
        num_classes=4, drop_path_rate=0.3, proj_drop_rate=0.2, attn_drop_rate=0.2, pos_drop_rate=0.2, drop_rate=0.2
    )
    m.model.patch_embed.norm = nn.Sequential(BNLast(32))
    m.model.patch_embed.norm[0].num_batches_tracked += 3
    return m.eval()


class Awake(Callback):
    "Names of the modules in training mode, batch by batch"

    def before_fit(self):
        self.seen = set()

    def after_pred(self):
        self.seen |= {n for n, o in self.model.named_modules() if self.training and o.training}


@pytest.mark.parametrize('k', ['tora', 'single_adapter'])
def test_the_backbone_stands_still(k, tmp_path):
    "Weights, statistics and logits to the bit; its dropout is off; and the adapters know it again"
    x, plain = images(), hybrid()
    bid, z = backbone_id(plain), plain(x)
    m = make(model=hybrid(), **KINDS[k])
    l = learner(m, [Awake()])
    l.fit_tora(1, 1)
    m.eval()
    assert backbone_id(m) == bid
    assert not [n for n in l.awake.seen if 'adapters' not in n and 'tora' not in n and n not in ('', 'model')]
    save_adapters(m, tmp_path / 'a.safetensors')
    assert torch.equal(load_adapters(hybrid(), tmp_path / 'a.safetensors')(x), m(x))
    assert torch.equal(remove_tora(m)(x), z)


def test_the_backbone_stands_still_in_anybodys_loop():
    m = make(model=hybrid())
    bid = backbone_id(m)
    opt = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        m.train()
        F.cross_entropy(m(images()), torch.arange(4)).backward()
        opt.step()
    assert backbone_id(m) == bid and not any(o.training for o in m.eval().modules())


def net(*ms):
    return nn.Sequential(*ms)


def frozen(m):
    return m.requires_grad_(False)


@pytest.mark.parametrize(
    'layers,head',
    [
        (lambda: [frozen(net(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Dropout())), nn.Linear(8, 4)], '1'),
        # statistics without weights, and layers that are not in one container
        (lambda: [frozen(nn.Conv2d(1, 4, 3)), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(2704, 4)], '3'),
    ],
)
def test_a_frozen_body_stands_still(layers, head):
    l = synth_learner([TRADES(PGD1)], net(*layers()))
    before = state(l.model)
    l.fit(1, 0.1)
    assert changed(l.model, before) == [f'{head}.weight', f'{head}.bias']


# --- models that change their input
# -------------------------------------------------------------------------------------------------------


class InPlace(Wrapper):
    "Normalises as careless code does: in the tensor that it was given"

    def forward(self, x):
        return self.model(x.sub_(0.5).div_(0.5))


def in_place(m):
    return InPlace(m.model)


def test_an_in_place_model_trains_the_same():
    ws = []
    for f in (lambda m: m, in_place):
        dls = synth_dls(32)
        dls.train = dls.train.new(shuffle=False)
        m = f(make(noise=0.1))
        learner(m, dls=dls).fit_tora(1, 1)
        ws.append([p.detach() for p in m.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*ws))


# --- whose file is it?
# --------------------------------------------------------------------------------------------------------------------


def test_files_know_how_images_were_normalised(tmp_path):
    m = make(noise=0.1)
    save_adapters(m, f := tmp_path / 'a.safetensors')
    with pytest.raises(ValueError, match=r'mean \[0.5\].*\[0.4\]'):
        load_adapters(Normalized(tiny_vit(num_classes=4).model, [0.4], [0.5]), f)
    x = images()
    assert torch.equal(load_adapters(tiny_vit(num_classes=4).model, f)(2 * x - 1), m(x))


def test_older_files_are_taken_by_their_hash(tmp_path):
    "And are of the first reading"
    from safetensors.torch import save_file

    m, f = make(noise=0.1), tmp_path / 'a.safetensors'
    save_adapters(m, f)
    with safe_open(f, 'pt') as h:
        ts, about = {k: h.get_tensor(k) for k in h.keys()}, h.metadata()
    of_reading = {o.name for o in fields(Reading)} - {'gate', 'folded'}
    later = {'answer', 'mean', 'std', *of_reading}
    assert later < set(about)
    save_file(ts, f, {k: v for k, v in about.items() if k not in later})
    assert torch.equal(load_adapters(tiny_vit(num_classes=4), f)(images()), m(images()))


# --- a second copy
# --------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_a_new_head_beside_those_that_answer_is_refused():
    m = tora_vit(tiny_vit(num_classes=4))
    with pytest.raises(ValueError, match='remove_tora'):
        unwrap(m).head = nn.Linear(32, 7)
    unwrap(remove_tora(m)).head = nn.Linear(32, 7)
    assert m(torch.rand(2, 1, 28, 28)).shape == (2, 7)
