"""One rank of the check of ranks: joins a group, adds up a tensor, and says how far it came.

    python rank.py BACKEND RANK WORLD_SIZE FILE SECONDS

Started as a file by `ranks.py`, so it imports nothing of LongStraw. A line is written before each
stage, so that who waits knows which one was not finished.
"""

import sys
from datetime import timedelta


def main() -> None:
    backend, rank, world_size, file, seconds = sys.argv[1:]
    print("importing torch", flush=True)
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(rank))
        torch.cuda.set_device(device)
    print("joining the group", flush=True)
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=float(seconds)),
    )
    print("adding up", flush=True)
    # Rank r sends r + 1 and numbers that differ by position.
    numbers = torch.arange(1000, dtype=torch.float32, device=device) + int(rank) + 1
    dist.all_reduce(numbers)
    print(f"sum {int(numbers[0])} {int(numbers[-1])}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
