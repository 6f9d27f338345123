"Copies of a model, for tests that a copy answers with its own weights; not a test module."

import copy, pickle
import torch
from torch import nn


def replicate(model):
    "A replica of a model, built as `torch.nn.parallel.replicate` builds it"
    modules = list(model.modules())
    replicas = {id(o): o._replicate_for_data_parallel() for o in modules}
    for o in modules:
        r = replicas[id(o)]
        for k, v in o._modules.items():
            r._modules[k] = v if v is None else replicas[id(v)]
        for k, v in o._parameters.items():
            setattr(r, k, v if v is None else v.detach().clone())
        for k, v in o._buffers.items():
            r._buffers[k] = v if v is None else v.clone()
    return replicas[id(model)]


def grow(model, by=1.5):
    "The same model with new parameters, `by` times the old ones"
    for o in model.modules():
        for k, p in o._parameters.items():
            if p is not None:
                o._parameters[k] = nn.Parameter(by * p.detach(), p.requires_grad)
    return model


def functional(model):
    "The function that the model would be with larger weights"
    larger = {k: 1.5 * v for k, v in model.named_parameters()}
    return lambda x: torch.func.functional_call(model, larger, (x,))


COPIES = dict(
    replicate=lambda m: replicate(grow(copy.deepcopy(m))),
    deepcopy=lambda m: grow(copy.deepcopy(m)),
    # each with larger weights
    pickle=lambda m: grow(pickle.loads(pickle.dumps(m))),
    functional_call=functional,
)


class Reuses(nn.Module):
    "A block that writes its output where its last one is"

    def __init__(self, block):
        super().__init__()
        self.block, self.memory = block, None

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.block, name)

    def forward(self, x, *args, **kw):
        z = self.block(x, *args, **kw)
        if self.memory is None or self.memory.shape != z.shape:
            self.memory = torch.empty_like(z)
        self.memory = self.memory.detach()
        return self.memory.copy_(z)


def reusing(model):
    "A copy of a ViT whose blocks write where their last output is"
    model = copy.deepcopy(model)
    model.model.blocks = nn.Sequential(*map(Reuses, model.model.blocks))
    return model
