"""Train in this process and, at the same time, in two others that gloo connects: what do they end with?

A job is Python that defines `learner(dls)`, `fits` (a list of functions of a Learner) and `keep(learn)`."""

import os, subprocess, sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

ENV = dict(
    CUDA_VISIBLE_DEVICES='', ACCELERATE_USE_CPU='true', OMP_NUM_THREADS='1', WORLD_SIZE='2', MASTER_ADDR='localhost'
)


@contextmanager
def running(script, folder, *args):
    "Meanwhile a script runs `as_two` in this folder; it must end well"
    root, log = Path(__file__).resolve().parents[1], folder / 'log'
    env = {k: v for k, v in os.environ.items() if k not in ('RANK', 'LOCAL_RANK', 'MASTER_PORT')} | ENV
    env['PYTHONPATH'] = os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')])
    with log.open('w') as f:
        p = subprocess.Popen([sys.executable, script, *args], env=env, cwd=folder, stdout=f, stderr=f)
    try:
        yield
        assert p.wait(timeout=300) == 0, log.read_text()[-3000:]
    finally:
        p.kill()


@contextmanager
def as_two():
    "Inside, this process goes on as two, which know their rank; the second is a fork, which spares it the imports"
    import torch, torch.distributed as dist
    from fastai.distributed import DistributedDL

    child = os.fork()
    rank = int(child == 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    DistributedDL._broadcast = lambda self, t, rank: (lambda v: (dist.broadcast(v, rank), v.tolist())[1])(
        torch.LongTensor(t)
    )  # fastai's own moves it to a GPU
    dist.init_process_group('gloo', init_method=Path('meeting').resolve().as_uri(), rank=rank, world_size=2)
    yield rank
    dist.destroy_process_group()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def train(job, world=1):
    "32 random images, in batches of 16: each process has its half of every batch"
    import torch
    from fastai.vision.all import DataLoader, DataLoaders, set_seed

    names = {}
    exec(
        'from fastai.vision.all import *\nfrom robust_nbdev.all import *\n'
        'from robust_nbdev.test_utils import tiny_vit\n' + job,
        names,
    )
    set_seed(0)
    x, y = torch.rand(32, 1, 28, 28), torch.randint(0, 4, (32,))
    joined = [
        r * 16 + i for t in range(0, 16, 8) for r in range(2) for i in range(t, t + 8)
    ]  # what the two get, side by side

    def split(idx, bs):
        return DataLoader([(x[i], y[i]) for i in idx], bs=bs, shuffle=False, device=torch.device('cpu'))

    learn = names['learner'](
        DataLoaders(split(range(32) if world > 1 else joined, 16 // world), split(range(8), 8), device='cpu')
    )
    for fit in names['fits']:
        with learn.distrib_ctx(sync_bn=False) if world > 1 else nullcontext(), learn.no_bar(), learn.no_logging():
            fit(learn)
    return names['keep'](learn)


def one_and_two(job, folder):
    "What one process keeps, and each of two"
    import torch

    (folder / 'job.py').write_text(job)
    with running(__file__, folder):
        one = train(job)
    return [one] + [torch.load(folder / f'{r}.pth') for r in range(2)]


if __name__ == '__main__':
    import torch, robust_nbdev.all  # noqa: F401, before the fork

    with as_two() as rank:
        torch.save(train(Path('job.py').read_text(), 2), f'{rank}.pth')
