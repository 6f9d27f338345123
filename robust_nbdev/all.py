"What a user types: `from robust_nbdev.all import *`, as with fastai's own `all` modules. The rest stays in its module"
import timm
from fastai.vision.all import *
from .core import (eps_str, Ball, Linf, L2, threat_model, Wrapper, unwrap, Normalized, Logits, attack_mode, AdvCallback)
from .vit import (vit_blocks, patch_grid, block_outputs, attn_maps, multiply_adds, attn_scale, add_scales, remove_scales,
    add_tokens, remove_tokens, no_tokens, add_after_mlp, remove_adapters, xcit_stem, vit_splitter, token_splitter,
    no_decay_split, NoDecay)
from .datasets import (settings, image_dls, dataset, profile_dls, fashion_mnist, cifar10, cifar100, imagenette, imagenet,
    imagenet100, camvid, embedded_fashion, balanced, by_value, class_notice, timm_fit, CropFlip)
from .models import small_model,small_cards,small_dls
from .rvt_fan import RVT,FAN,model_cost
from .attacks import (Loss, ce, margin, cw, scaled_ce, dlr, kl, feat_cos, Attack, PGD, FGSM, FGSM_RS, MIFGSM, CWPGD,
    GAMAPGD, GAMAFW, APGD, WorstCase, Transfer, choose_target, loss_trace, Counted)
from .autoattack import *
from .patch_attacks import PatchAttack,PatchFool,RandomOcclusion,patch_attention
from .adv_train import (warmup, switch, AdvTrain, TRADES, NearPGD, MART, GAT, BernoulliFGSM, NFGSM, FreeAT, ARDPRM, AWP,
    CatchOverfit, EMA, OnAverage, SaveEMA, SaveRun)
from .evaluate import (Report, robust_report, Run, interval, self_check, predict, show_adv, save_adv, Curve, eps_curve,
    steps_curve, AdvValid, RobustAccuracy, lpips_dist)
from .compare import *
from .experiments import *
from .corruptions import *
from .robust_tokens import *
from .tora import *
from .xcit_recipe import *
from .afat import *
from .aas import *
from .explorer import *
from .methods import METHODS, Method, compared, fit_method, method_run, methods_table
from .cli import robust_bench
from . import docstrings as _docstrings
_docstrings.document(globals())  # `help(f)` shows what each parameter means
