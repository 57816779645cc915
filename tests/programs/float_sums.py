"""Every operation that adds floats, on vectors of many sizes: prints a digest of each result's bits."""

import hashlib
import warnings

import torch
import torch.distributed as dist

SIZES = (1, 2, 3, 7, 1000, 65537, 262143, 262144, 262145)  # elements; gloo's segments hold up to 1 MiB
NARROW = (3, 65537)
TYPES = {torch.float32: SIZES, torch.float64: (7, 131073), torch.float16: NARROW, torch.bfloat16: NARROW}
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -1.5)


def long_size(world: int) -> int:
    """Elements of float32 that make more than two segments a chunk."""
    return 3 * 2**18 * world + 1


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` contributes: other values on each rank, of different sizes."""
    generator = torch.Generator().manual_seed(7919 * rank + count)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 3).to(dtype)


def specials(rank: int) -> torch.Tensor:
    """Zeros of both signs, NaN and infinity, so that each meets each on ranks 0 and 1."""
    count = len(SPECIAL)
    order = [SPECIAL[k // count if rank % 2 else k % count] for k in range(count * count)]
    return torch.tensor(order)


def complexes(rank: int, count: int) -> torch.Tensor:
    """``count`` complex values."""
    return torch.view_as_complex(values(rank, 2 * count, torch.float32).view(-1, 2))


def digest(tensors: list[torch.Tensor]) -> str:
    """One word for the bits of all of them; any NaN is as good as another."""
    data = [torch.where(t.isnan(), torch.full_like(t, float("nan")), t).view(torch.uint8) for t in tensors]
    return hashlib.sha256(torch.cat([flat.view(-1) for flat in data]).numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    warnings.simplefilter("ignore")  # torch 2.13 has new names for some of these
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def check(name: str, *tensors: torch.Tensor) -> None:
        print(f"check rank {rank} {name} {digest(list(tensors))}\n", end="", flush=True)

    for dtype, sizes in TYPES.items():
        for size in sizes:
            name = f"{size} {dtype}"
            vector = values(rank, size, dtype)
            for op in ("SUM", "AVG", "PRODUCT"):
                dist.all_reduce(total := vector.clone(), getattr(dist.ReduceOp, op))
                check(f"all_reduce {op} {name}", total)
            dist.reduce(total := vector.clone(), dst=world - 1)
            if rank == world - 1:
                check(f"reduce {name}", total)
            vector, out = values(rank, size * world, dtype), torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(out, vector)
            check(f"reduce_scatter_tensor {name}", out)
            dist.reduce_scatter(out, list(vector.chunk(world)))
            check(f"reduce_scatter {name}", out)
        vectors = [values(rank, size, dtype) for size in sizes]
        dist.all_reduce_coalesced(vectors)
        check(f"all_reduce_coalesced {dtype}", *vectors)
    for op in ("MIN", "MAX"):
        dist.all_reduce(total := specials(rank), getattr(dist.ReduceOp, op))
        check(f"all_reduce {op} special", total)
    vector, out = complexes(rank, 7 * world), torch.empty(7, dtype=torch.complex64)
    dist.reduce_scatter_tensor(out, vector)
    check("reduce_scatter_tensor complex", torch.view_as_real(out))
    dist.reduce_scatter_tensor(out, vector, dist.ReduceOp.AVG)
    check("reduce_scatter_tensor AVG complex", torch.view_as_real(out))
    for op in ("SUM", "AVG"):
        dist.all_reduce(total := vector.clone(), getattr(dist.ReduceOp, op))
        check(f"all_reduce {op} complex", torch.view_as_real(total))
        dist.reduce(total := vector.clone(), 0, getattr(dist.ReduceOp, op))
        if rank == 0:
            check(f"reduce {op} complex", torch.view_as_real(total))
    dist.all_reduce(total := values(rank, long_size(world), torch.float32))
    check("all_reduce long", total)
    dist.reduce(total := values(rank, long_size(world), torch.float32), dst=0)
    if rank == 0:
        check("reduce long", total)
    dist.barrier()


if __name__ == "__main__":
    main()
