"What an engineer asks of a report: which photos, which classes, one radius a folder, tables, curves, own columns."

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.vision.all import Learner, nn, plt
from PIL import Image

from package import everything
from robust_nbdev.attacks import *
from robust_nbdev.datasets import image_dls
from robust_nbdev.evaluate import *

E = 0.1


class Brightness(nn.Module):
    "Class by the mean of the image: below or above one half; `steep` logits"

    def __init__(self, edge=0.5):
        super().__init__()
        self.edge = nn.Parameter(torch.tensor(edge))

    def forward(self, x):
        d = 20 * (x.mean((1, 2, 3)) - self.edge)
        return torch.stack([-d, d], 1)


@pytest.fixture
def dls(tmp_path):
    "Grey pictures; the darkest `bright` one is darker than one half, and one of each class lies near the edge"
    levels = dict(dark=[20, 60, 120], bright=[100, 140, 200])
    for c, vs in levels.items():
        for v in vs:
            (f := tmp_path / 'photos' / c / f'grey_{v}.png').parent.mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (16, 16), (v,) * 3).save(f)
    return image_dls(tmp_path / 'photos', valid='only', bs=4, batch_tfms=None, num_workers=0, device='cpu')


def shown(rep):
    "File -> first row that fools it"
    t = rep.per_image()
    return dict(zip(t.file, t.fooled_by))


def test_a_report_names_the_photos(dls):
    "A change of 0.1 moves a mean by 0.1: it fools those within 25 grey levels of the edge"
    pgd = PGD(E, steps=3)
    rep = robust_report(Brightness(), dls.valid, [FGSM(E / 20), pgd])
    assert rep.vocab == ['bright', 'dark']
    fell = {k.split('/')[1]: v for k, v in shown(robust_report(flipped(), dls.valid, [FGSM(E / 20), pgd])).items()}
    assert fell == {
        'grey_100.png': 'clean',
        'grey_120.png': repr(pgd),
        'grey_140.png': repr(pgd),
        'grey_20.png': '',
        'grey_60.png': '',
        'grey_200.png': '',
    }


def flipped():
    "`Brightness` with the classes in the folder's order: bright is class 0"
    m = Brightness()
    return nn.Sequential(m, Swap())


class Swap(nn.Module):
    def forward(self, z):
        return z.flip(1)


def test_the_names_are_on_disk(dls, tmp_path):
    rep = robust_report(flipped(), dls.valid, [FGSM(E)], out=tmp_path / 'out')
    rep.save(tmp_path / 'out', images=True)
    with np.load(tmp_path / 'out' / 'verdicts.npz') as f:
        names, classes, right = f['file names'], f['class names'], f[repr(FGSM(E))]
    assert classes.tolist() == ['bright', 'dark'] and len(names) == 6 == len(right)
    t = pd.read_csv(tmp_path / 'out' / 'images.csv', keep_default_na=False)
    assert t.file.tolist() == names.tolist() and t.label.tolist() == [o.split('/')[0] for o in names]
    assert ((t.fooled_by == '') == right).all() and set(t.clean) == {'bright', 'dark'}
    back = Report.load(tmp_path / 'out')
    assert back.files == rep.files and back.vocab == rep.vocab and set(back.verdicts) == {'clean', repr(FGSM(E))}
    again = robust_report(flipped(), dls.valid, [FGSM(E)], out=tmp_path / 'out')
    assert again.rows[1]['seconds'] == rep.rows[1]['seconds'] and again.files == rep.files


def test_the_page_shows_classes_and_the_hardest_images(dls, tmp_path):
    learn = Learner(dls, flipped(), loss_func=nn.CrossEntropyLoss())
    rep = learn.robust_report([FGSM(E)], out=tmp_path, progress=False, pictures=2)
    rep.add_figure('accuracy against eps', learn.eps_curve(FGSM(), [0, 0.1]).plot()).save(tmp_path)
    page = (tmp_path / 'report.html').read_text()
    assert 'Accuracy of each class' in page and '<th>bright</th>' in page and page.count('<img') == 3
    assert 'The hardest images' in page and 'accuracy against eps' in page


def test_the_hardest_images(dls):
    rep = robust_report(flipped(), dls.valid, [FGSM(E)])
    fig = rep.show_hardest(flipped(), dls.valid, FGSM(E), n=2)
    titles = [a.get_title() for a in fig.axes]
    names = [t.get_text().split('/')[1] for a in fig.axes for t in a.texts]
    assert names == ['grey_100.png', *(o.split('/')[1] for o in rep.files if '120' in o or '140' in o)]
    assert titles[:3] == ['dark, not bright', 'delta, fgsm', 'dark']
    by = {n: (titles[3 * i], titles[3 * i + 2]) for i, n in enumerate(names)}
    assert by['grey_120.png'] == ('dark', 'bright') and by['grey_140.png'] == ('bright', 'dark')
    every = [(b[0], b[1]) for b in dls.valid]
    other = rep.show_hardest(flipped(), every, FGSM(E), n=2)
    assert [a.get_title() for a in other.axes] == titles
    plt.close('all')


# --- one radius a folder


def test_another_radius_in_the_same_folder_is_refused(dls, tmp_path):
    m = flipped()
    robust_report(m, dls.valid, [FGSM(4 / 255)], out=tmp_path)
    with pytest.raises(ValueError, match='holds rows of Linf eps=4/255, and eps=8/255 is asked for'):
        robust_report(m, dls.valid, [FGSM(8 / 255)], out=tmp_path)
    both = robust_report(m, dls.valid, [FGSM(4 / 255), FGSM(8 / 255)], out=tmp_path)
    assert both.df.attack.tolist() == ['clean', 'FGSM(4/255)', 'FGSM(8/255)']
    assert len(robust_report(m, dls.valid, [FGSM(8 / 255)], out=tmp_path, overwrite=True).rows) == 2


# --- own attacks


def dark(model, x, y, *, seed=0):
    return x * 0.5


def test_a_function_is_called_by_its_name(dls, tmp_path):
    rep = robust_report(flipped(), dls.valid, [dark, partial(scaled, by=0.25)], out=tmp_path)
    assert rep.df.attack.tolist()[:3] == ['clean', 'dark', 'scaled(by=0.25)']
    again = robust_report(flipped(), dls.valid, [dark], out=tmp_path)
    assert again.rows[1]['seconds'] == rep.rows[1]['seconds'] and len(rep.confusion(dark)) == 2


def scaled(model, x, y, *, by, seed=0):
    return x * by


def test_a_repaired_function_is_another_one(dls, tmp_path):
    "Under the old name, the row is measured again and says so; in one call the two are refused"
    broken = made('def tint(model, x, y, *, seed=0): return x')
    repaired = made('def tint(model, x, y, *, seed=0): return x * 0.5')
    a = robust_report(flipped(), dls.valid, [broken], out=tmp_path)
    with pytest.warns(UserWarning, match='tint: computed again, the code or the state of the attack has changed'):
        b = robust_report(flipped(), dls.valid, [repaired], out=tmp_path)
    assert [r.df.attack[1] for r in (a, b)] == ['tint', 'tint'] and b.df.accuracy[1] < a.df.accuracy[1]
    with pytest.raises(ValueError, match='print alike, tint'):
        robust_report(flipped(), dls.valid, [broken, repaired])


def made(text):
    space = {}
    exec(text, space)
    return space['tint']


@dataclass(frozen=True, repr=False)
class Scale(AttackBase):
    amount: float = 0.5

    def make(self, model, x, y, target, seed):
        return x * (1 - self.amount)


class NoDataclass(AttackBase):
    def __init__(self, amount):
        self.amount = amount

    def make(self, model, x, y, target, seed):
        return x * (1 - self.amount)


def test_settings_of_an_own_attack_are_told_apart(dls, tmp_path):
    a = robust_report(flipped(), dls.valid, [Scale(0.0), Scale(0.9)])
    assert a.df.attack.tolist()[1:3] == ['Scale(amount=0)', 'Scale(amount=0.9)'] and Scale(0.0) != Scale(0.9)
    assert a.df.accuracy[1] == a.df.accuracy[0] > a.df.accuracy[2]


def test_fields_outside_the_dataclass_are_refused(dls, tmp_path):
    with pytest.raises(TypeError, match='NoDataclass keeps amount outside the fields.*amount: float'):
        robust_report(flipped(), dls.valid, [NoDataclass(0.0)], out=tmp_path)
    with pytest.raises(TypeError, match='outside the fields'):
        Run(flipped(), dls.valid).measure(NoDataclass(1.0))


# --- tables


def test_a_column_of_ones_own_is_one_function(dls, tmp_path):
    pgd = PGD(E, steps=2)
    rep = robust_report(flipped(), dls.valid, [pgd], out=tmp_path)
    rep.add_column('dark', lambda row, ok, pred: (pred == 1).mean()).save(tmp_path)
    assert rep.df.dark.tolist() == pytest.approx([(rep.preds[k] == 1).mean() for k in ('clean', repr(pgd))])
    back = Report.load(tmp_path)
    assert back.df.dark.tolist() == rep.df.dark.tolist() and 'dark' in pd.read_csv(tmp_path / 'report.csv')


def test_members_of_an_ensemble_have_no_value_of_ones_own(dls):
    aa = everything.AutoAttack(E, attacks=[PGD(E, steps=1, alpha=0.001, rand=False), FGSM(E)])
    rep = robust_report(flipped(), dls.valid, [aa]).add_column('half', lambda row, ok, pred: 0.5)
    assert [l.split()[-1] == '0.5' for l in repr(rep).splitlines()[2:6]] == [True, True, False, False]


def test_passes_mean_one_thing(dls):
    rep = robust_report(flipped(), dls.valid, [PGD(0.001, steps=5)])
    printed = [float(l.split()[-2]) for l in repr(rep).splitlines()[2:4]]
    assert printed == pytest.approx(rep.df.passes.round(1).tolist()) and rep.df.passes[0] == 1
    assert rep.rows[1]['passes'] == pytest.approx(6 * rep.df.passes[1])
