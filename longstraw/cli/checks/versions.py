"""The packages and the device that LongStraw runs on.

Knows ranges of versions, PyTorch's build and the driver; knows nothing of models.
"""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from ..info import list_packages
from . import Finding

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Linux writes here which NVIDIA driver is loaded."""


def check_versions() -> Iterator[Finding]:
    """One line for all packages in range, and one for each that is not."""
    try:
        version = metadata.version("longstraw")
    except metadata.PackageNotFoundError:
        yield Finding(
            "fail",
            "longstraw is not installed in this Python, so the ranges of versions are unknown",
            "Install it from its folder: pip install -c constraints.txt -e .",
        )
        return
    packages = list_packages()
    for package in packages:
        if package.status == "fail":
            extra = f", for the extra {package.extra}" if package.extra else ""
            found = "is not installed" if package.found is None else f"{package.found} is installed"
            yield Finding(
                "fail",
                f"{package.name} {found}; supported is {package.supported}{extra}",
                f"pip install '{package.name}{package.supported}'",
            )
    fine = [f"{p.name} {p.found}" for p in packages if p.status == "ok" and p.extra is None]
    yield Finding("ok", f"longstraw {version}; in their ranges: {', '.join(fine) or 'none'}")


def check_torch() -> Iterator[Finding]:
    """PyTorch's build, the driver, and bf16, which is the trainer's default precision."""
    build = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        found = f"torch {torch.__version__}, {torch.cuda.device_count()} x {name}, CUDA {build}"
        if torch.cuda.is_bf16_supported(including_emulation=False):
            yield Finding("ok", f"{found}, bf16")
            return
        major, minor = torch.cuda.get_device_capability(0)
        yield Finding(
            "warn",
            f"{found}: compute capability {major}.{minor} has no bf16 of its own",
            "Train with --bf16 False, or on a GPU of capability 8.0 and above.",
        )
        return
    driver, torch_version = _driver(), f"torch {torch.__version__}"
    if build is None and driver is None:
        yield Finding("ok", f"{torch_version}: no GPU here, the CPU is used, bf16 or fp32")
    elif build is None:
        yield Finding(
            "warn",
            f"{torch_version} is a build for the CPU, and a GPU is here (driver {driver})",
            "Install a build for GPUs: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu130",
        )
    elif driver is None:
        yield Finding(
            "warn",
            f"{torch_version} is a build for CUDA {build}, and no driver is loaded: the "
            "CPU is used",
            "Start on a machine with a GPU (in a container: with --gpus all), or ignore this.",
        )
    else:
        yield Finding(
            "fail",
            f"{torch_version} sees no GPU, and driver {driver} is loaded; the build needs CUDA "
            f"{build}",
            "Unset CUDA_VISIBLE_DEVICES if it hides the GPUs; else install a newer driver, or a "
            "torch for an older CUDA.",
        )


def _driver() -> str | None:
    """The version of the NVIDIA driver that is loaded; None without one."""
    try:
        line = NVIDIA_DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in line.split() if word[:1].isdigit() and "." in word), line)
