"Everything: `from robust_nbdev.all import *`, as with fastai's own `all` modules"
import timm
from fastai.vision.all import *
from .core import *
from .vit import *
from .datasets import *
from .models import *
from .rvt_fan import *
from .attacks import *
from .adv_train import *
from .evaluate import *
from .compare import *
from .experiments import *
from .corruptions import *
from .robust_tokens import *
from .tora import *
from .xcit_recipe import *
from .afat import *
from .aas import *
from .explorer import *
from .cli import robust_bench
