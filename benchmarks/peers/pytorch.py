"""A rank of PyTorch's own pipelining, timed: ``python pytorch.py MODEL SCHEDULE RANK RANKS PORT MICRO_BATCHES STEPS``.

It runs in an environment that has PyTorch and nothing of this project, on one core. The last line of rank 0's output
is the median of a step's seconds. The models have the sizes of ``benchmarks.workloads`` and ``benchmarks.waits``.
"""

import os
import sys

if __name__ == "__main__":  # before any library counts the cores
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(sys.argv[3]) % len(cores)]})

import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

WARM_UP = 3
SCHEDULES = {  # the class, and the stages of a rank
    "1F1B": (schedules.Schedule1F1B, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
    "zero-bubble": (schedules.ScheduleInterleavedZeroBubble, 2),
    "zero-bubble-v": (schedules.ScheduleZBVZeroBubble, 2),
}


class Embed(nn.Module):
    """Sum of the embeddings of each token and its position."""

    def __init__(self, words, width, context):
        super().__init__()
        self.token, self.position = nn.Embedding(words, width), nn.Embedding(context, width)

    def forward(self, tokens):
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1]))


class Block(nn.Module):
    """Causal attention, then an MLP, each on normalized input and with a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, eps=1e-3) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Sleep(torch.autograd.Function):
    """Returns its input, after a sleep forward and one backward, in place of a device's work."""

    @staticmethod
    def forward(context, x, before, after):
        context.after = after
        time.sleep(before)  # stands for the seconds that a device computes, without using a core
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.after)  # the same for backward
        return gradient, None, None


class Wait(nn.Module):
    """A product with one weight a column, which sleeps forward, for the gradient of its input, and of its weight."""

    def __init__(self, seconds, width):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Sleep.apply(x, self.seconds, self.seconds) * Sleep.apply(self.weight, 0.0, self.seconds)


def make_dense():
    """Return the layers, the batch, the loss and the optimizer of eight dense layers."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    x, y = torch.randn(2048, 1024), torch.randn(2048, 1024)
    pairs = [nn.Sequential(*layers[i : i + 2]) for i in range(0, 16, 2)]
    return pairs, x, y, mean_square, lambda weights: torch.optim.SGD(weights, 0.01)


def make_gpt(words=256, width=128, heads=4, context=96, samples=64, blocks=8):
    """Return the blocks of the gpt, of which the last has the head, its batch, its loss and its optimizer."""
    layers = [Block(width, heads) for _ in range(blocks)]
    layers[0] = nn.Sequential(Embed(words, width, context), layers[0])
    layers[-1] = nn.Sequential(layers[-1], nn.LayerNorm(width, eps=1e-3), nn.Linear(width, words, bias=False))
    x, y = (torch.randint(words, (samples, context)) for _ in range(2))

    def loss(logits, target):
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    return layers, x, y, loss, lambda weights: torch.optim.Adam(weights, 1e-3)


def make_waits(layers, seconds=0.02, width=4, samples=64):
    """Return as many layers that sleep, the batch, the loss and the optimizer."""
    x, y = torch.randn(samples, width), torch.randn(samples, width)
    scaled = nn.Sequential(Scale(width), Wait(seconds, width))
    chain = [scaled, *(Wait(seconds, width) for _ in range(layers - 1))]
    return chain, x, y, mean_square, lambda weights: torch.optim.SGD(weights, 0.01)


class Scale(nn.Module):
    """A product with one weight a column, so that the first layer has a gradient of its input to compute."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


def mean_square(found, wanted):
    return ((found - wanted) ** 2).mean()


def main():
    """Train, and print the median seconds of a step on rank 0."""
    model, name, rank, ranks, port, micro_batches, steps = (int(a) if a.isdecimal() else a for a in sys.argv[1:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    kind, each = SCHEDULES[name]
    make = {"dense": make_dense, "gpt": make_gpt, "waits": lambda: make_waits(2 * ranks)}[model]
    layers, x, y, loss_fn, make_optimizer = make()
    stages = ranks * each
    of_stage = len(layers) // stages
    own = [rank, stages - 1 - rank] if name == "zero-bubble-v" else [rank + i * ranks for i in range(each)]
    parts = [nn.Sequential(*layers[i * of_stage : (i + 1) * of_stage]) for i in own]
    made = [PipelineStage(part, i, stages, torch.device("cpu")) for part, i in zip(parts, own, strict=True)]
    schedule = kind(made[0] if each == 1 else made, micro_batches, loss_fn=loss_fn)
    optimizer = make_optimizer([weight for part in parts for weight in part.parameters()])
    arguments = (x,) if 0 in own else ()
    options = {"target": y, "losses": []} if stages - 1 in own else {}
    seconds, first = [], None
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        if options:
            options["losses"].clear()
        schedule.step(*arguments, **options)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        if options:
            loss = float(sum(options["losses"]) / micro_batches)
            first = loss if first is None else first
    assert not options or loss < first, "it does not train"
    dist.barrier()
    if rank == 0:
        print(statistics.median(seconds[WARM_UP:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
