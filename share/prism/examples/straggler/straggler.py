"""Data-parallel training in which one rank is slow at one line: with --slow R, rank R augments its samples for longer."""

import argparse
import time

import torch
import torch.distributed as dist


def augment(batch, slow, milliseconds=40):
    """What a slow disk or a busy core does to one rank: it computes, for longer than the others."""
    end = time.monotonic() + (milliseconds / 1000 if dist.get_rank() == slow else 0)
    while True:
        batch = batch.roll(1, 0)
        if time.monotonic() >= end:
            return batch


def forward(model, batch):
    loss = model(batch).square().mean()
    dist.all_reduce(loss.detach().clone())
    return loss


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def step(model, optimizer, slow):
    optimizer.zero_grad()
    batch = augment(torch.randn(32, 64), slow)
    forward(model, batch).backward()
    average(model)
    optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=int, default=-1, metavar="R")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        step(model, optimizer, options.slow)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
