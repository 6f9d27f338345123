"What a user types: `from robust_nbdev.all import *`, as with fastai's own `all` modules. The rest stays in its module"
import sys, timm
from fastai.vision.all import *
from . import docstrings
from .core import Linf, L2, Normalized, Logits, attack_mode, unwrap, eps_str, AdvCallback
from .vit import (vit_blocks, patch_grid, attn_maps, multiply_adds, add_tokens, remove_tokens, remove_adapters,
    token_splitter, NoDecay)
from .datasets import (settings, image_dls, dataset, profile_dls, fashion_mnist, cifar10, cifar100, imagenette, imagenet,
    imagenet100, camvid, timm_fit)
from .models import small_model, small_cards, small_dls
from .rvt_fan import RVT, FAN
from .attacks import (Loss, ce, margin, cw, scaled_ce, dlr, kl, feat_cos, Attack, PGD, FGSM, FGSM_RS, MIFGSM, GAMAPGD,
    APGD, WorstCase, Transfer, Counted, choose_target)
from .autoattack import AutoAttack, APGDT, FAB, Square, Fast
from .patch_attacks import PatchAttack, PatchFool
from .adv_train import (warmup, switch, AdvTrain, ALP, TRADES, MART, GAT, BernoulliFGSM, FreeAT, ARDPRM, AWP,
    CatchOverfit, EMA, SaveRun)
from .evaluate import (Report, robust_report, Run, interval, self_check, predict, show_adv, save_adv, eps_curve,
    steps_curve, AdvValid, RobustAccuracy, lpips_dist)
from .corruptions import (corrupt, show_corruptions, mce, corruption_report, CorruptValid, CifarC, ImageNetC,
    subset_report)
from .compare import compare, Entry, StepCost, paired, Claim, Need, judge
from .experiments import reproduce, status
from .robust_tokens import (RobustTokens, fit_tokens, save_tokens, load_tokens, FeatCos, TokenAttack, TokenSets,
    token_attack, WithoutTokens, LinearProbe, fit_head)
from .tora import (tora_vit, remove_tora, TORA, tora_splitter, Reading, READINGS, GateDial, decompose, save_adapters,
    load_adapters, show_gates)
from .xcit_recipe import xcit_recipe, XcitRecipe, CleanPass
from .afat import (AFAT, Occlusion, PatchOcclusion, RankedOcclusion, fit_corruption, show_occlusion,
    afat_recipe)
from .aas import AAS, AASTrain, Scaled, GapScaled, with_scales
from .explorer import (explore_attack, explore_corruption, explore_tokens, explore_lam, explore_masks, explore_scales)
from .methods import METHODS, compared
from .cli import robust_bench
# `help(f)` shows what each parameter means, of names that stay in their modules too
docstrings.document(*(vars(module) for name, module in [*sys.modules.items()] if name.startswith('robust_nbdev.')))
del docstrings
