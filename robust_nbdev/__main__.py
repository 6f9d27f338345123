"What `robust-demo`, `robust-eval`, `robust-compare`, `robust-reproduce` and `python -m robust_nbdev` run; fastai's import warns about one of torch's deprecations, which no user can act on"
import warnings
warnings.filterwarnings('ignore', message=r'`torch\.jit\.', category=FutureWarning)
from .cli import robust_compare,robust_demo,robust_eval,robust_reproduce

if __name__=='__main__': robust_demo()
