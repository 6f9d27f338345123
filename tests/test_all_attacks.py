"""Every attack of the package against models that write where others still read: into their input, or into what they
returned before.

A new attack is found by itself. One that cannot be built from its defaults needs an entry in `ARGS`."""

import inspect
from contextlib import nullcontext
import pytest, torch, warnings
from torch import nn
from package import everything
from robust_nbdev.aas import AAS, Around, Float64, GapScaled, Scaled
from robust_nbdev.adv_train import AdvTrain, NFGSM
from robust_nbdev.afat import GreedyOcclusion
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.cli import attack_types
from robust_nbdev.core import Wrapper
from robust_nbdev.vit import attn_maps, block_outputs
from robust_nbdev.robust_tokens import TokenAttack
from robust_nbdev.tora import GateFirst
from robust_nbdev.evaluate import AdvValid, RobustAccuracy, predict, robust_report, save_adv
from robust_nbdev.test_utils import state_of, synth_learner, tiny_vit

E = 0.1
X, Y = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2])
# have no step of their own
BASES = {Value, AttackBase, Attack, PatchAttack, Wraps, Around}


def vit():
    return tiny_vit(size=16, patch=4, in_chans=3, num_classes=5).model


def is_attack(c):
    return (
        inspect.isclass(c) and issubclass(c, Value) and any('__call__' in vars(o) for o in c.__mro__) and c not in BASES
    )


CLASSES = [c for k, c in sorted(vars(everything).items()) if is_attack(c)]

pgd = PGD(E, steps=2)
ARGS = {
    AAS: dict(attack=pgd, ascent=2),
    Scaled: dict(attack=pgd, s=0.5),
    GapScaled: dict(attack=pgd),
    Float64: dict(attack=pgd),
    WorstCase: dict(attacks=[FGSM(E), PGD(E, steps=2, loss=kl)]),
    Transfer: dict(surrogate=None, attack=pgd),
    AutoAttack: dict(eps=E, attacks=[APGD(E, steps=3), Square(E, queries=5)]),
    Square: dict(eps=E, queries=20),
    FAB: dict(eps=E, steps=3, targets=2),
    APGDT: dict(eps=E, steps=3, targets=2),
    RandomOcclusion: dict(draws=3),
    GreedyOcclusion: dict(share=0.2),
    TokenAttack: dict(eps=E, steps=3, bits='inside'),
    PatchFool: dict(steps=3),
    GateFirst: dict(eps=E, steps=3, gate=ce, gate_steps=2),
}


def made(cls, model):
    "An attack of this class, short"
    kw = {**ARGS.get(cls, {})}
    if 'surrogate' in kw:
        kw['surrogate'] = model
    if not kw:
        kw = {
            k: v
            for k, v in dict(eps=E, steps=3).items()
            if any(f.name == k and f.init for f in cls.__dataclass_fields__.values())
        }
    return cls(**kw)


VARIANTS = {
    'kl': lambda m: PGD(E, steps=3, loss=kl),
    'draws': lambda m: PGD(E, steps=2, draws=2),
    'apgd kl': lambda m: APGD(E, steps=4, loss=kl, restarts=2),
    'square L2': lambda m: Square(1.0, norm='L2', queries=10),
    'transfer kl': lambda m: Transfer(m, PGD(E, steps=2, loss=kl)),
    'fast': lambda m: Transfer(Fast(m, dtype=None, compile=False), pgd),
}
BY_CLASS = {c.__name__: lambda m, c=c: made(c, m) for c in CLASSES}
ATTACKS = {**BY_CLASS, **VARIANTS}


class Pure(Wrapper):
    "Normalises its input, and leaves it alone"

    def forward(self, x):
        return self.model((x - 0.5) / 0.5)


class Writes(Wrapper):
    "Normalises in place, leaves nothing of its input, and answers in the same memory each time"

    def __init__(self, model):
        super().__init__(model)
        self.out = {}

    def forward(self, x):
        z = self.model(x.sub_(0.5).div_(0.5).clone())
        x.detach().zero_()
        return self.out.setdefault((z.shape, z.dtype), torch.empty_like(z.detach())).detach().copy_(z)


# starts from noise around the ball, and is not projected
WIDER = {NFGSM}


def adversarial(attack, model, x=X, y=Y):
    "What the attack makes, after a look at all that it must leave alone"
    x, y = x.clone(), y.clone()
    x0, y0, before = x.clone(), y.clone(), state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        x_adv = attack(model, x, y, seed=1)
    assert torch.equal(x, x0) and torch.equal(y, y0) and state_of(model) == before and x_adv.dtype == x.dtype
    d = (x_adv.float() - x.float()).flatten(1)
    if attack.norm and type(attack) not in WIDER:
        assert (d.abs().amax(1) if attack.norm == 'Linf' else d.norm(dim=1)).max() <= attack.eps + 1e-6
    assert 0 <= x_adv.min() and x_adv.max() <= 1
    return x_adv


@pytest.mark.parametrize('k,how', [*zip(ATTACKS, ['float32', 'amp', 'bfloat16', 'float64'] * len(ATTACKS))])
def test_models_that_write(k, how):
    dtype = torch.float32 if how == 'amp' else getattr(torch, how)
    m, x = vit().to(dtype), X.to(dtype)
    scope = torch.autocast('cpu', torch.bfloat16) if how == 'amp' else nullcontext()
    pure, bad = Pure(m).eval(), Writes(m).eval()
    with scope:
        assert torch.equal(adversarial(ATTACKS[k](bad), bad, x), adversarial(ATTACKS[k](pure), pure, x))


def writes_labels(z, y):
    v = margin(z, y.clone())
    y.zero_()
    return v


def writes_reference(z, z0):
    v = kl(z, z0)
    z0.zero_()
    return v


writes_reference = Loss(writes_reference, 'clean')


@pytest.mark.parametrize('cls,bad,good', [(PGD, writes_reference, kl), (APGD, writes_labels, margin)])
def test_losses_that_write(cls, bad, good):
    m, a = Pure(vit()).eval(), cls(E, steps=4, restarts=2)
    assert torch.equal(adversarial(a.but(loss=bad), m), adversarial(a.but(loss=good), m))


HELPERS = dict(
    targets=lambda m: choose_target(m, X, Y, 'likely'),
    outputs=lambda m: torch.stack(block_outputs(m, X)),
    maps=lambda m: torch.stack(attn_maps(m, X)),
    patches=lambda m: torch.stack(patch_attention(m, X)),
    trace=lambda m: loss_trace(PGD(E, steps=3), m, X, Y, loss=lambda z, y: z[:, 0]),
)


@pytest.mark.parametrize('k', HELPERS)
def test_helpers_on_models_that_write(k):
    m, x0 = vit(), X.clone()
    assert torch.equal(HELPERS[k](Writes(m).eval()), HELPERS[k](Pure(m).eval())) and torch.equal(X, x0)


def test_passes_of_a_model_that_writes():
    m = vit()
    pure, bad = Counted(Pure(m)), Counted(Writes(m))
    for c in (pure, bad):
        APGD(E, steps=3)(c, X, Y)
    assert (pure.forwards, pure.backwards) == (bad.forwards, bad.backwards) == (12, 9)


def passes(attack, m):
    "What the attack costs, in passes of the model"
    counted = Counted(m)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        attack(counted, X, Y, seed=0)
    return counted.passes


def test_the_command_line_knows_no_other_attacks():
    assert {*attack_types().values()} <= {*CLASSES}


@pytest.mark.parametrize('k', BY_CLASS)
def test_averaging_costs_passes_or_is_refused(k):
    "Of no attack `eot` changes nothing in silence"
    m = vit()
    attack = ATTACKS[k](m)
    try:
        averaged = attack.eot(3)
    except ValueError as e:
        assert 'does not average gradients, so eot(3)' in str(e)
    else:
        if isinstance(attack, Transfer):  # its passes are those of the surrogate
            attack, averaged = attack.attack, averaged.attack
        assert passes(averaged, m) > passes(attack, m)


class Queries(Attack):
    "Goes its own way, which knows nothing of `draws`"

    def run(self, obj, x, seed):
        return x + self.ball.project(x, self.ball.step(obj._grad(x.requires_grad_(), None)[0]))


def test_draws_are_refused_where_they_would_be_ignored():
    for make in (lambda: Queries(E, draws=3), lambda: Queries(E).eot(3), lambda: WorstCase([pgd, Queries(E)]).eot(3)):
        with pytest.raises(ValueError, match=r'Queries does not average gradients, so eot\(3\) would change nothing'):
            make()
    assert WorstCase([pgd, FGSM(E)]).eot(3) == WorstCase([pgd.eot(3), FGSM(E).eot(3)])


# --- attacks that do not keep what they promise


class Leaves(Attack):
    "Forgets to project"

    def run(self, obj, x, seed):
        return (x + 0.3).clamp(0, 1)


class Strides(PGD):
    "Goes in steps, out of the ball"

    def update(self, x, s, g, v, i):
        return {**s, 'd': torch.full_like(x, 0.3)}


def out_of_range(model, x, y, seed=0):
    return x + 1


def not_a_number(model, x, y, seed=0):
    return x * float('nan')


def another_batch(model, x, y, seed=0):
    return x[:1]


BROKEN = dict(
    leaves=Leaves(0.1), strides=Strides(0.1, steps=2), range=out_of_range, nan=not_a_number, one=another_batch
)


def report(attack):
    x = torch.rand(8, 1, 28, 28) / 2
    net = tiny_vit(num_classes=4).eval()
    return robust_report(net, (x, predict(net, x)), [attack])


def saved(attack, tmp_path):
    save_adv(tiny_vit(num_classes=4), torch.rand(2, 1, 28, 28) / 2, torch.tensor([0, 1]), attack, tmp_path)


def in_training(attack):
    synth_learner([AdvTrain(attack)]).fit(1)


def in_validation(attack):
    synth_learner([AdvValid(attack)]).validate()


def as_metric(attack):
    l = synth_learner()
    l.metrics = [RobustAccuracy(attack)]
    l.validate()


USES = saved, in_training, in_validation, as_metric


@pytest.mark.parametrize('use,kind', [*((report, k) for k in BROKEN), *((use, 'leaves') for use in USES)])
def test_an_attack_that_breaks_its_rules_is_refused(use, kind, tmp_path):
    with pytest.raises(ValueError, match='out of its ball|must lie in|for images of shape'):
        use(BROKEN[kind], *([tmp_path] if use is saved else []))


@pytest.mark.parametrize('k,labels', [*zip(BY_CLASS, [torch.float, torch.long] * len(BY_CLASS))])
def test_one_hot_labels_mean_their_class_or_are_refused(k, labels):
    "An attack without labels ignores them"
    m = vit()
    attack, rows = ATTACKS[k](m), nn.functional.one_hot(Y, 5).to(labels)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        by_number = attack(m, X, Y)
        try:
            by_row = attack(m, X, rows)
        except (TypeError, ValueError) as e:
            assert any(o in str(e) for o in ('class numbers', 'one-hot')), e
        else:
            assert torch.allclose(by_row, by_number, atol=1e-5)
