"Every public function that shows images to a model: images that count to 255, and models that nothing normalises for."

import inspect, tempfile, warnings
import pytest, torch
import matplotlib.pyplot as plt
from package import everything as lib
from robust_nbdev import core, evaluate
from robust_nbdev.attacks import *
from robust_nbdev.core import Normalized, unwrap
from robust_nbdev.test_utils import tiny_vit

Y = torch.arange(8) % 4
PGD1 = PGD(0.01, steps=1)


def images(n=8):
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def saved(m, x):
    with tempfile.TemporaryDirectory() as d:
        lib.save_adv(m, x, Y, PGD1, d)


def gated(f):
    return lambda m, x: f(lib.tora_vit(m), x)


# Functions of a model and images [B,C,H,W]
VIEWS = {
    'attn_cos': lambda m, x: lib.attn_cos(m, x, x),
    'attn_gaps': lambda m, x: lib.attn_gaps(m, x),
    'attn_maps': lambda m, x: lib.attn_maps(m, x),
    'block_outputs': lambda m, x: lib.block_outputs(m, x),
    'choose_scales': lambda m, x: lib.choose_scales(PGD1, m, x, Y, grid=(1.0, 2.0), k=1),
    'choose_target': lambda m, x: lib.choose_target(m, x, Y),
    'class_attention': lambda m, x: lib.class_attention(m, x),
    'feature_cosine': lambda m, x: lib.feature_cosine(m, x, x, clean=m),
    'gate_maps': gated(lambda m, x: lib.gate_maps(m, x)),
    'gate_pictures': gated(lambda m, x: lib.gate_pictures(m, x)),
    'show_gates': gated(lambda m, x: lib.show_gates(m, x[:1])),
    'largest_activations': lambda m, x: lib.largest_activations(m, x),
    'loss_trace': lambda m, x: lib.loss_trace(PGD1, m, x, Y),
    'n_classes': lambda m, x: core.n_classes(m, x),
    'outputs': lambda m, x: core.outputs(m, x),
    'patch_effects': lambda m, x: lib.patch_effects(m, x, lib.patch_cover(x, 0, 'noise', m), lib.patch_size(m, x)),
    'patch_attention': lambda m, x: lib.patch_attention(m, x),
    'plant_massive': lambda m, x: lib.plant_massive(m, x, 'class token'),
    'predict': lambda m, x: lib.predict(m, x),
    'restart_losses': lambda m, x: lib.restart_losses(PGD1, m, x, Y, restarts=1),
    'save_adv': saved,
    'show_adv': lambda m, x: lib.show_adv(m, x[:1], Y[:1], PGD1),
    'self_check': lambda m, x: [warnings.warn(o) for o in lib.self_check(m, x, Y)],
    'topk': lambda m, x: lib.topk(m, x, Y),
    'two_models': lambda m, x: lib.two_models(m, x, Y, lib.Scaled(PGD1, 2.0)),
}
# Functions of a model and a dataset
REPORTS = {
    'corruption_report': lambda m, d: lib.corruption_report(m, d, ['brightness'], [1]).warnings,
    'eps_curve': lambda m, d: lib.eps_curve(m, d, PGD1, [0.01]).warnings,
    'flip_report': lambda m, d: lib.flip_report(m, d, ['brightness']),
    'mask_accuracy': lambda m, d: lib.mask_accuracy(m, d, masks=1, share=0.25),
    'robust_report': lambda m, d: lib.robust_report(m, d, [PGD1]).warnings,
    'Run': lambda m, d: lib.Run(m, d).report().warnings,
    'scale_report': lambda m, d: lib.scale_report(m, d, [lib.Scaled(PGD1, 2.0)]),
    'show_occlusion': lambda m, d: lib.show_occlusion(m, PGD1, d, max_n=2),
    'steps_curve': lambda m, d: lib.steps_curve(m, d, PGD1, [1]).warnings,
}
# What looks at shapes alone, or is a picture of attacks which has the attack's own check
OTHER = set(
    """multiply_adds tora_cost patch_grid patch_size occlusion_for patch_cover explore_masks
    mask_view scale_view class_images
    hunt run_attack check_images Objective""".split()
)


def views():
    "Public functions that take a model and images"
    for home in (lib, core, evaluate):
        for k, o in vars(home).items():
            ours = inspect.isfunction(o) and (o.__module__ or '').startswith('robust_nbdev.') and k[0] != '_'
            if ours and {'model', 'x'} <= set(inspect.signature(o).parameters):
                yield k


def heard(f, *args):
    "What a call warns of, or lists as a warning of its report"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        res = f(*args)
    plt.close('all')
    return [str(o.message) for o in said] + (res if isinstance(res, list) and res and isinstance(res[0], str) else [])


def test_every_function_has_an_entry():
    assert sorted({*views()} - OTHER - {*VIEWS}) == []


# An attack alone gives no number that could be wrong by it
BY_ATTACK = {'loss_trace', 'restart_losses'}


@pytest.mark.parametrize('name', sorted(VIEWS))
def test_images_that_count_to_255_are_refused(name):
    with pytest.raises(ValueError, match=r'must lie in \[0,1\]'):
        VIEWS[name](tiny_vit(num_classes=4), 255 * images())


@pytest.mark.parametrize('name', sorted({**VIEWS} | {**REPORTS}))
def test_a_bare_timm_model_is_noticed_and_no_other(name):
    f = {**VIEWS, **REPORTS}[name]
    given = (images(),) if name in VIEWS else ((images(), Y),)
    bare = unwrap(tiny_vit(num_classes=4))
    says = heard(f, bare, *given)
    assert any('nothing here applies them' in o for o in says) or name in BY_ATTACK
    says = heard(f, tiny_vit(num_classes=4), *given)
    assert not any('nothing here applies them' in o or 'normalises them again' in o for o in says)
