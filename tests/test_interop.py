"With other libraries: our attacks on their models, our models under their attacks, and timm's hub format"

import sys, types
from importlib.util import find_spec
import pytest, timm, torch
from torch import nn
from robust_nbdev import cli
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(0)
    return torch.rand(6, 3, 32, 32, generator=g), torch.arange(6)


ATTACKS = dict(
    pgd=PGD(8 / 255, steps=3),
    fgsm=FGSM(8 / 255),
    l2=PGD(0.5, norm='L2', steps=3),
    apgd=APGD(8 / 255, steps=5),
    apgdt=APGDT(8 / 255, steps=3, targets=2),
    gama=GAMAPGD(8 / 255, steps=3),
    worst=WorstCase([FGSM(8 / 255), PGD(8 / 255, steps=2)]),
)


def check_attack_on(model, x, y, attack):
    "The attack's rules hold on a model that this library did not make"
    before = state_of(model)
    x0 = x.clone()
    x_adv = attack(model, x, y)
    ball = threat_model(8 / 255 if attack.norm != 'L2' else 0.5, attack.norm or 'Linf')
    assert (
        x_adv.shape == x.shape
        and x_adv.dtype == x.dtype
        and 0 <= x_adv.min()
        and x_adv.max() <= 1
        and (ball.size(x_adv - x) <= ball.eps + 1e-5).all()
    )
    assert torch.equal(x, x0) and state_of(model) == before and not torch.equal(x_adv, x)
    return x_adv


# --- Hugging Face transformers
# ----------------------------------------------------------------------------------------------


class Answers(nn.Module):
    "Answers as the models of transformers do: with an object, or a tuple that begins with the logits"

    def __init__(self):
        super().__init__()
        self.net = vit32().model

    def forward(self, pixel_values, return_dict=True):
        z = self.net(pixel_values)
        return types.SimpleNamespace(logits=z, hidden_states=None) if return_dict else (z, None)


@pytest.fixture
def hf():
    torch.manual_seed(0)
    return Answers().eval()


HALF = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def test_a_model_that_returns_an_object_is_refused_with_the_remedy(hf, batch):
    with pytest.raises(TypeError, match=r'Logits\(model'):
        PGD(8 / 255, steps=1)(hf, *batch)
    with pytest.raises(ValueError, match='give mean= and std='):
        Normalized(Logits(hf))


@pytest.mark.slow
def test_attacks_on_a_transformers_vit(batch):
    "The images are normalised as its processor does it"
    tf = pytest.importorskip('transformers')
    torch.manual_seed(0)
    size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    cfg = tf.ViTConfig(**size, image_size=32, patch_size=8, num_labels=10, initializer_range=0.3)
    vit, p, (x, y) = (
        tf.ViTForImageClassification(cfg).eval(),
        tf.ViTImageProcessor(size=dict(height=32, width=32)),
        batch,
    )
    model = Normalized(Logits(vit), p.image_mean, p.image_std)
    for k in ATTACKS:
        check_attack_on(model, x, y, ATTACKS[k])
    x = (x * 255).byte()
    with torch.no_grad():
        z = vit(**p(images=list(x), return_tensors='pt')).logits
        assert torch.allclose(model(x / 255), z, atol=1e-4)


def test_pgd_on_logits_in_an_object_is_that_of_a_plain_function(hf, batch):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = hf

        def forward(self, x):
            return self.m(pixel_values=(x - 0.5) / 0.5).logits

    a, b = [PGD(8 / 255, steps=3)(m, *batch) for m in (Normalized(Logits(hf), **HALF), Plain())]
    assert torch.allclose(a, b, atol=1e-6)


def test_logits_in_a_tuple(hf, batch):
    "`return_dict=False` makes it a tuple, whose first entry is the logits"

    class Tuple(nn.Module):
        def forward(self, x):
            return hf(x, return_dict=False)

    assert torch.equal(Logits(Tuple(), pick=0)(batch[0]), Logits(hf)(batch[0]))


# --- torchvision
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def tv():
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    m = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    ).eval()
    # torchvision starts the head at zero, where every gradient is zero
    nn.init.normal_(m.heads.head.weight)
    return m


@pytest.mark.parametrize('k', ATTACKS)
def test_attacks_on_a_torchvision_vit(tv, batch, k):
    check_attack_on(Normalized(tv, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), *batch, ATTACKS[k])


def test_a_fresh_torchvision_vit_is_flat_and_the_attack_says_so(batch):
    from torchvision.models.vision_transformer import VisionTransformer

    m = VisionTransformer(
        image_size=32, patch_size=8, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    rep = robust_report(Normalized(m, **HALF), batch, [PGD(8 / 255, steps=2)])
    assert any('zero' in str(w) or 'gradient' in str(w) for w in rep.warnings)


# --- RobustBench and torchattacks
# --------------------------------------------------------------------------------------------


class Contract(nn.Module):
    "What RobustBench asks of a model: an `nn.Module` in evaluation mode, images in [0,1], `to(device)`, logits [B,C]"

    def __init__(self, m):
        super().__init__()
        self.m = m

    def forward(self, x):
        assert not self.m.training and x.dtype == torch.float32 and 0 <= x.min() and x.max() <= 1
        z = self.m(x)
        assert z.shape == (len(x), 10)
        return z


def vit32():
    return Normalized(
        timm.create_model(
            'vit_tiny_patch16_224', img_size=32, patch_size=8, num_classes=10, embed_dim=32, depth=1, num_heads=2
        )
    ).eval()


def test_contract_of_robustbench_with_pyautoattack(batch):
    aa = pytest.importorskip('pyautoattack')
    m = Contract(vit32()).to('cpu')
    x, _ = batch
    y = m(x).argmax(1)
    a = aa.AutoAttack(m, norm='Linf', eps=8 / 255, version='custom', attacks=['apgd-ce', 'square'], device='cpu')
    a.apgd.n_iter, a.square.n_queries = 2, 5
    x_adv = a.run_standard_evaluation(x, y, batch_size=3)[0]
    assert x_adv.shape == x.shape and (x_adv - x).abs().max() <= 8 / 255 + 1e-6


@pytest.fixture
def benchmark(monkeypatch):
    """RobustBench's own function; it imports `autoattack`, which is on GitHub alone: pyautoattack, which its metadata
    names, stands in"""
    aa = pytest.importorskip('pyautoattack')
    if not find_spec('robustbench'):
        pytest.skip('robustbench is not installed')
    if not find_spec('autoattack'):

        class AutoAttack(aa.AutoAttack):
            def __init__(self, *a, log_path=None, version='standard', **kw):
                super().__init__(*a, version='custom', attacks=['apgd-ce'], **kw)
                self.apgd.n_iter = 2

            def run_standard_evaluation(self, x, y, bs=250, state_path=None):
                return super().run_standard_evaluation(x, y, batch_size=bs)[0]

        stub, state = types.ModuleType('autoattack'), types.ModuleType('autoattack.state')
        stub.AutoAttack, state.EvaluationState = AutoAttack, object
        monkeypatch.setitem(sys.modules, 'autoattack', stub)
        monkeypatch.setitem(sys.modules, 'autoattack.state', state)
    try:
        import robustbench.eval as e
    except ImportError as err:
        pytest.skip(f'robustbench cannot be imported: {err}')
    return e


def test_benchmark_of_robustbench(benchmark, batch, monkeypatch):
    m = vit32()
    x = batch[0]
    y = m(x).argmax(1)
    y[0] = (y[0] + 1) % 10
    monkeypatch.setattr(benchmark, 'load_clean_dataset', lambda *a: (x, y))
    clean, robust = benchmark.benchmark(
        Contract(m).eval(), n_examples=6, dataset='cifar10', threat_model='Linf', eps=8 / 255, batch_size=3
    )
    assert clean == pytest.approx(5 / 6) and 0 <= robust <= clean


@pytest.mark.parametrize('name', ['PGD', 'APGD'])
def test_torchattacks_on_our_model(batch, name):
    ta = pytest.importorskip('torchattacks')
    m = vit32()
    x, y = batch
    before = [p.detach().clone() for p in m.parameters()]
    kw = dict(FGSM=dict(), PGD=dict(alpha=2 / 255, steps=3), APGD=dict(steps=3))[name]
    x_adv = getattr(ta, name)(m, eps=8 / 255, **kw)(x, y)
    assert (x_adv - x).abs().max() <= 8 / 255 + 1e-6 and 0 <= x_adv.min() and x_adv.max() <= 1
    assert not m.training and all(torch.equal(a, b) for a, b in zip(before, m.parameters()))


# --- timm's hub format
# -------------------------------------------------------------------------------------------------------


def save(m, folder, **kw):
    from timm.models import save_for_hf

    inner = m.model
    stats = dict(mean=tuple(m.mean.flatten().tolist()), std=tuple(m.std.flatten().tolist()))
    save_for_hf(inner, folder, safe_serialization=True, **({'data_config': stats} if kw.get('stats', True) else {}))


def own_vit(**kw):
    return Normalized(
        timm.create_model(
            'vit_tiny_patch16_224',
            img_size=28,
            patch_size=7,
            in_chans=1,
            num_classes=10,
            embed_dim=32,
            depth=2,
            num_heads=2,
        ),
        **{'mean': 0.286, 'std': 0.353, **kw},
    ).eval()


def test_same_logits_after_the_hub_format(tmp_path):
    m = own_vit()
    save(m, tmp_path / 'm')
    m2 = Normalized(timm.create_model(f'local-dir:{tmp_path / "m"}', pretrained=True)).eval()
    x = torch.rand(3, 1, 28, 28)
    assert torch.equal(m(x), m2(x)) and torch.equal(m.mean, m2.mean) and torch.equal(m.std, m2.std)
    assert torch.equal(PGD(0.1, steps=2)(m, x, torch.arange(3)), PGD(0.1, steps=2)(m2, x, torch.arange(3)))


def test_without_statistics_the_format_keeps_those_of_the_architecture(tmp_path):
    m = own_vit()
    save(m, tmp_path / 'm', stats=False)
    assert not torch.equal(Normalized(timm.create_model(f'local-dir:{tmp_path / "m"}', pretrained=True)).mean, m.mean)


PROCESSORS = {
    'squashed': (dict(size=dict(height=72, width=72), resample=3), (72, 1.0, 'bicubic', 'squash')),
    'cropped': (
        dict(size=dict(height=256, width=256), do_center_crop=True, crop_size=dict(height=224, width=224)),
        (224, 0.875, 'bilinear', 'squash'),
    ),
    'shortest edge': (
        dict(size=dict(shortest_edge=256), do_center_crop=True, crop_size=dict(height=224, width=224), resample=3),
        (224, 0.875, 'bicubic', 'center'),
    ),
    'older CLIP': (dict(size=224, crop_size=224, do_center_crop=True, resample=3), (224, 1.0, 'bicubic', 'center')),
    'older ViT': (dict(size=224, resample=2), (224, 1.0, 'bilinear', 'squash')),
    'ConvNeXt': (dict(size=dict(shortest_edge=224), crop_pct=0.875, resample=3), (224, 0.875, 'bicubic', 'center')),
    'large ConvNeXt': (dict(size=dict(shortest_edge=384), crop_pct=0.875, resample=3), (384, 1.0, 'bicubic', 'squash')),
}


@pytest.mark.parametrize('name', PROCESSORS)
def test_images_are_cut_as_the_processor_of_a_model_cuts_them(name):
    cfg, (side, pct, interpolation, mode) = PROCESSORS[name]
    cut = dict(input_size=(3, side, side), interpolation=interpolation, crop_pct=pct, crop_mode=mode)
    assert cli._cut_of_processor(cfg) == cut


def test_a_processor_that_is_not_understood_is_named():
    with pytest.warns(UserWarning, match='not understood'):
        assert cli._cut_of_processor(dict(size=dict(longest_edge=224))) == {}
