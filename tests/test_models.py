"Small pretrained models: files, cards, errors, what they can do"

import copy, hashlib, socket
from pathlib import Path
import numpy as np, pytest
from fastai.vision.all import Image, Learner, accuracy, first, load_learner, torch
from robust_nbdev.adv_train import AdvTrain
from robust_nbdev.attacks import PGD
from robust_nbdev.datasets import dataset, fashion_mnist, image_dls, settings
from robust_nbdev.evaluate import predict, robust_report
from robust_nbdev.vit import patch_grid
from robust_nbdev.models import small_dls, small_model
from robust_nbdev import models as M

DATA = Path(M.__file__).parent / 'data'
KEYS = list(M._cards())


def load(key):
    data = first(d for d in M._DATA if key.startswith(d))
    name = key[len(data) + 1 :]
    return small_model(name.removesuffix('_robust'), robust=name.endswith('_robust'), data=data)


@pytest.mark.parametrize('key', KEYS)
def test_file_fits_its_card(key):
    m, card = load(key), M._cards()[key]
    assert hashlib.sha256((DATA / f'{key}.safetensors').read_bytes()).hexdigest() == card['sha256']
    assert not m.training
    assert sum(p.numel() for p in m.parameters()) == card['params']
    for o in 'recipe epochs seed command machine minutes clean clean_n pgd50 pgd50_n eps'.split():
        assert card.get(o) is not None, o
    assert card['clean_n'] == 10000 and f'{key} --epochs {card["epochs"]}' in card['command']


@pytest.mark.parametrize('key', KEYS)
def test_what_weights_do_not_tell(key):
    "A file fits a model with another number of heads and other statistics, which would answer otherwise"
    m = load(key)
    net = m.model
    assert {o.num_heads for o in net.modules() if hasattr(o, 'num_heads')} == {4}
    statistics = dict(cifar10=((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)), fashion_mnist=((0.286,), (0.353,)))
    mean, std = statistics[M._cards()[key]['data']]
    assert m.mean.flatten().tolist() == pytest.approx(mean) and m.std.flatten().tolist() == pytest.approx(std)
    size = 32 if key.startswith('cifar10') else 28
    assert tuple(net.patch_embed.img_size) == (size, size)
    patch = 7 if key.startswith('fashion_mnist_vit') else 4
    assert patch_grid(m, torch.zeros(1, len(mean), size, size)) == (size // patch,) * 2


def test_statistics_are_those_of_the_images():
    x = torch.cat([b[0] for b in fashion_mnist(bs=500).train])
    m = small_model(data='fashion_mnist', weights=False)
    assert x.mean().item() == pytest.approx(m.mean.item(), abs=0.005)
    assert x.std().item() == pytest.approx(m.std.item(), abs=0.005)


def test_all_files_have_cards_and_are_small():
    fs = list(DATA.glob('*.safetensors'))
    assert {f.stem for f in fs} == set(KEYS) and sum(f.stat().st_size for f in fs) <= 12e6


@pytest.mark.parametrize('key', [k for k in KEYS if k.startswith('fashion')])
def test_accuracy_on_the_embedded_images_is_near_the_card(key):
    m = load(key)
    x, y = fashion_mnist(bs=250).valid.one_batch()
    x, y = x.as_subclass(torch.Tensor), y.as_subclass(torch.Tensor)
    assert abs((predict(m, x) == y).float().mean() - m.card.clean) < 0.1
    x, y = x[:48], y[:48]
    pgd = (predict(m, PGD(m.card.eps, steps=5)(m, x, y)) == y).float().mean()
    assert pgd > 0.4 if m.card.robust else pgd < 0.2


@pytest.mark.slow
@pytest.mark.parametrize('key', KEYS)
def test_clean_accuracy_is_the_cards_exactly(key):
    data = M._cards()[key]['data']
    kw = dict(full=True) if data == 'fashion_mnist' else dict(download=False)
    try:
        dls = dataset(data, bs=500, batch_tfms=None, **kw)
    except FileNotFoundError:
        pytest.skip(f'no copy of {data}')
    assert robust_report(load(key), dls.valid, [None], bs=500).rows[0]['accuracy'] == M._cards()[key]['clean']


def test_a_damaged_file_and_a_missing_one_have_errors(tmp_path, monkeypatch):
    for f in DATA.glob('*vit*'):
        (tmp_path / f.name).write_bytes(f.read_bytes())
    monkeypatch.setattr(M, '_folder', lambda: tmp_path)
    f = tmp_path / 'fashion_mnist_vit.safetensors'
    b = bytearray(f.read_bytes())
    b[-1] ^= 1
    f.write_bytes(b)
    with pytest.raises(ValueError, match='damaged'):
        small_model('vit', data='fashion_mnist')
    f.unlink()
    with pytest.raises(FileNotFoundError, match='install robust-nbdev again'):
        small_model('vit', data='fashion_mnist')


def test_wrong_names():
    for args, words in ((dict(name='vit_reg4', data='fashion_mnist'), 'there are'), (dict(data=None), 'NoneType')):
        with pytest.raises(ValueError, match=words):
            small_model(**args)


def test_each_call_gives_a_model_of_its_own():
    a, b = [small_model('vit', data='fashion_mnist') for _ in range(2)]
    with torch.no_grad():
        a.model.pos_embed.add_(1)
    a.card['eps'] = 9
    c = small_model('vit', data='fashion_mnist')
    assert torch.equal(b.model.pos_embed, c.model.pos_embed)
    assert c.card.eps != 9
    assert copy.deepcopy(b).card == b.card


def test_small_dls_says_what_it_takes(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path))
    dls = small_dls(settings('smoke'), n_train=64, n_valid=64)
    assert dls.train.n == 64 and 'embedded' in capsys.readouterr().out
    dls = small_dls(settings('laptop'), n_train=64, n_valid=64, download=False)
    assert 'fashion_mnist' in dls.about and 'cifar10' in capsys.readouterr().out


def test_small_images_keep_their_own_size(capsys):
    "A profile for large images has a size, which is not theirs"
    s = settings('smoke')
    assert small_dls(type(s)({**s, 'size': 64}), n_train=16, n_valid=16).one_batch()[0].shape[-1] == 28


def test_damaged_and_missing_cards_have_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(M, '_folder', lambda: tmp_path)
    read = M._cards.__wrapped__
    with pytest.raises(FileNotFoundError, match='install robust-nbdev again'):
        read()
    for b in ((DATA / 'models.json').read_bytes()[:300], b'\xff\xfe'):
        (tmp_path / 'models.json').write_bytes(b)
        with pytest.raises(ValueError, match='damaged.*install robust-nbdev again'):
            read()


def test_half_weights_keep_buffers_and_copy_parameters():
    m = torch.nn.BatchNorm1d(3)
    m.running_var.fill_(1e-8)
    h = M.half_weights(m)
    assert h['running_var'].dtype == torch.float32
    assert (h['running_var'] == torch.tensor(1e-8)).all()
    assert h['weight'].dtype == torch.float16
    assert h['num_batches_tracked'].dtype == torch.int64


def tool():
    import importlib.util

    tool = Path(__file__).resolve().parents[1] / 'tools' / 'train_checkpoints.py'
    spec = importlib.util.spec_from_file_location('train_checkpoints', tool)
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


def test_a_card_has_the_number_of_images_that_were_attacked(tmp_path, monkeypatch):
    "AutoAttack on 500 of 8 images is AutoAttack on 8"
    t = tool()
    monkeypatch.setattr(t, 'dataset', lambda data, n_valid=16, **kw: fashion_mnist(n_train=16, n_valid=n_valid, bs=8))

    def report(model, dl, attacks, n=None, bs=None):
        return t.Row(rows=[dict(accuracy=0.5, n=min(n or dl.n, dl.n))] * 2)

    monkeypatch.setattr(t, 'robust_report', report)
    c = t.measured('fashion_mnist_vit', tmp_path, 8, 500, 8, 'cpu')
    assert (c['clean_n'], c['pgd50_n'], c['aa_n']) == (16, 8, 8)
    assert t.measured('fashion_mnist_vit', tmp_path, 8, 0, 8, 'cpu')['aa_n'] is None


def test_names_of_checkpoints_are_checked_before_any_is_trained(tmp_path, monkeypatch):
    t, got = tool(), []
    monkeypatch.setattr(t, 'train', lambda *args: got.append(args))
    with pytest.raises(SystemExit, match='nope'):
        t.main('fashion_mnist_vit,nope', out=tmp_path)
    assert not got


def test_a_new_head_for_own_images(tmp_path):
    "A robust checkpoint, fine-tuned on a folder of photos, exported, loaded, attacked, as in the tutorial"
    for i in range(24):
        d = tmp_path / 'imgs' / 'abc'[i % 3]
        d.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 50, 3), 80 * (i % 3) + i, np.uint8)).save(d / f'{i}.png')
    dls = image_dls(tmp_path / 'imgs', n_valid=6, size=32, bs=6)
    m = small_model('vit', robust=True)
    body = m.model.blocks[0].attn.qkv.weight.detach().clone()
    m.model.reset_classifier(dls.c)
    learn = Learner(dls, m, metrics=accuracy, path=tmp_path, cbs=AdvTrain(PGD(8 / 255, steps=1)))
    with learn.no_bar(), learn.no_logging():
        learn.fit_adv(1, 1e-3)
    assert m.model.head.weight.shape == (3, 96) and not torch.equal(m.model.blocks[0].attn.qkv.weight, body)
    rep = learn.robust_report([PGD(8 / 255, steps=2)], progress=False)
    learn.export('m.pkl')
    loaded = load_learner(tmp_path / 'm.pkl')
    assert loaded.model.card == m.card
    again = loaded.robust_report([PGD(8 / 255, steps=2)], dl=dls.valid, progress=False)
    assert again.df.accuracy.tolist() == rep.df.accuracy.tolist()
    with loaded.no_bar():
        assert loaded.predict(tmp_path / 'imgs' / 'a' / '0.png')[0] in 'abc'


@pytest.mark.parametrize('name', ['vit', 'xcit'])
def test_other_sizes_start_from_the_same_weights(name):
    "Only the position embedding is new; at the size of the training nothing is"
    m, same, large = small_model(name), small_model(name, size=32), small_model(name, size=48)
    x = torch.rand(2, 3, 48, 48)
    assert torch.equal(same(x[..., :32, :32]), m(x[..., :32, :32]))
    assert large(x).shape == (2, 10) and patch_grid(large, x) == (12, 12)
    old, new = m.state_dict(), large.state_dict()
    assert [k for k in old if not torch.equal(old[k], new[k])] == ([] if name == 'xcit' else ['model.pos_embed'])
    assert small_model(name, size=48, weights=False)(x).shape == (2, 10)


def test_sizes_that_patches_do_not_fill_are_refused():
    for size, says in ((2, '>= 4'), (32.5, 'whole number')):
        with pytest.raises(ValueError, match=says):
            small_model('vit', size=size)


def test_the_name_of_a_file_is_a_model_and_needs_no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, 'connect', None)
    a, b = small_model('fashion_mnist_vit_robust'), small_model('vit', robust=True, data='fashion_mnist')
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters())) and a.card == b.card
    assert M.small_key('resnet18') is None and len(M.small_classes('cifar10')) == 10
