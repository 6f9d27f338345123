"`robust-demo` as a newcomer types it, each time in a process of its own."
import json, os, re, subprocess, sys
from pathlib import Path
import pandas as pd, pytest
from PIL import Image

HEAD = """import sys, io, json, contextlib, traceback, runpy
def main(args): sys.argv = ['robust-demo',*args]; runpy.run_path(__file__+'_bin/robust-demo', run_name='__main__')
"""
COMMAND = "import sys\nfrom robust_nbdev.cli import robust_demo\nsys.exit(robust_demo())\n"            # what the installed script does
def script(cwd, code, *args):
    "Run `code` as a script, as the installed command is: importing torch takes seconds, so several calls share a process"
    (f:=cwd.parent/f'{cwd.name}.py').write_text(HEAD+code); b = f.with_name(f.name+'_bin'); b.mkdir(exist_ok=True); (b/'robust-demo').write_text(COMMAND)
    return subprocess.run([sys.executable, f, *args], cwd=cwd, capture_output=True, text=True, timeout=250, env=os.environ|dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore', ROBUST_PROFILE='smoke'))

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    d = tmp_path_factory.mktemp('demo'); r = script(d, 'main(sys.argv[1:])', '--profile', 'smoke', '--out', 'here/there')
    assert r.returncode==0, r.stderr
    return d/'here'/'there',r

def test_demo_writes_what_it_says(run):
    out,r = run
    assert {p.relative_to(out).as_posix() for p in out.rglob('*') if p.is_file()}=={'robust_demo.png','robust_demo.csv',*(f'{m}/{f}' for m in ('plain','robust') for f in ('report.json','report.csv','verdicts.npz'))}
    assert min(Image.open(out/'robust_demo.png').size)>400 and 'Traceback' not in r.stderr
    t = pd.read_csv(out/'robust_demo.csv')
    assert t.columns.tolist()==['attack','plain','robust'] and t.attack.tolist()==['clean','FGSM(0.1)','PGD(0.1, steps=3)','APGD(0.1, steps=3)','worst case']

def test_demo_prints_the_table_of_its_files(run):
    out,r = run; t = pd.read_csv(out/'robust_demo.csv')
    printed = [l for l in r.stdout.splitlines() if re.match(r'\s*(clean|FGSM|PGD|APGD|worst)', l)][-5:]
    assert [l.split()[-2:] for l in printed]==[[f'{a:.1f}',f'{b:.1f}'] for a,b in zip(t.plain,t.robust)]
    for m in ('plain','robust'):
        rows = json.loads((out/m/'report.json').read_text())['rows']
        assert [f"{100*o['accuracy']:.1f}" for o in rows]==[f'{o:.1f}' for o in t[m]] and all(o['n']==128 and o['seed']==42 for o in rows)
    assert 'eps=0.1, n=128, seed=42' in r.stdout and 'smoke' not in r.stderr

def test_second_run_gives_the_same_table_and_another_seed_another(run, tmp_path):
    out,_ = run
    r = script(tmp_path, "for a in ('--out again', '--seed 7 --eps 8/255 --out other'):\n    try: main(a.split())\n    except SystemExit as e:\n        if e.code: raise")
    assert r.returncode==0, r.stderr
    assert (tmp_path/'again'/'robust_demo.csv').read_text()==(out/'robust_demo.csv').read_text()
    t = pd.read_csv(tmp_path/'other'/'robust_demo.csv')
    assert t.attack.tolist()[1]=='FGSM(8/255)' and not t.equals(pd.read_csv(out/'robust_demo.csv'))

BAD = {'--eps 8':'8/255', '--eps -1':'>= 0', '--eps 0':'above 0', '--eps abc':'abc', '--eps 1/0':'1/0', '--eps nan':'nan', '--eps inf':'inf', '--epochs 0':'at least 1, got 0', '--epochs -3':'-3', '--epochs 1.5':'1.5', '--profile nope':'nope', '--device nope':'nope', '--seed -1':'between 0 and',
    '--seed 99999999999999999999':'99999999999999999999', '--out afile':'afile', '--nonsense 1':'nonsense', '--eps':'--eps', 'extra':'extra'}
@pytest.fixture(scope='module')
def failures(tmp_path_factory):
    "All at once, in one process, since importing torch takes seconds: code and words of each"
    d = tmp_path_factory.mktemp('bad'); (d/'afile').write_text('')
    r = script(d, '''out = {}
for args in json.loads(sys.argv[1]):
    err,std,code = io.StringIO(),io.StringIO(),0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(std):
        try: main(args.split())
        except SystemExit as e:
            code = e.code
            if isinstance(code, str): err.write(code); code = 1
        except BaseException as e: code = -1; err.write(traceback.format_exc())
    out[args] = code,err.getvalue(),std.getvalue()
print('RESULT'+json.dumps(out))''', json.dumps([*BAD,'--help']))
    return json.loads(r.stdout.split('RESULT')[1]),d

@pytest.mark.parametrize('args', BAD)
def test_bad_arguments_are_one_clear_line(failures, args):
    code,err,out = failures[0][args]
    last = err.strip().splitlines()[-1] if err.strip() else ''
    assert code not in (0,None,-1) and 'Traceback' not in err, err
    assert last.startswith('robust-demo: ') and BAD[args] in last and len(last)<300
    assert 'usage' in err or len(err.strip().splitlines())==1
    assert not out.strip(), 'it had begun to work'

def test_bad_arguments_leave_no_folder(failures):
    assert [p.name for p in failures[1].iterdir()]==['afile']

def test_help(failures):
    code,_,out = failures[0]['--help']
    assert code in (0,None) and all(o in out for o in ('--profile','--eps','--epochs','--out','--seed','--device','Train a plain and a robust vision transformer'))

def test_number_of_images_is_the_one_measured(tmp_path):
    "Where a dataset is not to be had, fewer images than the profile asks for may be measured, and that number is printed"
    from fastcore.basics import noop
    from robust_nbdev.cli import demo_settings, run_demo
    from robust_nbdev.datasets import RunSettings
    s = RunSettings(demo_settings('smoke'), dataset='imagenet100', imagenet100=None, size=None, n_train=128, n_valid=1500)
    assert run_demo(s, tmp_path, bar=False, say=noop).attrs['n']==1000
