"""Soft labels of a teacher for fixed views of the CIFAR-10 training images, so that distillation costs nothing a step.

python tools/teacher.py
python tools/train_checkpoints.py cifar10_vit --start cifar10_vit --teacher robust_out/teacher --epochs 12

The teacher is the plainly trained ResNet-18 that travels with pyautoattack as its example. A view is a shift of up
to four
pixels and maybe a mirror image; which one follows from the image's own pixels and the number of the view. One file a
view."""

import importlib.util, time
from fastcore.script import call_parse
from robust_nbdev.all import *
from robust_nbdev.core import image_seed, uniform
from robust_nbdev.datasets import BatchDL


def image_hashes(a):  # uint8 [N,H,W,C]
    "One int64 per image, from its pixels alone"
    x = torch.from_numpy(a)
    return torch.cat([image_seed(o.float() / 255) for o in x.split(1000)])


def view(
    a: np.ndarray,  # Images, uint8 [N,H,W,C]
    hashes: Tensor,  # Of `image_hashes` [N]
    v: int,  # The number of the view; 0: the images as they are
    pad: int = 4,  # Largest shift in pixels; what comes in from outside is black
) -> np.ndarray:  # uint8 [N,H,W,C]
    "View `v` of each image"
    if v == 0:
        return a
    n, h, w = a.shape[:3]
    u = uniform(hashes, torch.zeros(n, 3), v).numpy()
    down, right = (u[:, :2] * (2 * pad + 1)).astype(int).T
    columns = np.where(u[:, 2:] < 0.5, np.arange(w)[::-1], np.arange(w)) + right[:, None]
    rows = np.arange(h) + down[:, None]
    padded = np.pad(a, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None]]


def resnet18():
    "pyautoattack's example model: takes images in [0,1], returns ten logits"
    folder = Path(importlib.util.find_spec('pyautoattack').origin).parent / 'examples'
    spec = importlib.util.spec_from_file_location('resnet', folder / 'resnet.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.ResNet18()
    net.load_state_dict(torch.load(folder / 'model_test.pt', map_location='cpu', weights_only=True))
    return net.eval()


def ask(net, a, bs=100):
    "The teacher's logits for uint8 images [N,H,W,C]"
    net = net.to(memory_format=torch.channels_last)
    with torch.inference_mode():
        zs = [net(torch.from_numpy(a[i : i + bs]).permute(0, 3, 1, 2).float() / 255) for i in range(0, len(a), bs)]
    return torch.cat(zs)


def read_labels(folder):
    "What was written: hashes [N], sorted; logits [views,N,10]"
    files = sorted(Path(folder).glob('view*.npz'))
    if not files:
        raise FileNotFoundError(f'{folder} has no soft labels: python tools/teacher.py --out {folder}')
    parts = [dict(np.load(f)) for f in files]
    if any((p['hashes'] != parts[0]['hashes']).any() for p in parts):
        raise ValueError(f'{folder} mixes labels of different images')
    return torch.from_numpy(parts[0]['hashes']), torch.from_numpy(np.stack([p['logits'] for p in parts])).float()


class Distilled(nn.Module):
    "The cross-entropy of the labels, and the KL to what a teacher has said, both softened by the temperature `T`"

    def __init__(
        self,
        T: float = 4.0,  # Temperature
        share: float = 0.5,  # Of the KL
    ):
        super().__init__()
        self.T, self.share = T, share

    def forward(self, z, y, t=None):
        hard = F.cross_entropy(z, y)
        if t is None:
            return hard  # validation
        soft = F.kl_div((z / self.T).log_softmax(1), (t / self.T).softmax(1), reduction='batchmean') * self.T**2
        return (1 - self.share) * hard + self.share * soft


class TaughtDL(BatchDL):
    "Batches of one view, with the teacher's logits as a second target"

    v = 0

    def create_batches(self, samps):
        images, labels = [tl.items for tl in self.dataset.tls]
        for i in self.chunkify(samps):
            k = self.row[i]
            x = torch.from_numpy(view(images[i], self.hashes[k], self.v))
            yield (
                TensorImage(x.permute(0, 3, 1, 2).contiguous()),
                TensorCategory(torch.as_tensor(labels[i])),
                self.logits[self.v, k],
            )


class NextView(Callback):
    "Each epoch shows the next view"

    run_valid = False

    def before_train(self):
        self.dl.v = self.epoch % len(self.dl.logits)


def teach(dls, folder):
    "Let the training batches carry what the teacher says of them; raises ValueError where it has not seen an image"
    old, (hashes, logits) = dls.train, read_labels(folder)
    own = image_hashes(old.dataset.tls[0].items)
    row = torch.searchsorted(hashes, own).clamp(max=len(hashes) - 1)
    if not torch.equal(hashes[row], own):
        raise ValueError(
            f'{folder} has no labels for some of the training images: python tools/teacher.py --out {folder}'
        )
    new = old.new(cls=TaughtDL)
    new.rng, new.hashes, new.logits, new.row = old.rng, hashes, logits, row.numpy()
    dls.loaders[0] = new
    return dls


@call_parse
def main(
    views: str = '0,1,2,3',  # Numbers of the views; those that are there already are kept
    out: str = 'robust_out/teacher',  # Folder
    n: int = None,  # Training images; default: all
):
    "Ask the teacher about every view of the CIFAR-10 training images"
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    net, dls = resnet18(), dataset('cifar10', n_train=n, n_valid=1000, batch_tfms=None)
    a = dls.train.dataset.tls[0].items
    hashes = image_hashes(a)
    order = hashes.argsort()
    a, hashes = a[order.numpy()], hashes[order]
    for v in map(int, views.split(',')):
        f = out / f'view{v}.npz'
        if f.exists():
            continue
        t = time.perf_counter()
        z = ask(net, view(a, hashes, v))
        np.savez_compressed(f, hashes=hashes.numpy(), logits=z.half().numpy())
        print(f'{f}: {len(a)} images, {time.perf_counter() - t:.0f} s', flush=True)
