"""Data: every form of storage, settings, and what must never happen silently. Small made-up images in temporary folders
only."""

import gzip, io, json, pickle, random, shutil, sys, warnings
import numpy as np, pytest, torch, timm
import pyarrow as pa, pyarrow.parquet as pq
from fastai.vision.all import (
    aug_transforms,
    Image,
    Learner,
    Normalize,
    Resize,
    TensorMask,
    accuracy,
    fastai_cfg,
    load_learner,
    nn,
)
from robust_nbdev.core import Normalized
from robust_nbdev.corruptions import ImageNetC, wnid_images
from robust_nbdev.datasets import *
import robust_nbdev.datasets as D


def img(i, h=32, w=32, c=3):
    return np.random.default_rng(i).integers(0, 256, (h, w, c) if c == 3 else (h, w), dtype=np.uint8)


def png(a):
    f = io.BytesIO()
    Image.fromarray(a).save(f, 'png')
    return f.getvalue()


def xs(dl):
    return torch.cat([b[0] for b in dl])


def ys(dl):
    return torch.cat([b[1] for b in dl]).tolist()


def settings_at(tmp, monkeypatch, text, name='settings.ini'):
    (tmp / name).write_text(text)
    monkeypatch.chdir(tmp)
    monkeypatch.delenv('ROBUST_PROFILE', raising=False)


@pytest.fixture(autouse=True)
def alone(tmp_path_factory, monkeypatch):
    "No settings, no fastai folder and no network of the machine the tests run on"
    home = tmp_path_factory.mktemp('home')
    (home / 'settings.ini').write_text('[DEFAULT]\n' + '\n'.join(f'{k} =' for k in D._PATHS))
    monkeypatch.setenv('FASTAI_HOME', str(home / 'fastai'))
    monkeypatch.delenv('ROBUST_PROFILE', raising=False)
    monkeypatch.setattr(D, '_online', lambda *a, **k: False)
    monkeypatch.chdir(home)
    fastai_cfg.cache_clear()
    yield
    fastai_cfg.cache_clear()


@pytest.fixture
def folders(tmp_path):
    for k, n in (('train', 12), ('valid', 7)):
        for i in range(n):
            d = tmp_path / k / 'abc'[i % 3]
            d.mkdir(parents=True, exist_ok=True)
            Image.fromarray(img(i, 40, 50)).save(d / f'{i}.png')
    return tmp_path


# --- settings


def test_package_profiles_are_typed_and_complete():
    keys = {p: set(settings(p)) for p in ('smoke', 'laptop', 'gpu', 'paper')}
    assert len(set(map(frozenset, keys.values()))) == 1
    s = settings('gpu')
    assert (s.profile, s.size, s.eps) == ('gpu', 32, 8 / 255) and isinstance(s.bs, int)
    assert s == pickle.loads(pickle.dumps(s))


def test_settings_key_by_key(tmp_path, monkeypatch):
    sub = tmp_path / 'a' / 'b'
    sub.mkdir(parents=True)
    settings_at(
        tmp_path,
        monkeypatch,
        '[DEFAULT]\nprofile = mine\ncifar10 = data/c10 # mine\nseed = 7\n[smoke]\neps=3/255\n[mine]\nbs = 3\nanything ='
        ' 2/4\nmodel = vit_100%\n',
    )
    base = settings('laptop')
    monkeypatch.chdir(sub)
    s = settings()
    assert (s.profile, s.bs, s.anything, s.model, s.seed) == ('mine', 3, 0.5, 'vit_100%', 7)
    assert s.cifar10 == tmp_path / 'data' / 'c10'
    assert (
        settings('smoke').eps == 3 / 255 and settings('smoke').n_train == settings('smoke').n_train and base.seed == 7
    )
    monkeypatch.setenv('ROBUST_PROFILE', 'gpu')
    assert settings().profile == 'gpu' and settings('smoke').profile == 'smoke'


@pytest.mark.parametrize(
    'text',
    [
        '[other]\nuser = %(x)s\n',
        '\xff',
        '[DEFAULT]\nlib_name=a\nlib_name=b\n',
    ],
)
def test_foreign_settings_are_passed_over(tmp_path, monkeypatch, text):
    settings_at(tmp_path, monkeypatch, '[smoke]\nbs = 11\n')
    sub = tmp_path / 'sub'
    sub.mkdir()
    (sub / 'settings.ini').write_bytes(text.encode('latin1'))
    monkeypatch.chdir(sub)
    assert settings('smoke').bs == 11


@pytest.mark.parametrize('line', ['bs = 0', 'eps = -1/255', 'device = gpu', 'seed = -1'])
def test_bad_values_name_file_section_key(tmp_path, monkeypatch, line):
    settings_at(tmp_path, monkeypatch, f'[smoke]\n{line}\n')
    with pytest.raises(ValueError) as e:
        settings('smoke')
    assert all(o in str(e.value) for o in (str(tmp_path / 'settings.ini'), '[smoke]', line))


# --- embedded Fashion-MNIST


def test_subsets():
    a, b = fashion_mnist(100, 50, seed=3), fashion_mnist(100, 50, seed=3)
    assert np.bincount(ys(a.valid)).tolist() == [5] * 10 and torch.equal(xs(a.valid), xs(b.valid))
    assert torch.equal(xs(a.train), xs(b.train))  # same images, same order
    assert not torch.equal(xs(a.valid), xs(fashion_mnist(100, 50, seed=4).valid))
    random.seed(1)
    c = fashion_mnist(100, 50, seed=3)
    random.seed(9)
    assert torch.equal(xs(c.train), xs(fashion_mnist(100, 50, seed=3).train))  # nobody else's random state matters
    few = fashion_mnist(5, 5)
    assert len(few.train) == 1 and len(few.one_batch()[0]) == 5  # fewer than bs: no empty epoch


def test_holdout_never_meets_training():
    h = fashion_mnist(valid='holdout')
    assert len(h.train_ds) == 5400 and len(h.valid_ds) == 600
    seen = {o.tobytes() for o in h.train_ds.tls[0].items}
    test = {o.tobytes() for o in embedded_fashion().splits['test'][0]}
    held = [o.tobytes() for o in h.valid_ds.tls[0].items]
    assert not any(o in seen for o in held) and not any(o in test for o in held)
    only = fashion_mnist(valid='only', n_valid=100)
    assert len(only.train_ds) == len(only.valid_ds) == 100


def test_fast_path_equals_item_path():
    fast, slow = fashion_mnist(96, 70), fashion_mnist(96, 70)
    slow.valid._whole = slow.train._whole = lambda: False
    assert fast.valid._whole() and fast.train._whole()
    for a, b in ((fast.valid, slow.valid), (fast.train, slow.train)):
        assert torch.equal(xs(a), xs(b)) and ys(a) == ys(b)
    two = fashion_mnist(96, 70, num_workers=2)
    assert torch.equal(xs(two.valid), xs(fast.valid))


def test_normalize_refused():
    n = Normalize.from_stats([0.5], [0.5], cuda=False)
    for kw in (dict(batch_tfms=[*aug_transforms(), n]), dict(item_tfms=n)):
        with pytest.raises(ValueError, match='remove it'):
            fashion_mnist(64, 8, **kw)


# --- Learner


def tiny(c=1):
    return Normalized(
        timm.create_model(
            'vit_tiny_patch16_224',
            img_size=28,
            patch_size=7,
            in_chans=c,
            num_classes=10,
            embed_dim=24,
            depth=1,
            num_heads=2,
        )
    )


def test_learner_round_trip(tmp_path):
    "Files, pictures, arrays and tensors are predicted alike, before and after the export"
    learn = Learner(fashion_mnist(64, 64), tiny(), metrics=accuracy, path=tmp_path)
    learn.export('m.pkl')
    assert (tmp_path / 'm.pkl').stat().st_size < 5e5  # the images did not travel along
    a = embedded_fashion().splits['test'][0][3]
    Image.fromarray(a).save(f := tmp_path / 'x.png')
    forms = [f, str(f), f.read_bytes(), a, torch.from_numpy(a)[None], Image.fromarray(a).convert('RGB')]
    want = nn.functional.softmax(learn.model.eval()(torch.from_numpy(a)[None, None] / 255.0), 1)[0]
    for l in (learn, load_learner(tmp_path / 'm.pkl')):
        with l.no_bar():
            for o in forms:
                c, i, p = l.predict(o)
                assert c == learn.dls.vocab[int(i)] and torch.allclose(p.cpu(), want.cpu(), atol=1e-5)
            mixed = l.dls.test_dl([f, Image.new('RGB', (90, 40)), a], bs=2)
            assert l.get_preds(dl=mixed)[0].shape == (3, 10)
    with pytest.raises(TypeError, match='uint8'):
        learn.predict(a / 255.0)


def test_open_image_leaves_its_argument_alone():
    im = Image.fromarray(img(0))
    out = open_image(im, 'RGB')
    assert type(im) is Image.Image and out is not im
    assert np.array_equal(np.array(open_image(im.convert('P'), 'RGB')), np.array(im.convert('P').convert('RGB')))


# --- class folders


def test_folders(folders):
    (folders / 'valid' / 'loose.png').write_bytes(png(img(0)))
    (folders / 'notes').mkdir()
    src = read_images(folders)
    assert list(src.vocab) == ['a', 'b', 'c'] and len(src.splits['val'][0]) == 7
    dls = image_dls(folders, size=32, bs=4)
    assert sorted(ys(dls.valid)) == [0, 0, 0, 1, 1, 2, 2] and len(dls.train) == 3
    big = image_dls(folders, size=(80, 96), bs=4, num_workers=0)
    assert big.one_batch()[0].shape == big.valid.one_batch()[0].shape == (4, 3, 80, 96)
    assert not torch.equal(xs(big.train), xs(big.train))
    still = image_dls(folders, size=(80, 96), bs=4, num_workers=0, item_tfms=None, batch_tfms=None, pct=1)
    assert sorted(xs(still.train).sum((1, 2, 3)).tolist()) == sorted(xs(still.train).sum((1, 2, 3)).tolist())
    assert image_dls(folders, bs=4, num_workers=0).one_batch()[0].shape == (4, 3, 40, 50)


def test_folder_errors(folders):
    d = folders / 'valid' / 'new'
    d.mkdir()
    Image.fromarray(img(1)).save(d / '1.png')
    with pytest.raises(ValueError, match='no training images'):
        read_images(folders)
    (folders / 'a.txt').write_text('x')
    with pytest.raises(FileNotFoundError):
        read_images(folders / 'a.txt')


def test_one_level_of_folders(folders):
    dls = image_dls(folders / 'train', size=16, bs=4, valid='holdout', n_valid=3)
    assert sorted(ys(dls.valid)) == [0, 1, 2] and len(dls.train_ds) == 9
    # held out without asking, and `about` says so
    own = image_dls(folders / 'train', size=16, bs=4)
    assert 'held out' in own.about and (len(own.train_ds), len(own.valid_ds)) == (11, 1)
    # a named dataset without its test images is not whole
    with pytest.raises(ValueError, match='holdout'):
        imagenette(path=folders / 'train')
    only = image_dls(folders / 'valid', size=16, valid='only')
    assert len(only.valid_ds) == len(xs(only.valid)) == 7


def test_held_out_images_do_not_come_class_by_class(tmp_path):
    "A report on the first n of them would be one on the first classes"
    for i in range(60):
        d = tmp_path / 'abc'[i % 3]
        d.mkdir(exist_ok=True)
        Image.fromarray(img(i, 8, 8)).save(d / f'{i}.png')
    a, b = [image_dls(tmp_path, bs=4, n_valid=30) for _ in range(2)]
    assert (
        len({*ys(a.valid)[:10]}) == 3 and ys(a.valid) != sorted(ys(a.valid)) and torch.equal(xs(a.valid), xs(b.valid))
    )
    held = {o.numpy().tobytes() for o in xs(a.valid)}
    assert len(held) == 30 and not held & {
        o.numpy().tobytes() for o in xs(image_dls(tmp_path, bs=30, n_valid=30, batch_tfms=None).train)
    }
    assert not torch.equal(xs(a.valid), xs(image_dls(tmp_path, bs=4, n_valid=30, seed=1).valid))


def test_a_rare_class_is_not_held_out_whole():
    "Drawn evenly, the two images of a class of two were both held out, and the model never saw one"
    y = np.repeat([0, 1, 2, 3], [300, 200, 2, 1])
    for n in (4, 200, 400, 500):
        for seed in range(3):
            (_, tr), (_, va) = choose_images(
                ImageSource(dict(train=(y, y)), list('abcd')), 'holdout', n_valid=n, seed=seed
            )
            assert len(va) == n and not set(tr) & set(va) and set(y[tr]) >= {0, 1}
            if n <= 400:
                assert set(y[tr]) == {0, 1, 2, 3} and np.bincount(y[va], minlength=4)[2:].tolist() == [1, 0]
    same = np.repeat(range(4), 50)
    # nothing changes where classes are alike
    for n in (7, 150):
        assert (balanced(same, n) == balanced(same, n, spare=True)).all()
    with pytest.raises(ValueError, match='503 of 503 images held out leave none'):
        choose_images(ImageSource(dict(train=(y, y)), list('abcd')), 'holdout', n_valid=503)


def test_a_broken_file_is_named(tmp_path):
    for i in range(8):
        d = tmp_path / 'ab'[i % 2]
        d.mkdir(exist_ok=True)
        Image.fromarray(img(i, 90, 90)).save(d / f'{i}.jpg')
    (tmp_path / 'a' / '.DS_Store').write_bytes(b'x')  # passed over
    whole = (tmp_path / 'a' / '0.jpg').read_bytes()
    for bad in (b'', whole[: len(whole) // 2]):
        (tmp_path / 'a' / '0.jpg').write_bytes(bad)
        with pytest.raises(OSError, match=r'0\.jpg cannot be read as an image .*verify_images'):
            dls = image_dls(tmp_path, size=80, n_valid=4, bs=2, num_workers=0)
            xs(dls.train), xs(dls.valid)


def test_every_kind_of_file_becomes_rgb(tmp_path):
    "Grey, 16 bits, palette, transparent, CMYK, upper-case extensions"
    im = Image.fromarray(img(1, 20, 30))
    for i, (m, f) in enumerate(
        [
            ('L', 'png'),
            ('I;16', 'png'),
            ('P', 'png'),
            ('RGBA', 'png'),
            ('LA', 'png'),
            ('CMYK', 'jpg'),
            ('RGB', 'JPG'),
            ('RGB', 'JPEG'),
            ('1', 'png'),
        ]
        * 2
    ):
        d = tmp_path / 'ab'[i % 2]
        d.mkdir(exist_ok=True)
        (Image.fromarray(np.asarray(im.convert('L')).astype(np.uint16) * 257) if m == 'I;16' else im.convert(m)).save(
            d / f'{i}.{f}'
        )
    grey = np.asarray(im.convert('L'))
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    assert (
        deep.mode.startswith('I;16')
        and (np.asarray(open_image(deep, 'L')) == grey).all()
        and (np.asarray(open_image(tmp_path / 'b' / '1.png', 'L')) == grey).all()
    )
    for size in (16, 80):
        dls = image_dls(tmp_path, size=size, n_valid=9, bs=4, num_workers=0, item_tfms=None, batch_tfms=None)
        x = xs(dls.valid)
        assert x.shape == (9, 3, size, size) and 0 <= x.min() < x.max() <= 1
        assert (x.flatten(1).std(1) > 0.02).all(), x.flatten(1).mean(1)


def test_a_transform_of_ones_own_may_bring_images_to_one_size(folders):
    Image.fromarray(img(1, 60, 80)).save(folders / 'train' / 'a' / 'x.png')
    assert image_dls(folders, bs=4, num_workers=0, item_tfms=Resize(24)).one_batch()[0].shape == (4, 3, 24, 24)


# --- parquet


def write(f, n, meta=None, rows=None, struct=False, start=0, **cols):
    ims = [png(np.full((32, 32, 3), start + i, np.uint8)) for i in range(n)]
    t = (
        dict(image=[dict(bytes=o, path='x') for o in ims] if struct else ims, label=[(start + i) % 2 for i in range(n)])
        | cols
    )
    t = pa.table({k: v for k, v in t.items() if v is not None})
    if rows is not None:
        t = t.take(rows)
    pq.write_table(t.replace_schema_metadata(meta), f, row_group_size=7)


NAMES = dict(class_names='["even","odd"]')


def level(dl):
    return (xs(dl)[:, 0, 0, 0] * 255).round().int().tolist()


def test_parquet_keeps_canonical_order(tmp_path):
    perm = np.random.default_rng(0).permutation(30)
    write(tmp_path / 'cifar10_train.parquet', 40, NAMES)
    write(tmp_path / 'cifar10_test.parquet', 30, NAMES, index=list(range(30)), rows=perm)
    dls = cifar10(path=tmp_path, bs=8)
    assert (
        level(dls.valid) == list(range(30))
        and ys(dls.valid) == [i % 2 for i in range(30)]
        and list(dls.vocab) == ['even', 'odd']
    )
    sub = cifar10(path=tmp_path, n_valid=9, bs=4)
    assert level(sub.valid) == sorted(level(sub.valid)) and len(level(sub.valid)) == 9
    assert [i % 2 for i in level(sub.valid)] == ys(sub.valid)


def test_parquet_shards_and_hidden_labels(tmp_path):
    hf = dict(huggingface=json.dumps(dict(info=dict(features=dict(label=dict(names=['e', 'o'], _type='ClassLabel'))))))
    d = tmp_path / 'data'
    d.mkdir()
    for i in range(3):
        write(d / f'train-0000{i}-of-00003.parquet', 10, hf, struct=True, start=10 * i)
    write(d / 'validation-00000-of-00001.parquet', 6, hf, struct=True)
    write(d / 'test-00000-of-00001.parquet', 6, hf, struct=True, label=[-1] * 6)
    src = read_images(tmp_path, 'imagenet100')
    assert list(src.splits) == ['train', 'val'] and list(src.vocab) == ['e', 'o']
    dls = image_dls(src, size=32, bs=6, batch_tfms=None)
    assert sorted(level(dls.train)) == list(range(30))


def test_parquet_which_dataset(tmp_path):
    for n in ('imagenet-100', 'imagenet224', 'imagenette_224', 'cifar100', 'cifar10_x'):
        for k in ('train', 'val'):
            write(tmp_path / f'{n}_{k}.parquet', 4, dict(class_names=json.dumps([n, 'b'])))
    for n, want in dict(
        imagenet100='imagenet-100',
        imagenet='imagenet224',
        imagenette='imagenette_224',
        cifar100='cifar100',
        cifar10='cifar10_x',
    ).items():
        assert find_images(n, tmp_path).vocab[0] == want
    with pytest.raises(ValueError, match='several datasets'):
        read_images(tmp_path)
    one = image_dls(tmp_path / 'cifar10_x_train.parquet', size=32, valid='holdout', n_valid=1, bs=2)
    assert len(one.train_ds) == 3


def test_parquet_errors(tmp_path, monkeypatch):
    for says, kw in {
        'label': dict(label=None),
        'whole numbers': dict(label=list('abcd')),
        'no image has a label': dict(label=[-1] * 4),
        'do not fit 2 classes': dict(meta=NAMES, label=[0, 1, 2, 3]),
    }.items():
        write(tmp_path / 'train.parquet', 4, **kw)
        with pytest.raises(ValueError, match=says):
            read_images(tmp_path)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    with pytest.raises(ImportError, match=r"pip install pyarrow"):
        read_images(tmp_path)


# --- original files


def idx(a):
    return bytes([0, 0, 8, a.ndim]) + b''.join(int(o).to_bytes(4, 'big') for o in a.shape) + a.tobytes()


@pytest.mark.parametrize('sub,zip', [('', True), ('raw', False)])
def test_idx(tmp_path, sub, zip):
    d = tmp_path / sub
    d.mkdir(parents=True, exist_ok=True)
    a, y = np.stack([img(i, 28, 28, 1) for i in range(20)]), np.arange(20, dtype=np.uint8) % 10
    for k in ('train', 't10k'):
        for f, o in ((f'{k}-images-idx3-ubyte', a), (f'{k}-labels-idx1-ubyte', y)):
            (gzip.open(d / f'{f}.gz', 'wb') if zip else open(d / f, 'wb')).write(idx(o))
    dls = fashion_mnist(path=tmp_path, bs=8)
    assert torch.equal((xs(dls.valid) * 255).round().byte()[:, 0], torch.from_numpy(a)) and 'embedded' not in dls.about
    if not zip:
        (d / 't10k-labels-idx1-ubyte').write_bytes(idx(y)[:-3])
        with pytest.raises(ValueError, match='damaged'):
            read_images(tmp_path)
        (d / 't10k-labels-idx1-ubyte').unlink()
        with pytest.raises(FileNotFoundError, match='not complete'):
            read_images(tmp_path)


def test_cifar_batches(tmp_path):
    ims, e = [img(i) for i in range(4)], tmp_path / 'cifar-100-python'
    mkbatches(tmp_path, ims, [0, 1, 1, 0])
    e.mkdir()
    flat = np.stack(ims).transpose(0, 3, 1, 2).reshape(4, -1)
    for f in ('train', 'test'):
        (e / f).write_bytes(pickle.dumps({'data': flat, 'fine_labels': [2, 1, 1, 0], 'coarse_labels': [0] * 4}))
    (e / 'meta').write_bytes(pickle.dumps(dict(fine_label_names=['p', 'q', 'r'])))
    c10, c100 = cifar10(path=tmp_path, bs=4), cifar100(path=tmp_path, bs=4)
    assert len(c10.train_ds) == 20 and c100.c == 3 and ys(c100.valid) == [2, 1, 1, 0]
    assert torch.equal((xs(c10.valid) * 255).round().byte(), torch.from_numpy(np.stack(ims)).permute(0, 3, 1, 2))
    assert cifar100(path=e, bs=4).c == 3


# --- CamVid


def masks(n=12):
    return np.tile(np.arange(n, dtype=np.uint8).repeat(4)[:, None], (1, 64))


def test_camvid_folders(tmp_path):
    for k in ('train', 'val', 'test'):
        for d in (k, f'{k}annot'):
            (tmp_path / d).mkdir()
        for i in range(3):
            m = Image.fromarray(masks())
            if i:
                m = m.convert('P')  # palettes keep their numbers
            m.save(tmp_path / f'{k}annot' / f'{i}.png')
            Image.fromarray(np.stack([masks()] * 3, -1) * 20).save(tmp_path / k / f'{i}.png')
    dls = camvid(path=tmp_path, size=(48, 64), bs=3, num_workers=0)
    xb, yb = dls.valid.one_batch()
    assert type(yb) is TensorMask and yb.dtype == torch.int64 and yb.unique().tolist() == [*range(11), 255]
    want = torch.where(yb == 255, torch.tensor(11), yb.as_subclass(torch.Tensor))
    assert torch.equal(
        (xb[:, 0] * 255).round().long().as_subclass(torch.Tensor), want * 20
    )  # masks sit on their images
    assert 'val' in camvid(path=tmp_path, size=(48, 64), valid='val', bs=3).about
    learn = Learner(dls, nn.Conv2d(3, 11, 1))
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        p = learn.predict(tmp_path / 'test' / '0.png')
    assert p[0].shape == (48, 64)
    learn.export(tmp_path / 'seg.pkl')
    load_learner(tmp_path / 'seg.pkl')


def test_camvid_as_fastai_has_it(tmp_path):
    codes = ['Animal', 'Sky', 'SUVPickupTruck', 'Void', 'Road', 'LaneMkgsDriv', 'OtherMoving']
    for d in ('images', 'labels'):
        (tmp_path / d).mkdir()
    (tmp_path / 'codes.txt').write_text('\n'.join(codes))
    (tmp_path / 'valid.txt').write_text('b.png\n')
    for o in 'abc':
        Image.fromarray(img(0, 28, 64)).save(tmp_path / 'images' / f'{o}.png')
        Image.fromarray(masks(7)).save(tmp_path / 'labels' / f'{o}_P.png')
    dls = camvid(path=tmp_path, size=(28, 64), bs=1, num_workers=0, item_tfms=None, batch_tfms=None)
    _, yb = dls.valid.one_batch()
    assert len(dls.train_ds) == 2 and yb[0, ::4, 0].tolist() == [9, 0, 8, 255, 3, 3, 255]


def test_camvid_parquet(tmp_path):
    n = 9
    t = pa.table(
        dict(
            image=[png(img(i, 48, 64)) for i in range(n)],
            mask=[png(np.full((48, 64), i, np.uint8)) for i in range(n)],
            split=['test', 'train', 'val'] * 3,
        )
    )
    pq.write_table(
        t.replace_schema_metadata(dict(class_names=json.dumps(D.CAMVID + ['Unlabelled']))),
        tmp_path / 'camvid_jpeg.parquet',
    )
    dls = camvid(path=tmp_path, size=(48, 64), bs=3, num_workers=0)
    assert [int(o) for o in dls.valid.one_batch()[1][:, 0, 0]] == [0, 3, 6] and len(dls.train_ds) == 3 and dls.c == 11


# --- finding things


def test_find_in_fastai_folder(tmp_path, monkeypatch, folders):
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path / 'fa'))
    (tmp_path / 'fa' / 'data').mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match='cifar10 = FOLDER') as e:
        cifar10()
    assert str(tmp_path / 'fa' / 'data' / 'cifar-10-batches-py') in str(e.value) and 'untar_data' in str(e.value)
    (folders / 'train').rename(tmp_path / 'tr')
    (tmp_path / 'fa' / 'data' / 'cifar10').mkdir()
    (tmp_path / 'tr').rename(tmp_path / 'fa' / 'data' / 'cifar10' / 'train')
    (folders / 'valid').rename(tmp_path / 'fa' / 'data' / 'cifar10' / 'test')
    assert cifar10(bs=4).c == 3
    assert not (tmp_path / 'fa' / 'config.ini').exists()  # looking leaves nothing behind


def test_settings_name_the_copy(tmp_path, monkeypatch, folders):
    settings_at(tmp_path, monkeypatch, f'[DEFAULT]\ncifar10 = {folders}\nimagenet = nowhere\n')
    assert cifar10(bs=4).c == 3 and dataset('cifar10', bs=4).c == 3
    with pytest.raises(FileNotFoundError, match='nowhere does not exist'):
        imagenet()
    # a wrong path is not passed over
    with pytest.raises(FileNotFoundError, match='nowhere'):
        profile_dls(RunSettings(settings('paper'), n_valid=2))


def test_profile_falls_back_with_a_notice(capsys):
    s = RunSettings(settings('gpu'), n_train=50000, n_valid=10000, bs=32)
    dls = profile_dls(s)
    out = capsys.readouterr().out
    assert out.count('\n') == 1 and 'cifar10' in out and 'embedded Fashion-MNIST' in out and '/' not in out
    assert dls.one_batch()[0].shape == (32, 1, 32, 32) and len(dls.valid_ds) == 1000
    held = profile_dls(settings('laptop'), valid='holdout', bs=10)
    assert (len(held.train_ds), len(held.valid_ds), held.bs) == (5000, 1000, 10) and capsys.readouterr().out == ''


# --- the published order


@pytest.fixture
def published(monkeypatch):
    "Six images that take CIFAR-10's place: their order and pixels are the published ones"
    ims, y = [img(i) for i in range(6)], [1, 0, 0, 1, 1, 0]
    monkeypatch.setitem(D._ORDER, 'cifar10', (D._digest(y), D._digest(*ims)))
    return ims, y


def in_order(src, ims, y):
    c = canonical(src, 'cifar10')
    return (
        c.labels('test').tolist() == y
        and all(np.array_equal(open_image(o), i) for o, i in zip(c.splits['test'][0], ims))
        and [*c.splits] == ['test']
        and c.order
    )


def test_canonical_order_from_batches_and_parquet(published, tmp_path):
    ims, y = published
    b = mkbatches(tmp_path, ims, y)
    assert 'labels' in in_order(read_images(b, 'cifar10'), ims, y)

    def pqt(name, order, **cols):
        t = pa.table(dict(image=[png(ims[i]) for i in order], label=[y[i] for i in order], **cols))
        pq.write_table(t, tmp_path / f'{name}_test.parquet')
        return read_images(tmp_path / f'{name}_test.parquet')

    assert in_order(pqt('asis', range(6)), ims, y)
    back = [5, 4, 3, 2, 1, 0]
    assert in_order(pqt('index', back, index=back), ims, y)
    for src in (pqt('lost', back), pqt('part', back[:4], index=back[:4])):
        with pytest.raises(ValueError, match='order in which they were published'):
            canonical(src, 'cifar10')
    lossy = [i.copy() for i in ims]
    lossy[0][0, 0, 0] ^= 1
    t = pa.table(dict(image=list(map(png, lossy)), label=y))
    pq.write_table(t, tmp_path / 'lossy_test.parquet')
    with pytest.raises(ValueError, match='lossy'):
        canonical(read_images(tmp_path / 'lossy_test.parquet'), 'cifar10')
    assert (
        canonical(read_images(tmp_path / 'index_test.parquet'), 'cifar100').order == 'from the column index of the file'
    )
    for n in ('asis', 'part'):
        with pytest.raises(ValueError, match='published'):
            canonical(read_images(tmp_path / f'{n}_test.parquet'), 'cifar100')


def mkbatches(tmp, ims, y):
    d = tmp / 'cifar-10-batches-py'
    d.mkdir()
    a = np.stack(ims).transpose(0, 3, 1, 2).reshape(len(ims), -1)
    for f in [*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch']:
        (d / f).write_bytes(pickle.dumps(dict(data=a, labels=y)))
    (d / 'batches.meta').write_bytes(pickle.dumps(dict(label_names=['a', 'b'])))
    return tmp


def test_canonical_order_from_folders(published, tmp_path):
    ims, y = published
    for form in ('{}_x', 'img{:04d}'):
        for i, (a, k) in enumerate(zip(ims, y)):
            (f := tmp_path / form[:3] / 'test' / 'ab'[k] / f'{form.format(i)}.png').parent.mkdir(
                parents=True, exist_ok=True
            )
            Image.fromarray(a).save(f)
        assert 'file names' in in_order(read_images(tmp_path / form[:3]), ims, y)
    for i, (a, k) in enumerate(zip(ims, y)):
        (f := tmp_path / 'own' / 'test' / 'ab'[k] / f'{i // 2}.png').parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(a).save(f)
    with pytest.raises(ValueError, match='published'):
        canonical(read_images(tmp_path / 'own'), 'cifar10')
    with pytest.raises(ValueError, match='no labelled test images'):
        canonical(read_images(tmp_path / 'own' / 'test'), 'cifar10')


# --- names that are numbers

N12 = [str(i) for i in range(12)]


def tree(root, names=N12, n=2, size=32):
    "Class folders whose images say the value of the folder's name"
    for o in names:
        for i in range(n):
            f = root / o / f'{i}.png'
            f.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((size, size, 3), 20 * int(o), np.uint8)).save(f)
    return root


class ReadsNumber(nn.Module):
    "Says the class that the pixels name"

    def forward(self, x):
        return torch.nn.functional.one_hot((x[:, 0].mean((1, 2)) * 255 / 20).round().long(), 12).float()


def score(dl):
    ok = [(ReadsNumber()(b[0]).argmax(1) == b[1]).float() for b in dl]
    return torch.cat(ok).mean().item()


def from_folders(root):
    tree(root)
    return image_dls(root, valid='only', size=32).valid


def from_hf_parquet(root):
    meta = dict(
        huggingface=json.dumps(dict(info=dict(features=dict(label=dict(names={o: f'c{o}' for o in sorted(N12)})))))
    )
    write(
        root / 'test.parquet',
        12,
        meta,
        label=list(range(12)),
        image=[png(np.full((32, 32, 3), 20 * i, np.uint8)) for i in range(12)],
    )
    dl = image_dls(root, valid='only', size=32).valid
    assert list(dl.vocab) == [f'c{o}' for o in N12]
    return dl


def from_text_index(root):
    rows = sorted(N12)
    ims = [png(np.full((32, 32, 3), 20 * int(i), np.uint8)) for i in rows]
    write(
        root / 'test.parquet',
        12,
        dict(class_names=json.dumps(N12)),
        label=[int(i) for i in rows],
        image=ims,
        index=rows,
    )
    dl = image_dls(root, valid='only', size=32).valid
    assert ys(dl) == list(range(12))
    return dl


def from_wnid_images(root):
    return wnid_images(tree(root), size=32, num_workers=0)


def from_imagenet_c(root):
    tree(root / 'fog' / '1')
    return ImageNetC(root, size=32, num_workers=0).pick('fog', 1)


BY_VALUE = [from_folders, from_hf_parquet, from_text_index, from_wnid_images, from_imagenet_c]


@pytest.mark.parametrize('make', BY_VALUE, ids=lambda f: f.__name__)
def test_a_perfect_model_is_right_on_classes_named_by_numbers(make, tmp_path):
    assert score(make(tmp_path)) == 1


@pytest.mark.parametrize(
    'names,want',
    [
        (['010', '9', '001'], ['001', '9', '010']),
        (['-1', '-10', '2.5', '2'], ['-10', '-1', '2', '2.5']),
        (['12345678901234567891', '12345678901234567890'], ['12345678901234567890', '12345678901234567891']),
        (['²', '1'], ['1', '²']),
    ],
)
def test_order_of_names(names, want):
    assert by_value(names) == want and by_value(names[::-1]) == want


def test_one_number_for_two_classes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'1' and '01' are the same number|'01' and '1' are the same number"):
        wnid_images(tree(tmp_path, ['0', '1', '01']))


# --- class by class


@pytest.mark.parametrize('valid', ['test', 'holdout'])
def test_data_that_are_mixed_keep_their_order(valid):
    for n in (None, 100):
        for k, i in choose_images(embedded_fashion(), valid, n_valid=n):
            assert (np.diff(i) > 0).all()
    y = np.arange(200) % 10
    x = np.zeros((200, 8, 8, 3), np.uint8)
    for k, i in choose_images(ImageSource(dict(train=(x, y), test=(x, y)), range(10)), valid):
        assert (np.diff(i) > 0).all()


@pytest.mark.parametrize('name', [o for o in D._SETS if o not in ('camvid', 'fashion_mnist')])
def test_no_named_loader_gives_a_sorted_validation_set(name, tmp_path):
    for k in ('train', 'test'):
        tree(tmp_path / k, n=8)
    dl = dataset(name, path=tmp_path, size=32, num_workers=0, bs=24).valid
    assert len(set(dl.one_batch()[1].tolist())) > 6


def test_the_published_order_is_kept(published, tmp_path):
    ims, y = [img(i) for i in range(20)], [0] * 10 + [1] * 10
    t = pa.table(dict(image=list(map(png, ims)), label=y, index=list(range(20))))
    pq.write_table(t, tmp_path / 'x_test.parquet')
    src = read_images(tmp_path / 'x_test.parquet')
    assert (
        ys(image_dls(src, valid='only', size=32).valid) != y
        and ys(image_dls(canonical(src, 'cifar100'), valid='only', size=32).valid) == y
    )


# --- whole numbers


@pytest.mark.parametrize(
    'bad,f',
    [
        (0, lambda n: balanced([0, 1, 1], n)),
        (float('nan'), lambda n: balanced([0, 1, 1], n)),
        (True, lambda n: fashion_mnist(n_valid=n, valid='holdout')),
        (1.5, lambda n: image_dls(embedded_fashion(), n, mode='L')),
    ],
)
def test_numbers_of_images_are_whole_and_positive(bad, f):
    with pytest.raises(ValueError, match='whole number|at least|exist'):
        f(bad)


# --- a model's own way of cutting images


@pytest.mark.parametrize('name,size', [('deit_tiny_patch16_224', 224), ('resnet18', None)])
def test_images_are_cut_as_timm_cuts_them(name, size, tmp_path):
    m = timm.create_model(name)
    cfg = timm.data.resolve_model_data_config(m, use_test_size=size is None)
    n = cfg['input_size'][-1]
    for i in range(2):
        (tmp_path / 'a').mkdir(exist_ok=True)
        Image.fromarray(img(i, 300, 411)).save(tmp_path / 'a' / f'{i}.png')
    dl = image_dls(
        tmp_path, size=n, valid='only', item_tfms=None, batch_tfms=None, num_workers=0, **timm_fit(Normalized(m), size)
    )
    want = timm.data.create_transform(**{**cfg, 'mean': (0, 0, 0), 'std': (1, 1, 1)})
    for x, f in zip(xs(dl.valid), sorted((tmp_path / 'a').iterdir())):
        assert torch.equal((x * 255).round(), (want(Image.open(f)) * 255).round())
    assert f'pct {cfg["crop_pct"]:g}, bicubic, center' in dl.about


# --- profiles ask for more than there is


@pytest.mark.parametrize('valid', ['test', 'holdout'])
def test_a_profile_takes_what_there_is(valid, tmp_path, capsys):
    for k in ('train', 'test'):
        tree(tmp_path / k, n=4)
    s = RunSettings(settings('gpu'), dataset='cifar10', cifar10=tmp_path)
    dls = profile_dls(s, valid=valid, num_workers=0)
    n = dict(test=(48, 48), holdout=(44, 4))[valid]
    assert (len(dls.train_ds), len(dls.valid_ds)) == n and 'fewer images' in capsys.readouterr().out


def test_a_profile_runs_without_the_files_of_fashion_mnist(monkeypatch):
    monkeypatch.setitem(D._SETS, 'fashion_mnist', dict(D._SETS['fashion_mnist'], dirs=[]))
    dls = profile_dls(RunSettings(settings('gpu'), dataset='fashion_mnist'))
    assert len(dls.train_ds) > 500 and len(dls.valid_ds) > 100


# --- what people have in their folders


@pytest.fixture
def photos(tmp_path):
    "Five classes of a few photos each"
    for i, c in enumerate('bag coat dress shirt shoe'.split()):
        for j in range(4):
            (f := tmp_path / 'photos' / c / f'{j}.jpg').parent.mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (60, 40), (50 * i, 50 * j, 9)).save(f)
    return tmp_path / 'photos'


def test_classes_are_numbered_as_the_model_has_them(photos):
    vocab = ['shoe', 'hat', *'shirt dress coat bag'.split()]
    dls = image_dls(photos, size=32, bs=4, valid='only', vocab=vocab)
    named = [vocab[int(y)] for _, y in dls.valid_ds]
    assert named == [o.split('/')[0] for o in dls.valid.dataset.files] and dls.c == 6
    assert '5 of 6 classes' in dls.about


def test_words_and_folders_of_imagenet_are_the_same(tmp_path):
    for c in ('n02102040', 'n01440764'):
        (tmp_path / 'd' / c).mkdir(parents=True)
        Image.new('RGB', (32, 32)).save(tmp_path / 'd' / c / '0.png')
    assert D.same_names(['tench', 'n02102040', 'cat'], ['n02102040', 'n01440764']) == [1, 0, None]
    dls = image_dls(tmp_path / 'd', valid='only', vocab=['n01440764', 'other', 'n02102040'], bs=2)
    assert sorted(int(y) for _, y in dls.valid_ds) == [0, 2]


def test_a_share_of_the_images_is_held_out(photos):
    a, b = [image_dls(str(photos), size=32, bs=4, **kw) for kw in (dict(valid_pct=0.25), dict(n_valid=0.25))]
    assert len(a.valid_ds) == len(b.valid_ds) == 5 and a.valid_ds.files == b.valid_ds.files
    assert sorted(a.train_ds.files + a.valid_ds.files) == sorted(
        f'{f.parent.name}/{f.name}' for f in photos.rglob('*.jpg')
    )
    with pytest.raises(ValueError, match='one of them'):
        image_dls(photos, size=32, n_valid=5, valid_pct=0.2)


def test_photos_are_turned_upright(tmp_path):
    "A phone writes the pixels as its sensor has them, and how it was held into a tag"
    a = np.zeros((32, 64, 3), np.uint8)
    a[:, 32:] = 255
    tag = Image.Exif()
    tag[0x0112] = 6
    for c in 'ab':
        (tmp_path / c).mkdir()
        Image.fromarray(a).save(tmp_path / c / '0.png', exif=tag)
    x = image_dls(tmp_path, valid='only', bs=2, batch_tfms=None).valid.one_batch()[0]
    assert x.shape == (2, 3, 64, 32) and x[:, :, :32].max() == 0 and x[:, :, 32:].min() == 1


def test_a_photo_in_training_and_validation_is_told(photos, tmp_path):
    "By content alone, once, with two names and the number; not where all images are for both sides"
    for k in ('train', 'valid'):
        shutil.copytree(photos, tmp_path / k)
        for f in (tmp_path / k).rglob('*.jpg'):
            f.write_bytes(f.read_bytes() + f'{k} {f.name}'.encode() * (1 + len(f.parent.name)))
    files = [sorted((tmp_path / k).rglob('*.jpg')) for k in ('train', 'valid')]
    options = dict(size=32, bs=4, num_workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        image_dls(tmp_path, **options)
    for i in (3, 5):
        shutil.copy(files[0][i], files[1][i])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        image_dls(tmp_path / 'train', valid='only', **options)
    with pytest.warns(UserWarning, match='in training and validation: train/.*jpg = valid/.*jpg .2 pairs') as heard:
        [image_dls(tmp_path, **options) for _ in range(2)]
    assert len(heard) == 1


def test_an_empty_class_folder_is_named_once(photos, tmp_path):
    "Folders of other files, such as fastai's `models`, are no classes, and nothing is said of them"
    root = tmp_path / 'some'
    shutil.copytree(photos, root)
    (root / 'zebra').mkdir()
    (root / 'models').mkdir()
    (root / 'models' / 'mine.pth').write_bytes(b'0')
    with pytest.warns(UserWarning, match=r'no images in zebra, so there is no such class') as heard:
        assert 'zebra' not in [D.read_folders(root).vocab for _ in range(2)][1]
    assert len(heard) == 1 and 'models' not in str(heard[0].message)


def test_heic_is_said_once_for_each_folder(photos, tmp_path, monkeypatch):
    for k in 'ab':
        shutil.copytree(photos, tmp_path / k)
        (tmp_path / k / 'bag' / 'IMG.HEIC').write_bytes(b'0')
    monkeypatch.setattr(D, '_reads_heic', lambda: False)
    with pytest.warns(UserWarning, match='left out, 1 of them') as heard:
        for k in 'aabb':
            D.read_images(tmp_path / k)
    assert len(heard) == 2


def test_heic_files_are_counted_or_read(photos, monkeypatch):
    for i in range(3):
        (photos / 'bag' / f'IMG_{i}.HEIC').write_bytes((photos / 'bag' / f'{i}.jpg').read_bytes())
    monkeypatch.setattr(D, '_reads_heic', lambda: False)
    with pytest.warns(UserWarning, match='left out, 3 of them .IMG_0.HEIC.*pip install pillow-heif') as heard:
        assert len(D.read_folders(photos).labels('train')) == 20
    assert len(heard) == 1
    with pytest.raises(OSError, match='pillow-heif'):
        open_image(photos / 'bag' / 'IMG_0.HEIC')
    monkeypatch.setattr(D, '_reads_heic', lambda: True)
    assert len(D.read_folders(photos).labels('train')) == 23
    assert open_image(photos / 'bag' / 'IMG_0.HEIC').size == (60, 40)


def test_a_class_with_a_single_image_is_named(photos):
    for f in [*(photos / 'coat').iterdir()][1:]:
        f.unlink()
    with pytest.warns(UserWarning, match='single image of coat'):
        image_dls(photos, size=32)


def test_an_image_is_known_by_folder_name_and_size_of_its_file(photos):
    "Wherever the folder lies, and whatever else is in it; not under another name, nor with other content"
    src = D.read_folders(photos)
    before = D.image_keys(src, 'train', range(20))
    assert len({*before}) == 20
    moved = D.read_folders(photos.rename(photos.parent / 'moved'))
    assert (D.image_keys(moved, 'train', range(20)) == before).all()
    first = src.files('train', [0])[0]
    Image.new('RGB', (80, 80), 'red').save(photos.parent / 'moved' / first)
    now = D.image_keys(moved, 'train', range(20))
    assert now[0] != before[0] and (now[1:] == before[1:]).all()


def test_an_array_is_known_by_its_pixels():
    x = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    a, b = [ImageSource({k: (o, [0] * len(o))}, ['a']) for k, o in dict(train=x, test=x[::-1]).items()]
    assert (D.image_keys(a, 'train', [0, 1]) == D.image_keys(b, 'test', [1, 0])).all()


def test_photos_without_compression_are_known_by_content_too(tmp_path):
    "All of their files have one size, and cameras number them from the start"
    for side, level in dict(train=10, test=90).items():
        (tmp_path / side / 'bag').mkdir(parents=True)
        for i in range(3):
            Image.new('RGB', (16, 16), (level + i,) * 3).save(tmp_path / side / 'bag' / f'{i}.bmp')
    src = D.read_folders(tmp_path)
    a, b = [D.image_keys(src, o, range(3)) for o in ('train', 'test')]
    assert len({*a, *b}) == 6


def test_both_sides_are_kept_with_a_learner(photos, tmp_path):
    dls = image_dls(photos, size=32, n_valid=5)
    seen = D.seen_by(pickle.loads(pickle.dumps(dls.new_empty())))
    assert list(map(len, seen)) == [15, 5, 15] and not {*seen.trained} & {*seen.valid}
    assert (seen.valid == dls.valid_ds.keys).all() and D.seen_by(image_dls(photos, size=32, valid='only')) is None
