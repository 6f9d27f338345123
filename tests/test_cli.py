"`robust-demo` and `robust-eval` as a newcomer types them, and what they are made of."

import argparse, importlib, io, json, os, re, runpy, shlex, signal, subprocess, sys, time, warnings
from contextlib import redirect_stderr, redirect_stdout
import numpy as np, pandas as pd, pytest, timm, torch
from PIL import Image
from fastcore.basics import noop
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.core import Normalized, eps_str, number, unwrap
from robust_nbdev import cli, datasets
from robust_nbdev.cli import *
from robust_nbdev.evaluate import robust_report

HEAD = """import sys, json, runpy
def main(args, cmd='robust-demo'): sys.argv = [cmd,*args]; runpy.run_path(__file__+'_bin/'+cmd, run_name='__main__')
"""
# what the installed script does
COMMAND = "import sys\nfrom robust_nbdev.__main__ import {0}\nsys.exit({0}())\n"


def script(cwd, code, *args):
    """Run `code` as a script, as the installed command is: importing torch takes seconds, so several calls share a
    process"""
    (f := cwd.parent / f'{cwd.name}.py').write_text(HEAD + code)
    b = f.with_name(f.name + '_bin')
    b.mkdir(exist_ok=True)
    for o in ('robust-demo', 'robust-eval'):
        (b / o).write_text(COMMAND.format(o.replace('-', '_')))
    return subprocess.run(
        [sys.executable, f, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore', ROBUST_PROFILE='smoke'),
    )


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    d = tmp_path_factory.mktemp('demo')
    (d / 'settings.ini').write_text('[smoke]\nn_train = 64\nn_valid = 64\n')
    r = script(d, 'main(sys.argv[1:])', *'--profile smoke --eps 8/255 --seed 7 --out here/there'.split())
    assert r.returncode == 0, r.stderr
    return d / 'here' / 'there', r


def test_demo_writes_what_it_says(run):
    out, r = run
    assert {p.relative_to(out).as_posix() for p in out.rglob('*') if p.is_file()} == {
        'robust_demo.png',
        'robust_demo.csv',
        *(
            f'{m}/{f}'
            for m in ('plain', 'robust')
            for f in ('report.json', 'report.csv', 'report.html', 'report.png', 'verdicts.npz', 'predictions.npz')
        ),
    }
    assert min(Image.open(out / 'robust_demo.png').size) > 400 and 'Traceback' not in r.stderr


def test_demo_prints_the_table_of_its_files(run):
    out, r = run
    t = pd.read_csv(out / 'robust_demo.csv')
    assert t.attack.tolist() == [
        'clean',
        'FGSM(8/255)',
        'PGD(8/255, steps=3)',
        'APGD(8/255, steps=3)',
        'worst case',
    ]
    printed = [l for l in r.stdout.splitlines() if re.match(r'\s*(clean|FGSM|PGD|APGD|worst)', l)][-5:]
    assert [l.split()[-2:] for l in printed] == [[f'{a:.1f}', f'{b:.1f}'] for a, b in zip(t.plain, t.robust)]
    for m in ('plain', 'robust'):
        rows = json.loads((out / m / 'report.json').read_text())['rows']
        assert [f"{100 * o['accuracy']:.1f}" for o in rows] == [f'{o:.1f}' for o in t[m]]
        assert all(o['n'] == 64 and o['seed'] == 7 for o in rows)
    assert 'eps=8/255, n=64, seed=7' in r.stdout and 'smoke' not in r.stderr


def test_a_second_run_gives_the_same_table(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run[0].parents[1])
    run_demo(demo_settings('smoke', 8 / 255, None, 7, None), tmp_path, bar=False, say=noop)
    assert (tmp_path / 'robust_demo.csv').read_text() == (run[0] / 'robust_demo.csv').read_text()


# --- robust-eval: attacks as text

SMALL = 'vit_tiny_patch16_224(patch_size=7, embed_dim=48, depth=1, num_heads=2)'


def small(n=10, c=1, seed=0):
    torch.manual_seed(seed)
    return Normalized(
        timm.create_model(
            'vit_tiny_patch16_224',
            img_size=28,
            patch_size=7,
            in_chans=c,
            num_classes=n,
            embed_dim=48,
            depth=1,
            num_heads=2,
        ),
        [0.3] * c,
        [0.4] * c,
    ).eval()


@pytest.mark.parametrize(
    'text,attacks',
    [
        ('clean , FGSM,pgd20', [None, FGSM(8 / 255), PGD(8 / 255, steps=20)]),
        ('apgd-l2-margin,\n apgd', [APGD(0.5, norm='L2', loss=margin), APGD(8 / 255)]),
        ('pgd(4/255, rand=False, alpha=1e-2)', [PGD(4 / 255, rand=False, alpha=0.01)]),
        ('PGD(.5, norm="L2", loss=margin)', [PGD(0.5, norm='L2', loss=margin)]),
    ],
)
def test_attacks_are_read(text, attacks):
    assert parse_attacks(text) == attacks
    # what a report prints can be typed
    assert parse_attacks(', '.join(map(repr, filter(None, attacks))).replace("'", '"')) == [a for a in attacks if a]


def test_eps_and_norm_of_the_command_line():
    assert parse_attacks('fgsm,PGD(2/255),PGD(steps=2),pgd_l2', 0.1) == [
        FGSM(0.1),
        PGD(2 / 255),
        PGD(0.1, steps=2),
        PGD(0.5, norm='L2'),
    ]
    assert parse_attacks('fgsm,pgd_linf,PGD(norm="Linf")', 1.0, 'L2') == [
        FGSM(1.0, norm='L2'),
        PGD(8 / 255),
        PGD(8 / 255),
    ]


@pytest.mark.parametrize('eps', [12.75 / 255, 1 / 3000])
def test_a_printed_eps_can_be_typed(eps):
    assert number(eps_str(eps)) == pytest.approx(eps, rel=1e-4)


@pytest.mark.parametrize(
    'text,says',
    [
        ('pgd20_nope', 'losses ce, margin, cw'),
        ('PGD(8)', '8/255'),
        ('PGD(step=3)', 'steps'),
        ('fgsm5', 'FGSM'),
        ('', 'expected'),
        ('PGD(eps=open("x"))', 'open'),
        ('PGD(2**9)', 'neither'),
        ('fgsm],[pgd', 'list of attacks'),
        ('(' * 3000, 'cannot be read'),
    ],
)
def test_bad_attacks_are_refused_in_words(text, says):
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) as e:
        parse_attacks(text)
    assert '\n' not in str(e.value).strip()


def test_every_attack_of_the_package_has_a_name():
    from robust_nbdev.aas import AAS, GapScaled, Scaled
    from robust_nbdev.afat import Occlusion

    got = parse_attacks('aas20, Occlusion(share=.2), gapscaled, Scaled(PGD(2/255), .5)', 4 / 255)
    inside = PGD(4 / 255)
    assert got == [AAS(inside.but(steps=20)), Occlusion(share=0.2), GapScaled(inside), Scaled(PGD(2 / 255), 0.5)]
    from package import everything
    from robust_nbdev.aas import Around
    from robust_nbdev.patch_attacks import PatchAttack

    bases = (AttackBase, Attack, PatchAttack, Wraps, Transfer, Around)
    known = [c for c in vars(everything).values() if isinstance(c, type) and issubclass(c, AttackBase)]
    assert {c.__name__ for c in known if c not in bases} <= {*attack_types()}


OWN = """
from dataclasses import dataclass
from robust_nbdev.attacks import AttackBase

@dataclass(frozen=True, repr=False)
class Scale(AttackBase):
    amount: float = 0.5
    def make(self, model, x, y, target, seed):
        return x * (1 - self.amount)

def dark(model, x, y, *, seed=0):
    return x * 0.5

def loss(z, y):
    return -z.gather(1, y[:, None])[:, 0]

def shout(text):
    raise SystemExit(text)

def short(x):
    return x

def bright(model, x, y, *, seed=0):
    return x + 1
"""


def test_attacks_of_ones_own_module(tmp_path, monkeypatch):
    (tmp_path / 'of_my_own').mkdir()
    (tmp_path / 'of_my_own' / 'attacks.py').write_text(OWN)
    monkeypatch.chdir(tmp_path)
    a, b, c, d = parse_attacks(
        'of_my_own.attacks:Scale(.1),of_my_own.attacks:dark,pgd5,PGD(steps=2, loss=of_my_own.attacks:loss)', 0.1
    )
    x = torch.rand(2, 1, 4, 4)
    assert repr(a) == 'Scale(amount=0.1)' and torch.equal(a(lambda x: x, x), x * 0.9) and c == PGD(0.1, steps=5)
    assert b.__name__ == 'dark' and d.loss.__name__ == 'loss'
    for text, says in {
        'of_my_own.attacks:shout("x")': 'no class of attacks, so it is not called',
        'of_my_own.attacks:Nope(1)': "has no 'Nope'",
        'of_my_own.other:Scale(1)': 'cannot be imported',
        'of_my_own.attacks:Scale(amont=1)': 'it takes amount',
        'os:system': 'an attack is called as',
    }.items():
        with pytest.raises((ValueError, TypeError), match=re.escape(says)):
            parse_attacks(text)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    "A module in the working folder"
    name = f'mine_{tmp_path.name}'
    (tmp_path / f'{name}.py').write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.path.remove(str(tmp_path))


def test_errors_of_a_command_have_names_and_no_addresses(mine):
    for attack, says in dict(short='which short does not accept', bright='bright returned pixels from').items():
        with pytest.raises(SystemExit) as e:
            robust_eval(model='fashion_mnist_vit', attacks=f'{mine}:{attack}', n=10, profile='smoke', out='o')
        assert says in e.value.code and '0x' not in e.value.code and e.value.code.startswith('robust-eval: ')


# --- robust-eval: models


def forms(m, d):
    sd = m.state_dict()
    net = {k.removeprefix('model.'): v for k, v in sd.items() if k.startswith('model.')}
    ddp, comp = ({f'{p}{k}': v for k, v in sd.items()} for p in ('module.', '_orig_mod.'))
    for k, o in dict(
        net=net,
        comp=dict(model={f'module.{k}': v for k, v in comp.items()}, opt={'state': {}}),
        train=dict(state_dict=ddp, args=argparse.Namespace(a=1), epoch=3),
    ).items():
        torch.save(o, d / f'{k}.pth')
    ema = {f'module.{k}': v for k, v in sd.items()}
    torch.save({**ema, 'n_averaged': torch.tensor(3)}, d / 'ema.pt')
    from safetensors.torch import save_file

    save_file({k: v.contiguous().clone() for k, v in comp.items()}, d / 'st.safetensors')
    return sorted(o for o in d.iterdir())


def test_every_form_of_checkpoint_gives_the_same_outputs(tmp_path):
    m = small()
    x = torch.rand(3, 1, 28, 28)
    want = m(x)
    fs = forms(m, tmp_path)
    assert len(fs) == 5
    for f in fs:
        kw = dict(mean=[0.3], std=[0.4]) if f.stem == 'net' else {}
        got, line, _ = eval_model(SMALL, f, size=28, **kw)
        assert torch.allclose(got(x), want, atol=1e-6) and f.name in line, f
    # timm's statistics instead
    assert not torch.allclose(eval_model(SMALL, tmp_path / 'net.pth', size=28)[0](x), want, atol=1e-3)


def test_checkpoints_that_do_not_fit_say_what(tmp_path):
    torch.save(small().state_dict(), f := tmp_path / 'a.pth')
    with pytest.raises(
        ValueError,
        match=(
            r'a.pth does not fit VisionTransformer: .*missing: .*shaped: .*patch_embed.proj.weight \[48, 1, 7, 7\]'
            r' where the model has'
        ),
    ):
        eval_model('vit_tiny_patch16_224', f, size=28)
    with pytest.raises(ValueError, match='head.weight'):
        eval_model(SMALL, f, size=28, n_classes=5)
    with pytest.raises(ValueError, match='unknown'):
        eval_model('resnet18', f)
    with pytest.raises(FileNotFoundError, match='no checkpoint'):
        eval_model(SMALL, tmp_path / 'b.pth')
    for name, o in {'c.pth': b'', 'd.safetensors': b'garbage' * 99}.items():
        (g := tmp_path / name).write_bytes(o)
        with pytest.raises(ValueError, match='not a file of weights'):
            eval_model(SMALL, g)
    torch.save(dict(epoch=1), g := tmp_path / 'e.pth')
    with pytest.raises(ValueError, match='holds no state dict'):
        eval_model(SMALL, g)


class Evil:
    def __reduce__(self):
        return (os.mkdir, ('evil_was_here',))


def test_nothing_in_a_checkpoint_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(dict(state_dict=small().state_dict(), x=Evil()), f := tmp_path / 'a.pth')
    with pytest.raises(ValueError, match='not a file of weights'):
        eval_model(SMALL, f)
    assert not (tmp_path / 'evil_was_here').exists()


def test_timm_names():
    for spec, says in {
        'cifar10_vit_robst': 'near: cifar10_vit_robust,',
        'models/nowhere': 'no folder models/nowhere',
        'resnet18(nope=1)': 'nope',
        'resnet18(': 'name',
        'vit_tiny_patch16_224(patch_size=open)': 'open',
        'vit_tiny_patch16_224.nope': 'augreg',
    }.items():
        with pytest.raises(ValueError, match=re.escape(says)):
            timm_model(spec)
    assert (
        unwrap(
            timm_model(
                'swin_tiny_patch4_window7_224(depths=[1,1], embed_dim=12, num_heads=[1,2])', size=64, num_classes=3
            )
        ).num_classes
        == 3
    )
    a, b, c = (eval_model('resnet18', seed=s, classes=3)[0].state_dict()['model.conv1.weight'] for s in (1, 1, 2))
    # so that a report on random weights resumes
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.fixture
def folder(tmp_path):
    g = np.random.default_rng(0)
    for i in range(24):
        (f := tmp_path / 'data' / 'ab'[i % 2] / f'{i}.png').parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(g.integers(0, 256, (28, 28, 3), dtype=np.uint8)).save(f)
    return tmp_path / 'data'


def evaluate(model, data, out, attacks='fgsm', **kw):
    ks = dict(eps=0.02, size=28) | kw
    mk = {
        k: ks.pop(k)
        for k in ('checkpoint', 'n_classes', 'overwrite', 'mean', 'std', 'pct', 'interp', 'crop_mode', 'valid')
        if k in ks
    }
    return run_eval(
        eval_settings('smoke', data=str(data), device='cpu', **ks),
        parse_attacks(attacks, ks['eps']),
        model,
        out=out,
        **mk,
    )


def test_folders(folder, tmp_path):
    rep = evaluate(SMALL, folder, tmp_path / 'o')
    assert rep.meta['n'] == 24 and 'data, all 24 images' in rep.meta['title']
    assert 'random weights' in (tmp_path / 'o' / 'report.json').read_text()
    rep = evaluate(SMALL, folder, None, n=10)
    assert rep.meta['n'] == 10 and '10 of the 24 images, balanced over classes, seed 42' in rep.meta['title']
    with pytest.raises(ValueError, match='25 images asked for, 24 exist'):
        evaluate(SMALL, folder, None, n=25)
    (new := folder.with_name('with_val')).mkdir()
    folder.rename(new / 'val')
    rep = evaluate(SMALL, new, None)
    assert 'all 24 images of the part val' in rep.meta['title'] and not any('folder train' in w for w in rep.warnings)
    (new / 'val').rename(folder)
    new = folder.with_name('only_train')
    new.mkdir()
    folder.rename(new / 'train')
    assert any('folder train' in w for w in evaluate(SMALL, new, None).warnings)


def test_the_report_is_the_one_that_robust_report_gives(tmp_path):
    m = small()
    torch.save(m.state_dict(), f := tmp_path / 'm.pth')
    rep = evaluate(SMALL, 'fashion_mnist', tmp_path / 'o', 'pgd3', checkpoint=f, n=1000)
    src = datasets.embedded_fashion()
    x, y = src.splits['test']
    want = robust_report(
        m,
        (torch.from_numpy(x)[:, None].float() / 255, torch.from_numpy(y)),
        [PGD(0.02, steps=3)],
        seed=rep.meta['seed'],
    )
    assert rep.df.accuracy.tolist() == want.df.accuracy.tolist() and all(
        np.array_equal(rep.verdicts[k], want.verdicts[k]) for k in want.verdicts
    )
    with pytest.raises(ValueError, match='differs in fingerprint'):
        evaluate(SMALL, 'fashion_mnist', tmp_path / 'o', 'fgsm', n=1000)


def test_a_model_with_fewer_outputs_than_the_images_have_classes(tmp_path):
    "No option helps here, so none is advised"
    d = photos(tmp_path / 'd', ('bag', 'coat', 'shoe'), size=32)
    torch.save(timm_like().state_dict(), tmp_path / 'vit.pth')
    with pytest.raises(ValueError, match='2 outputs and the images have 3 classes.*leave images of 1 classes out$'):
        evaluate(SPEC, d, None, checkpoint=tmp_path / 'vit.pth', size=32)


def test_classes_of_model_and_images(folder):
    with pytest.raises(ValueError, match='10 outputs and the images have 2 classes.*--n-classes 10'):
        evaluate('test_resnet(num_classes=10)', folder, None)
    assert evaluate('test_resnet', folder, None, n_classes=10).meta['n'] == 24
    with pytest.raises(ValueError, match='cannot take images'):
        evaluate('vit_tiny_patch16_224(depth=1, img_size=32)', folder, None)
    new = folder.with_name('in')
    new.mkdir()
    for o, k in zip('ab', ('n02102040', 'n01440764')):
        (folder / o).rename(new / k)
    rep = evaluate('test_resnet(num_classes=1000)', new, None)
    assert 'the 2 of its 1000 outputs' in rep.meta['title']
    net, _ = of_imagenet(timm_model('resnet18').eval(), ['n02102040', 'tench'])
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(net(x), net.model(x)[:, [217, 0]])


def test_fastai_export(folder, tmp_path):
    from fastai.vision.all import ImageDataLoaders, Learner, Normalize, CrossEntropyLossFlat

    dls = ImageDataLoaders.from_folder(
        folder,
        valid_pct=0.2,
        seed=0,
        bs=4,
        num_workers=0,
        device='cpu',
        batch_tfms=[Normalize.from_stats([0.2] * 3, [0.7] * 3)],
    )
    net = small(2, 3).model
    learn = Learner(dls, net, loss_func=CrossEntropyLossFlat())
    learn.path = tmp_path
    learn.export('m.pkl')
    got, line, vocab = eval_model(checkpoint=tmp_path / 'm.pkl')
    x = torch.rand(3, 3, 28, 28)
    assert (
        torch.allclose(got(x), net.eval()((x - 0.2) / 0.7), atol=1e-6) and list(vocab) == ['a', 'b'] and 'm.pkl' in line
    )
    rep = evaluate(None, folder, None, checkpoint=tmp_path / 'm.pkl')
    assert rep.meta['n'] == 24 and not any('calls its' in w for w in rep.warnings)
    (folder / 'a').rename(folder / 'c')
    with pytest.raises(ValueError, match='not among those of the model: c; the model also has a.*--n-classes 2'):
        evaluate(None, folder, None, checkpoint=tmp_path / 'm.pkl')
    said = evaluate(None, folder, None, checkpoint=tmp_path / 'm.pkl', n_classes=2).warnings
    assert any('calls some otherwise: b (the images: c)' in w or 'a (the images: b)' in w for w in said)
    for kw in (dict(model='resnet18'), dict(pretrained=True)):
        with pytest.raises(ValueError, match='whole model'):
            eval_model(checkpoint=tmp_path / 'm.pkl', **kw)
    (tmp_path / 'bad.pkl').write_bytes(b'abc')
    with pytest.raises(ValueError, match='cannot be opened as a Learner'):
        eval_model(checkpoint=tmp_path / 'bad.pkl')


def test_statistics_for_a_learner_that_has_none(tmp_path):
    "They are used, one without the other is not, and for a model that has its own they are refused"
    from fastai.vision.all import CrossEntropyLossFlat, Learner

    dls = datasets.fashion_mnist(n_train=32, n_valid=32, bs=32)
    net = small().model
    Learner(dls, net, loss_func=CrossEntropyLossFlat(), path=tmp_path).export('m.pkl')
    x = torch.rand(2, 1, 28, 28)
    got = eval_model(checkpoint=tmp_path / 'm.pkl', mean=[0.2], std=[0.7])[0]
    assert torch.allclose(got(x), net.eval()((x - 0.2) / 0.7), atol=1e-5)
    got = eval_model(checkpoint=tmp_path / 'm.pkl', std=[0.7])[0]
    assert got.std.item() == pytest.approx(0.7)
    with pytest.raises(ValueError, match='mean and std of its own'):
        eval_model('fashion_mnist_vit', std=[0.7])


def test_a_learner_of_fastai_is_shown_images_cut_as_it_cut_them(tmp_path):
    from fastai.vision.all import Resize, ResizeMethod

    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    by_fastai(d, tmp_path, item_tfms=Resize((32, 48), ResizeMethod.Squish), batch_tfms=[])
    rep = evaluate(None, d, None, checkpoint=tmp_path / 'm.pkl', size=None)
    assert 'cut to 32x48 (crop_pct 1, bilinear, squash)' in rep.meta['title']


def test_a_learner_is_shown_images_of_the_size_it_was_trained_on(tmp_path):
    "And not of the size that timm knows its network by; in the same way of cutting, with the numbers of the Learner"
    from fastai.vision.all import Learner, accuracy, nn

    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    net, how = timm.create_model('test_resnet', num_classes=2), dict(bs=6, num_workers=0, device='cpu')
    dls = datasets.image_dls(d, size=48, pct=0.7, interp='bicubic', valid='holdout', n_valid=6, **how)
    learn = Learner(dls, net, loss_func=nn.CrossEntropyLoss(), metrics=accuracy, path=tmp_path)
    learn.export('m.pkl')
    rep = evaluate(None, d, None, checkpoint=tmp_path / 'm.pkl', size=None, valid='holdout', n=6)
    assert 'cut to 48x48 (crop_pct 0.7, bicubic, center)' in rep.meta['title']
    assert rep.df.accuracy[0] == pytest.approx(learn.validate()[1], abs=1e-5)
    assert 'cut to 64x64' in evaluate(None, d, None, checkpoint=tmp_path / 'm.pkl', size=64).meta['title']


def by_fastai(d, path, **kw):
    "A Learner on a folder, exported"
    from fastai.vision.all import ImageDataLoaders, Learner, nn

    dls = ImageDataLoaders.from_folder(d, valid_pct=0.5, seed=0, bs=6, num_workers=0, device='cpu', **kw)
    learn = Learner(dls, timm.create_model('test_resnet', num_classes=2), loss_func=nn.CrossEntropyLoss(), path=path)
    learn.export('m.pkl')
    return learn


def test_a_learner_that_resizes_in_batches_is_shown_the_size_of_its_batches(tmp_path):
    "fastai's presizing"
    from fastai.vision.all import Resize, aug_transforms

    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    learn = by_fastai(d, tmp_path, item_tfms=Resize(64), batch_tfms=aug_transforms(size=32))
    assert learn.dls.valid.one_batch()[0].shape[-2:] == (32, 32)
    rep = evaluate(None, d, None, checkpoint=tmp_path / 'm.pkl', size=None)
    assert 'cut to 32x32' in rep.meta['title'] and 'center' in rep.meta['title']


def test_a_vit_is_shown_its_own_size_whatever_its_items_have(tmp_path):
    "Images cut to 64, then to the 32 of the network in batches, or by something that is not known"
    net = timm_like()
    found = cli.Found(Normalized(net, 0.5, 0.5), '', fit=datasets.CenterFit(64))
    assert cli._trained_at(found) == 32


def test_padding_that_is_not_repeated_is_said(tmp_path):
    from fastai.vision.all import Resize, ResizeMethod

    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    by_fastai(d, tmp_path, item_tfms=Resize(32, ResizeMethod.Pad), batch_tfms=[])
    with pytest.warns(UserWarning, match='pads images.*the middle is cropped: robust-eval --crop-mode squash'):
        rep = evaluate(None, d, None, checkpoint=tmp_path / 'm.pkl', size=None)
    assert 'cut to 32x32' in rep.meta['title']


def test_a_traceback_where_it_is_asked_for(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match='robust-eval: no attack'):
        robust_eval(model='resnet18', attacks='nothing', out=str(tmp_path))
    monkeypatch.setenv('ROBUST_TRACEBACK', '1')
    with pytest.raises(ValueError, match='no attack'):
        robust_eval(model='resnet18', attacks='nothing', out=str(tmp_path))


# --- checkpoints and classes as people have them


SIX = ('bag', 'coat', 'dress', 'shirt', 'shoe', 'boot')


def photos(d, classes, n=6, size=28):
    "Folders of grey pictures: the brightness tells the class, and every third picture is of another class"
    for c in classes:
        (d / c).mkdir(parents=True)
        for i in range(n):
            level = SIX.index(c) if i % 3 else (SIX.index(c) + 1) % 6
            Image.new('RGB', (size, size), (40 * level + 10 + i,) * 3).save(d / c / f'{i}.png')
    return d


class Brightness(torch.nn.Module):
    "Six outputs: how near the mean is to the grey of each class, in the order of `order`"

    def __init__(self, order):
        super().__init__()
        self.grey = torch.nn.Parameter((40.0 * torch.tensor(order) + 12.5) / 255)

    def forward(self, x):
        return -((x.mean((1, 2, 3))[:, None] - self.grey) ** 2) * 100


def exported(folder, path, **kw):
    "A Learner of `Brightness` on a folder, exported"
    from fastai.vision.all import CrossEntropyLossFlat, Learner

    dls = datasets.image_dls(folder, size=28, bs=4, num_workers=0, device='cpu', batch_tfms=None, **kw)
    learn = Learner(dls, Brightness([SIX.index(o) for o in dls.vocab]), loss_func=CrossEntropyLossFlat(), path=path)
    learn.export('few.pkl')
    return learn


def test_a_folder_without_one_of_the_classes(tmp_path):
    "Names decide, and only classes of the images can be predicted: two shoes as bright as boots are right now"
    exported(photos(tmp_path / 'train', SIX), tmp_path)
    few = photos(tmp_path / 'few', [o for o in SIX if o != 'boot'])
    rep = evaluate(None, few, None, checkpoint=tmp_path / 'few.pkl')
    assert rep.df.accuracy[0] == pytest.approx(22 / 30, abs=1e-6) and rep.meta['n'] == 30
    assert 'the 5 of its 6 outputs for these classes (not boot)' in rep.meta['title']
    assert not any('classes' in w for w in rep.warnings)
    # the advice of before gave another number
    with pytest.raises(ValueError, match='not among those of the model: hat; the model also has bag, boot.*classes 6'):
        (few / 'bag').rename(few / 'hat')
        evaluate(None, few, None, checkpoint=tmp_path / 'few.pkl')


def test_two_names_of_one_class_are_refused():
    "Folders tench and n01440764 would be two outputs with the same logit"
    net = timm_model('resnet18').eval()
    one = 'one class of the model: tench and n01440764'
    with pytest.raises(ValueError, match=one):
        of_imagenet(net, ['tench', 'n01440764', 'golden_retriever'])
    with pytest.raises(ValueError, match=one):
        cli.outputs_by_name(net, ['tench', 'n01440764'], ['church', 'tench'])
    with pytest.raises(ValueError, match='one place in vocab, these have several: n01440764'):
        cli.outputs_by_name(net, ['tench', 'church'], ['tench', 'n01440764', 'church'])


def test_images_of_the_training_are_recognised(tmp_path):
    "And with --valid holdout those are taken that were held out, as the Learner's own validation does"
    d = photos(tmp_path / 'train', SIX)
    learn = exported(d, tmp_path)
    rep = evaluate(None, d, None, checkpoint=tmp_path / 'few.pkl')
    assert any('trained on 33 of these 36 images' in w and '--valid holdout' in w for w in rep.warnings)
    rep = evaluate(None, d, None, checkpoint=tmp_path / 'few.pkl', valid='holdout')
    x, y = learn.dls.valid.one_batch()
    assert rep.meta['n'] == len(learn.dls.valid_ds) == 3 and not any('trained' in w for w in rep.warnings)
    assert rep.df.accuracy[0] == pytest.approx((learn.model(x).argmax(1) == y).float().mean().item(), abs=1e-5)
    assert '(without 33 trained on), all 3 images' in rep.meta['title']


def test_images_of_the_training_are_recognised_when_the_folder_has_changed(tmp_path):
    "Another choice of a tenth of the folder would be of images that were trained on"
    d = photos(tmp_path / 'train', SIX)
    held = [*exported(d, tmp_path).dls.valid_ds.files]
    next(f for f in d.rglob('*.png') if str(f.relative_to(d)) not in held).unlink()
    Image.new('RGB', (28, 28)).save(d / SIX[0] / 'new.png')
    rep = evaluate(None, d, None, checkpoint=tmp_path / 'few.pkl', valid='holdout')
    assert sorted(rep.per_image().file) == sorted(held) and '(without 32 trained on, 1 others)' in rep.meta['title']
    moved = d.rename(tmp_path / 'moved')
    assert evaluate(None, moved, None, checkpoint=tmp_path / 'few.pkl', valid='holdout').meta['n'] == 3


def test_a_folder_that_was_not_trained_on_has_nothing_held_out(tmp_path):
    "Its photos have the names of others: they may be copies of another size, which is said"
    exported(photos(tmp_path / 'train', SIX), tmp_path)
    other = photos(tmp_path / 'other', SIX, n=5, size=40)
    (said,) = [o for o in evaluate(None, other, None, checkpoint=tmp_path / 'few.pkl').warnings if 'trained' in o]
    assert 'of these 30 images have the folder and the name' in said and 'and another size' in said
    with pytest.raises(ValueError, match='of these 30 images none was held out .* 0 were trained on'):
        evaluate(None, other, None, checkpoint=tmp_path / 'few.pkl', valid='holdout')


def test_files_of_learn_save(tmp_path):
    "With the optimiser and without"
    from robust_nbdev.test_utils import synth_learner

    learn = synth_learner(path=tmp_path)
    learn.create_opt()
    learn.save('all')
    learn.save('weights', with_opt=False)
    want = unwrap(learn.model).state_dict()
    for f in ('all', 'weights'):
        sd, mean, std = read_checkpoint(tmp_path / 'models' / f'{f}.pth')
        assert all(torch.equal(sd[k], v) for k, v in want.items()) and set(sd) == set(want)


def test_a_pickled_module_is_not_opened_and_the_cure_is_named(tmp_path):
    torch.save(small(), f := tmp_path / 'whole.pth')
    with pytest.raises(ValueError, match=r"pickled objects \(robust_nbdev.*weights_only=False.*m.state_dict\(\)") as e:
        eval_model(SMALL, f)
    assert '\x1b' not in str(e.value) and '\n' not in str(e.value)


def test_folders_of_hugging_face(tmp_path):
    timm_net = timm_like()
    timm.models.save_for_hf(
        timm_net,
        tmp_path / 'timm',
        model_args=dict(img_size=32, **TINY),
        model_config=dict(num_classes=2, label_names=['b', 'a'], input_size=[3, 32, 32]),
    )
    x = torch.rand(2, 3, 32, 32)
    net, line, vocab = eval_model(str(tmp_path / 'timm'))
    assert torch.allclose(net(x), timm_net((x - 0.5) / 0.5), atol=1e-5) and vocab == ['b', 'a']
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ValueError, match='no config.json'):
        eval_model(str(tmp_path / 'empty'))


def test_a_checkpoint_of_another_size(tmp_path):
    "Without --size the images get the size of the weights; with it the position embedding is resized, which is said"
    net = timm_like(64)
    torch.save(net.state_dict(), f := tmp_path / 'm.pth')
    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    rep = evaluate(SPEC, d, None, checkpoint=f, size=None)
    assert 'cut to 64x64' in rep.meta['title'] and 'resized' not in rep.meta['title']
    rep = evaluate(SPEC, d, None, checkpoint=f, size=32)
    assert (
        'position embedding resized from 64 to 32 pixels' in rep.meta['title'] and 'cut to 32x32' in rep.meta['title']
    )
    net.set_input_size(img_size=(32, 32))
    got = eval_model(SPEC, f, size=32)[0]
    assert cli.fixed_size(got) == 64
    got, _ = cli._at_size(got, '', 32)
    x = torch.rand(2, 3, 32, 32)
    assert torch.allclose(got(x), net.eval()((x - 0.5) / 0.5), atol=1e-5)


def test_models_of_two_sizes_are_compared_at_that_of_the_first(tmp_path):
    "Which is said of the one whose position embedding is resized, and its accuracy is that of robust-eval at this size"
    torch.manual_seed(0)
    for side in (32, 64):
        torch.save(timm_like(side).state_dict(), tmp_path / f'at{side}.pth')
    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    s = eval_settings('smoke', data=str(d), eps=0.02, device='cpu')
    found = run_compare(s, [f'{SPEC}@{tmp_path}/at{side}.pth' for side in (32, 64)], [FGSM(0.02)])
    assert any('at64: ' in o and 'resized from 64 to 32 pixels' in o for o in found.warnings)
    assert not any('at32: ' in o and 'resized' in o for o in found.warnings)
    rep = evaluate(SPEC, d, None, checkpoint=tmp_path / 'at64.pth', size=32)
    assert rep.df.accuracy[0] == pytest.approx(found.df.loc['at64', 'clean'], abs=1e-5)


def test_without_a_network_it_ends_at_once(monkeypatch):
    "Weights that are nowhere: no retries, one line"
    from huggingface_hub import constants

    monkeypatch.setattr(cli, '_online', lambda url: False)
    asked = []
    real = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda *a, **k: asked.append(constants.HF_HUB_OFFLINE) or real(*a, **k))
    t = time.time()
    with pytest.raises(OSError, match=r'weights of vit_tiny_patch16_224\..* cannot be had.*give --checkpoint'):
        timm_model('vit_tiny_patch16_224.augreg_in21k_ft_in1k', pretrained=True)
    assert time.time() - t < 20 and asked == [True] and not constants.HF_HUB_OFFLINE
    with pytest.raises(OSError, match=r'^hf-hub:nobody/nothing cannot be had from the Hugging Face Hub'):
        timm_model('hf-hub:nobody/nothing')
    assert asked == [True, True] and not constants.HF_HUB_OFFLINE


# --- how images are cut to size


TINY = dict(patch_size=8, depth=1, embed_dim=24, num_heads=2)
SPEC = 'vit_tiny_patch16_224(patch_size=8, depth=1, embed_dim=24, num_heads=2)'


def timm_like(side=32, **cfg):
    "A small timm model whose configuration is what a pretrained one's would be"
    m = timm.create_model('vit_tiny_patch16_224', img_size=side, num_classes=2, **TINY)
    m.pretrained_cfg = {**m.pretrained_cfg, 'input_size': (3, 32, 32), **cfg}
    return m.eval()


def wide(d):
    "Two class folders of large images whose rim is white"
    for c in 'ab':
        (d / c).mkdir(parents=True)
        a = np.random.default_rng(ord(c)).integers(0, 200, (96, 128, 3)).astype(np.uint8)
        a[:8] = a[-8:] = 255
        Image.fromarray(a).save(d / c / '0.png')
    return d


def test_the_models_own_configuration_decides(tmp_path):
    cfg = dict(crop_pct=0.9, interpolation='bicubic', crop_mode='squash')
    from timm.data import create_transform, resolve_model_data_config

    m, d = timm_like(**cfg), wide(tmp_path / 'd')
    dl, line = eval_images(d, Normalized(m), device='cpu')
    want = create_transform(**{**resolve_model_data_config(m), 'mean': (0.0,) * 3, 'std': (1.0,) * 3})
    x = dl.one_batch()[0]
    ref = torch.stack([want(Image.open(d / c / '0.png')) for c in 'ab'])
    assert (x - ref).abs().mean() < 0.03 and 'crop_pct 0.9, bicubic' in line
    other, _ = eval_images(d, Normalized(m), device='cpu', pct=0.5, crop_mode='center')
    assert (other.one_batch()[0] - ref).abs().mean() > 0.08


# --- commands as typed


def typed(d, cmd, line):
    "Status, words and output of a command line in the folder `d`; in this process, since torch takes seconds to import"
    (f := d.with_name(f'{d.name}_bin') / cmd).parent.mkdir()
    f.write_text(COMMAND.format(cmd.replace('-', '_')))
    err, out, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as mp, redirect_stderr(err), redirect_stdout(out):
        mp.chdir(d)
        mp.setattr(sys, 'argv', [cmd, *shlex.split(line)])
        try:
            runpy.run_path(str(f), run_name='__main__')
        except SystemExit as e:
            code = e.code
            if isinstance(code, str):  # which the interpreter would print
                err.write(code)
                code = 1
    return code, err.getvalue(), out.getvalue()


BAD = {
    'robust-demo': {
        '--eps 8': '8/255',
        '--eps 0': 'above 0',
        '--eps abc': 'abc',
        '--eps nan': 'nan',
        '--epochs 0': 'at least 1, got 0',
        '--profile nope': 'nope',
        '--device nope': 'nope',
        '--seed 99999999999999999999': '99999999999999999999',
        '--out afile': 'afile',
        '--nonsense 1': 'nonsense',
    },
    'robust-eval': {
        '': '--model NAME',
        '--model resnet18 --data camvid_not': 'fashion_mnist, cifar10',
        '--model resnet18 --data empty': 'no images',
        '--model resnet18 --attacks pgdd': 'there are: clean, ',
        '--model resnet18 --attacks PGD(1/2/3)': 'got 1 / 2 / 3',
        '--model resnet18 --crop-mode border': 'squash',
        '--model resnet18 --crop-pct 2': 'pct',
        '--model resnet18 --norm L7': 'Linf',
        '--model resnet18 --n 0': 'at least 1',
        '--model resnet18 --checkpoint no.pth': 'no.pth',
        '--model resnet18 --checkpoint a.pth --pretrained': 'choose one',
        '--model resnet18 --out afile': 'is a file',
        '--model resnet18 --mean 1,2': 'one per channel (1), got 2',
    },
}


@pytest.mark.parametrize('cmd,line,says', [(k, *o) for k, lines in BAD.items() for o in lines.items()])
def test_bad_arguments_are_one_clear_line_and_leave_nothing(cmd, line, says, tmp_path):
    (tmp_path / 'afile').write_text('')
    (tmp_path / 'empty').mkdir()
    code, err, out = typed(tmp_path, cmd, line)
    last = err.strip().splitlines()[-1]
    assert code not in (0, None) and 'Traceback' not in err, err
    assert last.startswith(f'{cmd}: ') and says in last and len(last) < 600, err
    assert 'usage' in err or len(err.strip().splitlines()) == 1
    assert not out.strip(), 'it had begun to work'
    assert sorted(o.name for o in tmp_path.iterdir()) == ['afile', 'empty']


HELP = {
    'robust-demo': 'profile eps epochs out seed device',
    'robust-eval': """model checkpoint pretrained data valid attacks eps norm n seed bs device out overwrite size
    crop-pct interpolation crop-mode n-classes mean std profile""",
}


@pytest.mark.parametrize('cmd', HELP)
def test_help(cmd, tmp_path):
    code, _, out = typed(tmp_path, cmd, '--help')
    assert code in (0, None) and all(f'--{o}' in out for o in HELP[cmd].split()) and 'noqa' not in out


def test_an_interrupt_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, 'run_eval', stopped)
    with pytest.raises(SystemExit) as e:
        robust_eval(model='fashion_mnist_vit', attacks='fgsm', n=10, profile='smoke', out=str(tmp_path / 'o'))
    assert e.value.code == 130 and 'same command continues' in capsys.readouterr().err


SLOW = [
    '--model',
    SMALL,
    '--n',
    '300',
    '--attacks',
    'fgsm,PGD(0.001, steps=150),pgd2',
    '--eps',
    '0.001',
    '--device',
    'cpu',
    '--data',
    'fashion_mnist',
]


def started(d, name):
    "robust-eval in a process of its own, once its first row is on disk"
    env = os.environ | dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore', ROBUST_PROFILE='smoke')
    (f := d / 'robust_eval.py').write_text(COMMAND.format('robust_eval'))
    p = subprocess.Popen(
        [sys.executable, f, *SLOW, '--out', name],
        cwd=d,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    j, t = d / name / 'report.json', time.time()
    while not j.exists() and p.poll() is None and time.time() - t < 60:
        time.sleep(0.02)
    assert p.poll() is None, p.communicate()
    return p, json.loads(j.read_text())['rows']


@pytest.mark.slow
@pytest.mark.skipif(os.name == 'nt', reason='signals')
def test_a_killed_run_is_continued(tmp_path):
    (d := tmp_path / 'run').mkdir()
    p, rows = started(d, 'out')
    p.kill()
    p.wait()
    assert [r['attack'] for r in rows] == ['clean', 'FGSM(0.001)'] and p.returncode == -signal.SIGKILL
    r = script(
        d,
        "a = json.loads(sys.argv[1])\nfor o in ('out','whole'):\n    try: main(a+['--out',o], 'robust-eval')\n   "
        " except SystemExit as e:\n        if e.code: raise",
        json.dumps(SLOW),
    )
    assert r.returncode == 0, r.stderr
    a, b = (json.loads((d / o / 'report.json').read_text()) for o in ('out', 'whole'))
    old = rows[1]
    # not computed again
    assert a['rows'][1]['seconds'] == old['seconds'] and a['rows'][1] == old
    cut = lambda rs: [{k: v for k, v in o.items() if k != 'seconds'} for o in rs]
    assert cut(a['rows']) == cut(b['rows']) and len(a['rows']) == 5
    assert (a['warnings'], a['meta']) == (b['warnings'], b['meta'])
    with np.load(d / 'out' / 'verdicts.npz') as u, np.load(d / 'whole' / 'verdicts.npz') as v:
        assert {*u} == {*v} and all(np.array_equal(u[k], v[k]) for k in u)
    # no bar where nobody looks
    assert 'worst case' in r.stdout and '%|' not in r.stdout + r.stderr


# --- robust_bench


def test_bench_refuses(tmp_path):
    for says, o in {'must be of Linf, eps=4/255': dict(eps=4 / 255), 'got none': dict(attacks=[None])}.items():
        with pytest.raises(ValueError, match=says):
            robust_bench(small(), 'fashion_mnist', **{**dict(path=tmp_path, attacks=FGSM(8 / 255)), **o})
    with pytest.raises(ValueError, match='there are: fashion_mnist'):
        robust_bench(small(), 'mnist', attacks=FGSM(8 / 255))


def test_bench_says_where_the_order_is_lost(tmp_path):
    for i in range(12):
        (f := tmp_path / 'c' / 'test' / f'class{i % 2}' / f'{i // 2}.png').parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (32, 32), (i, 20 * i, 9)).save(f)
    m = Normalized(timm.create_model('test_resnet', num_classes=2)).eval()
    kw = dict(path=tmp_path / 'c', attacks=FGSM(8 / 255), n=5)
    with pytest.raises(ValueError, match='cifar10: this copy does not have the test images in the order.*strict=False'):
        robust_bench(m, **kw)
    r = robust_bench(m, strict=False, out=tmp_path / 'o', **kw)
    assert (
        any('not comparable' in w for w in r.report.warnings)
        and 'not comparable' in (tmp_path / 'o' / 'report.json').read_text()
        and 'the order of this copy' in r.report.meta['title']
    )


def test_photos_are_cut_as_for_the_first_model_which_is_said_of_one_made_for_another_cut(tmp_path):
    "The configurations of timm name 0.9 for this ViT and 0.95 for the ResNet"
    torch.save(timm_like().state_dict(), tmp_path / 'vit.pth')
    torch.save(timm.create_model('test_resnet', num_classes=2).state_dict(), tmp_path / 'resnet.pth')
    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    models = [f'{SPEC}@{tmp_path}/vit.pth', f'test_resnet@{tmp_path}/resnet.pth']
    found = run_compare(eval_settings('smoke', data=str(d), eps=0.02, device='cpu'), models, [FGSM(0.02)])
    (said,) = [o for o in found.warnings if 'cut otherwise' in o]
    assert said.startswith('resnet: ') and 'pct=0.95, not 0.9' in said


def test_no_more_images_are_judged_than_were_held_out(tmp_path):
    "20 of the folder would be the 3 that were held out and 17 that the model was trained on"
    d = photos(tmp_path / 'train', SIX)
    exported(d, tmp_path)
    assert evaluate(None, d, None, checkpoint=tmp_path / 'few.pkl', valid='holdout', n=2).meta['n'] == 2
    with pytest.raises(ValueError, match='20 images asked for, 3 exist'):
        evaluate(None, d, None, checkpoint=tmp_path / 'few.pkl', valid='holdout', n=20)


def test_images_that_have_their_size_are_not_said_to_be_cut(tmp_path):
    "And an option that cuts has no effect on them, which is said"
    d = photos(tmp_path / 'd', ('bag', 'coat'), size=32)
    torch.save(timm_like().state_dict(), tmp_path / 'vit.pth')
    how = dict(checkpoint=tmp_path / 'vit.pth', size=32)
    rep = evaluate(SPEC, d, None, **how)
    assert 'cut to' not in rep.meta['title'] and not any('no effect' in o for o in rep.warnings)
    assert any('--crop-pct' in o and 'no effect' in o for o in evaluate(SPEC, d, None, pct=0.5, **how).warnings)


def test_the_statistics_of_the_input_are_said(tmp_path):
    "timm's for this network, or those that are given; to robust-compare too"
    d = photos(tmp_path / 'd', ('bag', 'coat'), size=32)
    torch.save(timm_like().state_dict(), tmp_path / 'vit.pth')
    assert (
        'mean 0.5 0.5 0.5, std 0.5 0.5 0.5'
        in evaluate(SPEC, d, None, checkpoint=tmp_path / 'vit.pth', size=32).meta['title']
    )
    said, s = [], eval_settings('smoke', data=str(d), eps=0.02, device='cpu')
    run_compare(s, [f'{SPEC}@{tmp_path}/vit.pth'], [FGSM(0.02)], say=said.append, mean=[0.25], std=[0.5])
    assert any('mean 0.25, std 0.5' in o for o in said)
    with pytest.warns(
        UserWarning, match='fashion_mnist_vit has a mean and std of its own: --mean and --std are not used'
    ):
        cli.named_model('fashion_mnist_vit', mean=[0.25])


def test_models_are_compared_on_what_was_held_out_of_the_training_of_all(tmp_path):
    "One held out 12 images, the other 18 with another seed: those that both held out are left"
    d = photos(tmp_path / 'train', SIX)
    for n in ('12', '18'):
        (tmp_path / n).mkdir()
    a, b = [exported(d, tmp_path / str(n), n_valid=n, seed=n) for n in (12, 18)]
    both = {*a.dls.valid_ds.files} & {*b.dls.valid_ds.files}
    s = eval_settings('smoke', data=str(d), eps=0.02, device='cpu')
    torch.save(timm.create_model('test_resnet', num_classes=6).state_dict(), tmp_path / 'net.pth')
    models = [f'a={tmp_path}/12/few.pkl', f'b={tmp_path}/18/few.pkl', f'c=test_resnet@{tmp_path}/net.pth']
    found = run_compare(s, models, [FGSM(0.02)], valid='holdout')
    assert len(found.first.verdicts['clean']) == len(both) > 1
    assert [o for o in found.warnings if 'trained on' in o] == [
        'c: which images the model was trained on is not known: these were held out of the training of others'
    ]


def test_an_export_with_a_class_of_a_module_that_is_missing_names_the_module(tmp_path, monkeypatch):
    "And opens where the module lies in the working folder"
    (tmp_path / 'own_module.py').write_text('from fastai.callback.core import Callback\n\nclass Own(Callback): pass\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    learn = exported(photos(tmp_path / 'train', SIX), tmp_path)
    learn.add_cb(importlib.import_module('own_module').Own())
    learn.export(tmp_path / 'own.pkl')
    monkeypatch.delitem(sys.modules, 'own_module')
    monkeypatch.setattr(sys, 'path', [o for o in sys.path if o not in ('', str(tmp_path))])
    assert type(cli._opened("own.pkl")).__name__ == "Learner"
    monkeypatch.delitem(sys.modules, 'own_module')
    monkeypatch.setattr(sys, 'path', [o for o in sys.path if o not in ('', str(tmp_path))])
    (tmp_path / 'own_module.py').unlink()
    with pytest.raises(ValueError, match="No module named 'own_module'"):
        cli._opened('own.pkl')


def test_a_learner_with_random_crops_is_shown_what_fastai_shows_it(tmp_path):
    from fastai.vision.all import PILImage, RandomResizedCrop, get_image_files
    from robust_nbdev.cli import _fit_of_items

    d = photos(tmp_path / 'd', ('bag', 'coat'), size=80)
    learn = by_fastai(d, tmp_path, item_tfms=RandomResizedCrop(28), batch_tfms=[])
    fit, f = _fit_of_items(learn), get_image_files(d).sorted()[0]
    shown = learn.dls.test_dl([f]).one_batch()[0][0]
    ours = np.asarray(fit(PILImage.create(f))) / 255
    assert np.abs(shown.permute(1, 2, 0).numpy() - ours).max() < 0.02
