"""How much is left on a device or a disk, so that a state is refused before it is begun.

Linux ends the process that touches one page too many; an allocator fails in the middle of an
update. Both are asked here first.
"""

import os
import shutil
from pathlib import Path

import psutil
import torch

from ..errors import PageFileError

RESERVED_PART = 20
"""One part in this many of what is free is left alone: for other processes on the host, for the
allocator's rounding on a GPU. A chunk's graph is not in it; its size is not known here."""

CGROUP_ROOT = Path("/sys/fs/cgroup")


class _Share:
    """One rank's part of what is free on a node.

    The ranks of a node take equal shares. A share is set when it is first asked for and only grows
    after that: ranks do not capture at the same time, and one that comes late would take what the
    others hold for lost. What is free now bounds it in any case.
    """

    def __init__(self) -> None:
        self._share = 0

    def of(self, free: int, held: int) -> int:
        self._share = max(self._share, (free + held) // ranks_on_node())
        return max(0, min(free, self._share - held))


class FreeMemory:
    """The bytes that this process may still take on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._share = _Share()

    def bytes_left(self, held: int) -> int | None:
        """Bytes free for this process beside the `held` ones it has; None if nobody can say."""
        free = available_bytes(self.device)
        if free is None:
            return None
        free -= free // RESERVED_PART
        return free if self.device.type != "cpu" else self._share.of(free, held)


class FreeDisk:
    """The bytes that this process may still write to the disk of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._share = _Share()

    def bytes_left(self, held: int) -> int:
        """Bytes free for this process beside the `held` ones that its files take.

        Raises:
            PageFileError: the folder is gone.
        """
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise PageFileError(
                f"how much is free in {self.folder} cannot be found out: {error}. Make it again, "
                "or name another folder with spill_dir (longstraw_spill_dir in the trainer)."
            ) from error
        return self._share.of(free - free // RESERVED_PART, held)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated on `device` now, by this process or another."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the caching allocator holds and does not use is free to this process.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    if device.type == "cpu":
        limits = [psutil.virtual_memory().available, *_cgroup_bytes_left()]
        return max(0, min(limits))
    return None


def ranks_on_node() -> int:
    """Processes that share the host's memory, as the launcher says."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(value)) if value.isdecimal() else 1


def _cgroup_bytes_left() -> list[int]:
    """What the limits of this process's control groups leave, for each group that has one."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            left += _limits_along(CGROUP_ROOT, path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _limits_along(CGROUP_ROOT / "memory", path, names)
    return left


def _limits_along(root: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Limit minus usage of the group at `path` and of those around it.

    In a container the path may be the host's while the root is the container's own group, so every
    folder is optional.
    """
    limit_name, usage_name, cache_name = names
    folder, left = root / path.lstrip("/"), []
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        try:
            limit = (group / limit_name).read_text(encoding="ascii").strip()
            usage = int((group / usage_name).read_text(encoding="ascii"))
            stat = (group / "memory.stat").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            continue
        if limit.isdecimal():  # else "max"
            # Cached files count as usage; they give way.
            cached = int(stat[stat.index(cache_name) + 1]) if cache_name in stat else 0
            left.append(int(limit) - usage + cached)
    return left
