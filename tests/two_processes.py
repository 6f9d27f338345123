"""Train in this process and, at the same time, in two others that gloo connects: what do they end with?

A job is Python that defines `learner(dls)`, `fits` (a list of functions of a Learner) and `keep(learn)`."""

import os, socket, subprocess, sys
from contextlib import nullcontext
from pathlib import Path


def train(job, rank=0, world=1):
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

    with socket.socket() as s:
        s.bind(('localhost', 0))
        port = s.getsockname()[1]
    root = Path(__file__).resolve().parents[1]
    env = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')]),
        'CUDA_VISIBLE_DEVICES': '',
        'ACCELERATE_USE_CPU': 'true',
        'OMP_NUM_THREADS': '1',
        'WORLD_SIZE': '2',
        'MASTER_ADDR': 'localhost',
        'MASTER_PORT': str(port),
    }
    (folder / 'job.py').write_text(job)
    ps = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**env, 'RANK': str(r), 'LOCAL_RANK': str(r)},
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        one = train(job)
        for p in ps:
            err = p.communicate(timeout=300)[1]
            assert p.returncode == 0, err[-3000:]
    finally:
        for p in ps:
            p.kill()
    return [one] + [torch.load(folder / f'{r}.pth') for r in range(2)]


if __name__ == '__main__':
    import torch, torch.distributed as dist
    from fastai.distributed import DistributedDL

    DistributedDL._broadcast = lambda self, t, rank: (lambda v: (dist.broadcast(v, rank), v.tolist())[1])(
        torch.LongTensor(t)
    )  # fastai's own moves it to a GPU
    dist.init_process_group('gloo')
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    torch.save(train((folder / 'job.py').read_text(), rank, 2), folder / f'{rank}.pth')
    dist.destroy_process_group()
