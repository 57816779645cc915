"""The smallest program with everything that faults need: two steps of a sum over all ranks, then rank 3 sends to rank 0."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
message = torch.full((3,), float(dist.get_rank()))
if dist.get_rank() == 3:
    dist.send(message, 0)
if dist.get_rank() == 0:
    dist.recv(message, 3)
    print(f"check rank 0 message {message.tolist()}\n", end="", flush=True)
dist.destroy_process_group()
