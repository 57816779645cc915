"""Time that a program spends on purpose: delays of a layer's backward, and spins in place of computing."""

import time

import torch

SPIN = r"""
extern "C" __global__ void spin(int microseconds) {
    unsigned long long since, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(since));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - since < 1000ULL * microseconds);
}
"""


class Spin:
    """Spends a given time on the device, or on the host; without a GPU both are the host."""

    def __init__(self, device):
        self.device = device
        self.kernel = torch.cuda._compile_kernel(SPIN, "spin") if device.type == "cuda" else None
        self.gpu(0)  # loads the kernel

    def gpu(self, ms):
        if self.kernel is None:
            return self.host(ms)
        torch.cuda.set_device(self.device)  # autograd's threads begin without the device's context
        return self.kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[round(1e3 * ms)])

    def host(self, ms):
        until = time.monotonic_ns() + round(1e6 * ms)
        while time.monotonic_ns() < until:
            pass


class Delays:
    """This rank's delays by class and layer, in the backward of the layer's first forward in a step."""

    def __init__(self, spec, rank, spin):
        self.spin = spin
        self.classes = [{}]  # layer -> [(ms, where)]
        for text in filter(None, spec.split("+")):
            mine = {}
            for item in text.split(","):
                owner, layer, ms, where = item.split(":")
                if where not in ("gpu", "host"):
                    raise ValueError(f"--delay {item}: gpu or host, not {where}")
                if int(owner) == rank:
                    mine.setdefault(int(layer), []).append((float(ms), where))
            self.classes.append(mine)
        self.layers = {layer for mine in self.classes for layer in mine}
        self.begin(0)

    def begin(self, step):
        self.current, self.seen = self.classes[step % len(self.classes)], set()

    def at(self, x, layer):
        """``x``; its gradient is late. Undelayed iterations run the same operations."""
        if layer not in self.layers or layer in self.seen:
            return x
        self.seen.add(layer)
        return Late.apply(x, self.spin, self.current.get(layer, ()))


class Late(torch.autograd.Function):
    """The identity; its backward spins."""

    @staticmethod
    def forward(ctx, x, spin, delays):
        ctx.spin, ctx.delays = spin, delays
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        for ms, where in ctx.delays:
            getattr(ctx.spin, where)(ms)
        return grad, None, None


class Idle(torch.autograd.Function):
    """The identity, which spins `ms` forward and twice that backward, and gives every parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx, x, spin, ms, *parameters):
        ctx.spin, ctx.ms = spin, ms
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        spin.gpu(ms)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.spin.gpu(2 * ctx.ms)
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        return grad, None, None, *zeros
