"Two processes on the CPU (gloo), as fastai's DistributedTrainer runs them: no hang, equal weights, the metrics of one process (R24)."
import json, os, socket, subprocess, sys
import pytest
pytest.importorskip('accelerate')

SCRIPT = '''
import json, os, sys, torch, torch.distributed as dist
from contextlib import nullcontext
from fastai.vision.all import *
from fastai.distributed import *
from robust_nbdev.all import *
from robust_nbdev.test_utils import tiny_vit
from torch.utils.data import TensorDataset
rank,world = int(os.environ.get('RANK',0)),int(os.environ.get('WORLD_SIZE',1))
DistributedDL._broadcast = lambda self,t,rank: (lambda v: (dist.broadcast(v, rank), v.tolist())[1])(LongTensor(t))     # fastai's own moves it to a GPU
if world>1: dist.init_process_group('gloo')
torch.manual_seed(0)
x,y = torch.rand(64+37,1,28,28),torch.randint(0,4,(64+37,))
for i in range(len(x)): x[i,:,7*int(y[i]):7*int(y[i])+7] += .5
x = x.clamp(0,1)
split = lambda a,b: DataLoader(list(zip(x[a:b],y[a:b])), bs=8, shuffle=False, device=torch.device('cpu'))
model = tiny_vit(num_classes=4)
attack = PGD(.05, steps=3)
METHODS = dict(trades=[TRADES(PGD(.02, steps=2)), AWP(.01), EMA(.9)], mart=[MART(PGD(.02, steps=2)), AWP(.01), GradientAccumulation(16)], free=[FreeAT(FGSM(.02), replay=2)])
learn = Learner(DataLoaders(split(0,64), split(64,101), device='cpu'), model, loss_func=CrossEntropyLossFlat(), metrics=[RobustAccuracy(attack)], cbs=METHODS.get(sys.argv[1], [AdvTrain(PGD(.02, steps=2))]), opt_func=SGD)
with learn.distrib_ctx(sync_bn=False) if world>1 else nullcontext():
    with learn.no_bar(), learn.no_logging():
        trained = sys.argv[1]!='look'
        if trained: learn.fit(1, 1e-2)
        v = learn.validate()
w = torch.cat([p.detach().flatten() for p in get_model(learn.model).parameters()])
print('RESULT'+json.dumps(dict(rank=rank, robust=v[1], total=float(w.double().sum()), first=w[:5].tolist(), rows=len(learn.recorder.values))))
if world>1: dist.destroy_process_group()
'''
def run(world, mode):
    with socket.socket() as s: s.bind(('127.0.0.1',0)); port = s.getsockname()[1]
    env = os.environ|dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore', ACCELERATE_USE_CPU='true', CUDA_VISIBLE_DEVICES='', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    if world>1: env |= dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    ps = [subprocess.Popen([sys.executable,'-c',SCRIPT,mode], env=env|(dict(RANK=str(r), LOCAL_RANK=str(r)) if world>1 else {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(world)]
    try: outs = [p.communicate(timeout=150) for p in ps]
    finally:
        for p in ps: p.kill()
    assert all(p.returncode==0 for p in ps), outs
    return [json.loads(o.split('RESULT')[1].splitlines()[0]) for o,_ in outs]

def test_two_processes_measure_what_one_measures():
    "37 images: the last batch is uneven and padded, and padding must not count"
    (one,),two = run(1, 'look'),run(2, 'look')
    assert [o['robust'] for o in two]==[pytest.approx(one['robust'])]*2

@pytest.mark.parametrize('mode', ['train','trades','mart','free'])
def test_two_processes_train_one_model(mode):
    "Moved weights, replayed batches and all: the ranks stay in step"
    a,b = run(2, mode)
    assert a['total']==b['total'] and a['first']==b['first'] and a['robust']==b['robust']
