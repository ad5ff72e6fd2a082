"""What launches of Triton kernels share: tables that travel, strides, sizes of tiles."""

import torch
from torch import Tensor


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """A table made on the CPU, without waiting for the device."""
    if device.type == "cuda":
        table = table.pin_memory()  # from pageable memory the copy would wait for the device
    return table.to(device, non_blocking=True)


def is_innermost_contiguous(x: Tensor) -> bool:
    """Whether neighbours of the last dim lie side by side."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def innermost_contiguous(x: Tensor) -> Tensor:
    """`x`, or a copy if neighbours of its last dim do not lie side by side."""
    return x if is_innermost_contiguous(x) else x.contiguous()


def power_of_two(number: int) -> int:
    """The least that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
