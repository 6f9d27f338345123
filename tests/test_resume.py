"The recipe for an interrupted training, past the tenth epoch, where names of files no longer sort by number."

import shutil
import torch
from fastai.vision.all import Callback, MixUp, set_seed

from robust_nbdev.adv_train import *
from robust_nbdev.attacks import *
from robust_nbdev.test_utils import synth_dls, synth_learner, tiny_vit


class PowerCut(Callback):
    "What lies on the disk when the power goes in this epoch"

    def __init__(self, at, folder):
        self.at, self.folder = at, folder

    def before_train(self):
        if self.epoch == self.at:
            shutil.copytree(self.learn.path, self.folder)


def learner(path):
    "Shuffled, with dropout and MixUp"
    set_seed(0)
    vit = tiny_vit(num_classes=4, proj_drop_rate=0.2, drop_path_rate=0.3)
    cbs = [AdvTrain(PGD(0.05, steps=1)), MixUp(0.4), EMA(0.9), SaveRun()]
    return synth_learner(cbs, path=path, seed=0, model=vit, dls=synth_dls(16, bs=8))


def fit(learn, **kw):
    with learn.no_bar(), learn.no_logging():
        learn.fit_adv(12, 1e-3, **kw)
    return learn


def test_the_rest_of_twelve_epochs_is_as_without_the_interruption(tmp_path):
    whole = fit(learner(tmp_path / 'whole'), cbs=PowerCut(10, tmp_path / 'cut'))
    again = learner(tmp_path / 'cut')
    assert again.resume() == 10
    fit(again, start_epoch=10)
    # the first column is smoothed over the batches of this process
    assert [o[1:] for o in again.recorder.values] == [[]] * 10 + [o[1:] for o in whole.recorder.values[10:]]
    for a, b in ((again.model, whole.model), (again.ema.avg, whole.ema.avg)):
        assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))
    assert again.ema.n == whole.ema.n
