"""The two axes of ranks: data parallel and sequence parallel.

Ranks `g * sp ... (g + 1) * sp - 1` form sequence group g: neighbours, which share a machine, share
a prompt. The ranks with place j in their groups form data group j: together they have every prompt
once, and so does what is gathered over them.

Knows process groups and tensors; knows nothing of attention, pages or models.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, DataError

# By the names that torch 2.13 has given them; it warns of the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SequenceGroup:
    """The ranks that share the tokens of one prompt. A group of one communicates nothing.

    Every method is collective over the group.

    Attributes:
        rank, size: in the group.
        received_bytes: what other ranks have sent here so far, for accounting.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.received_bytes = 0
        self._group = group

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what is done once per group."""
        return self.rank == 0

    # ---------------------------------------------------------------- tensors

    def gather(self, x: Tensor) -> Tensor:
        """`x` of every rank, `[sp, *x.shape]`; shapes must agree."""
        if self.is_alone:
            return x.unsqueeze(0)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        _all_gather(out.view(-1), x.view(-1), group=self._group)
        self.received_bytes += (self.size - 1) * x.nbytes
        return out

    def exchange(self, parts: Tensor) -> Tensor:
        """`parts[r]` goes to rank r. Returns what each rank sent here, `[sp, ...]`."""
        if self.is_alone:
            return parts
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=self._group)
        self.received_bytes += (self.size - 1) * parts[0].nbytes
        return out

    def sum_home(self, parts: Tensor) -> Tensor:
        """The sum over ranks of `parts[r]`, on rank r. `parts` `[sp, ...]`."""
        if self.is_alone:
            return parts[0]
        parts = parts.contiguous()
        out = torch.empty_like(parts[0])
        _reduce_scatter(out.view(-1), parts.view(-1), group=self._group)
        self.received_bytes += (self.size - 1) * out.nbytes
        return out

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place, the same bits on every rank."""
        if self.is_alone:
            return x
        whole = x.contiguous()  # NCCL takes nothing else, and gloo takes what lies behind a view
        dist.all_reduce(whole, group=self._group)
        return x if whole is x else x.copy_(whole)

    def broadcast_(self, x: Tensor) -> Tensor:
        """The leader's `x`, in place."""
        if self.is_alone:
            return x
        whole = x.contiguous()
        dist.broadcast(whole, group=self._group, group_src=0)
        return x if whole is x else x.copy_(whole)

    # ---------------------------------------------------------------- facts

    def any(self, flags: list[bool]) -> list[bool]:
        """Each flag, true if it is on any rank."""
        if self.is_alone:
            return flags
        numbers = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(number) for number in numbers.tolist()]

    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        if self.is_alone:
            return number
        found = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return int(found)

    def gather_objects(self, value: Any) -> list[Any]:
        """A picklable value of every rank."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def check_same(self, tensors: Iterable[Tensor], what: str) -> None:
        """Raise on every rank if one has other values: they would wait for each other for ever.

        Args:
            tensors: of whole numbers or booleans; their dtypes do not count.

        Raises:
            DataError: with the ranks that differ from the leader.
        """
        if self.is_alone:
            return
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().long().contiguous().numpy().tobytes())
        digests = self.gather_objects(digest.digest())
        others = [rank for rank, found in enumerate(digests) if found != digests[0]]
        if others:
            raise DataError(
                f"ranks {others} of a sequence group were given other {what} than its first rank. "
                f"The {self.size} ranks of a group (sp_size) run the same ones: take them from one "
                "rank, or choose them by the number of the group (engine.axes.dp_rank)."
            )

    def share(self, value: Any) -> Any:
        """The leader's picklable value; what the others give is ignored."""
        if self.is_alone:
            return value
        values = [value if self.is_leader else None]
        dist.broadcast_object_list(values, group=self._group, group_src=0, device=self._device)
        return values[0]

    def share_random_state(self, device: torch.device) -> None:
        """Let torch's random generators go on everywhere as they do on the leader."""
        if self.is_alone:
            return
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        cpu, *other = self.share(states)
        if not self.is_leader:
            torch.set_rng_state(cpu)
            for state in other:
                torch.get_device_module(device).set_rng_state(state, device)

    @property
    def _device(self) -> torch.device:
        """Where the group's backend takes tensors from."""
        return torch.device(dist.distributed_c10d._get_object_coll_device(self._group))


@dataclass(frozen=True)
class RankAxes:
    """This rank's place on both axes.

    Attributes:
        sequence: the ranks that share its prompts' tokens.
        dp_rank, dp_size: its place among the groups.
        data_group: the ranks with its place in the other groups; None for the default group.
    """

    sequence: SequenceGroup
    dp_rank: int = 0
    dp_size: int = 1
    data_group: dist.ProcessGroup | None = None

    @property
    def sp_size(self) -> int:
        return self.sequence.size


# By the default group, which may be made anew: groups are few, and each costs connections.
_MADE: dict[tuple[dist.ProcessGroup, int], RankAxes] = {}


def rank_axes(sp_size: int, timeout_seconds: float = 1800.0) -> RankAxes:
    """The axes for groups of `sp_size`. Collective the first time; the same object after.

    Raises:
        ConfigError: ranks cannot be divided so.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if is_distributed else 0
    world_size = dist.get_world_size() if is_distributed else 1
    if sp_size < 1 or world_size % sp_size:
        raise ConfigError(
            f"sp_size={sp_size} (longstraw_sp_size in the trainer) with {world_size} processes: "
            f"groups of {sp_size} ranks share a prompt, so the number of processes must be a "
            f"multiple of it. Start {sp_size} processes or a multiple (accelerate launch "
            f"--num_processes {sp_size} ...), or set it to one of "
            f"{', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}."
        )
    if sp_size == 1:
        return RankAxes(SequenceGroup(), rank, world_size)
    world = dist.group.WORLD
    assert world is not None
    key = (world, sp_size)
    if key not in _MADE:
        _MADE[key] = _make_axes(rank, world_size, sp_size, timedelta(seconds=timeout_seconds))
    return _MADE[key]


def _make_axes(rank: int, world_size: int, sp_size: int, timeout: timedelta) -> RankAxes:
    dp_size = world_size // sp_size
    dp_rank, sp_rank = divmod(rank, sp_size)
    sequence: Any = None
    data: Any = None
    for g in range(dp_size):  # every rank takes part in making every group
        made = dist.new_group([g * sp_size + j for j in range(sp_size)], timeout=timeout)
        sequence = made if g == dp_rank else sequence
    for j in range(sp_size):
        made = dist.new_group([g * sp_size + j for g in range(dp_size)], timeout=timeout)
        data = made if j == sp_rank else data
    return RankAxes(SequenceGroup(sp_rank, sp_size, sequence), dp_rank, dp_size, data)
