"The public names of the whole package: what `robust_nbdev.all` brings, and what stays in the modules of the methods"

import importlib, types
import robust_nbdev.all

MODULES = 'vit attacks autoattack patch_attacks adv_train compare experiments corruptions'
METHODS = 'robust_tokens tora xcit_recipe afat aas explorer'
everything = types.ModuleType('everything', __doc__)
vars(everything).update(vars(robust_nbdev.all))
for _name in f'{MODULES} {METHODS}'.split():
    _module = importlib.import_module(f'robust_nbdev.{_name}')
    vars(everything).update({name: vars(_module)[name] for name in _module.__all__})
