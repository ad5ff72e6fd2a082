"""Compile the Triton kernels for GPUs that need not be here, and list what they take.

    python -m longstraw_kernels.compile                          # all, for sm_80 and sm_90
    python -m longstraw_kernels.compile --arch 90 --only dkv

Per kernel and architecture: registers of a thread, shared memory of a block, and bytes of local
memory of a thread, which is where registers spill to (and what a stack takes). For each kernel
that its operation promises to run without spills, they are a failure.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from .availability import is_interpreted, is_triton_installed
from .specialization import Specialization

OPERATIONS = (
    "page_attention",
    "lse_merge",
    "index_topk",
    "selected_attention",
    "selective_logprob",
    "page_copy",
)
ARCHITECTURES = (80, 90)
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block may have."""

EXIT_CODES = "exit codes: 0 all is well, 1 a kernel failed, 2 the command was not understood"


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes.

    Attributes:
        name, operation: see `Specialization`.
        arch: 80 for sm_80.
        registers: of a thread, at most 255.
        shared_bytes: of a block.
        spilled_bytes: local memory of a thread.
        may_spill: see `Specialization`.
        error: why it did not compile; the numbers are zero then.
    """

    operation: str
    name: str
    arch: int
    registers: int = 0
    shared_bytes: int = 0
    spilled_bytes: int = 0
    may_spill: bool = False
    error: str | None = None

    @property
    def failure(self) -> str | None:
        """What is wrong with it, in a few words; None if nothing is."""
        if self.error is not None:
            return self.error
        if self.shared_bytes > MOST_SHARED[self.arch]:
            return f"a block has at most {MOST_SHARED[self.arch]:,} bytes of shared memory"
        return "spills" if self.spilled_bytes and not self.may_spill else None


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print; 0 if all kernels compile and none spills that should not, else 1."""
    args = _parse(argv)
    reason = _why_not()
    if reason is not None:
        print(f"Nothing was compiled: {reason}.", file=sys.stderr)
        return 2
    wanted = [
        (operation, name, arch)
        for operation in OPERATIONS
        for name in names_of(operation)
        for arch in args.arch
        if args.only in f"{operation}: {name}"
    ]
    if not wanted:
        print(f"No kernel has {args.only!r} in its name.", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(min(args.jobs, len(wanted))) as pool:
        found = pool.map(compile_one, *zip(*wanted, strict=True))
        usages = list(tqdm(found, total=len(wanted), unit="kernel", disable=None))
    print(json.dumps([asdict(u) for u in usages], indent=2) if args.json else table(usages))
    return int(any(usage.failure for usage in usages))


def names_of(operation: str) -> list[str]:
    """Names of the specializations of one operation."""
    return [s.name for s in _specializations(operation)]


def compile_one(operation: str, name: str, arch: int) -> Usage:
    """Compile one kernel for one architecture."""
    (made,) = [s for s in _specializations(operation) if s.name == name]
    try:
        shared, cubin = _compile(made, arch)
    except Exception as error:  # noqa: BLE001  (the compiler has many; each is this kernel's result)
        message = (str(error).strip().splitlines() or [""])[0]
        return Usage(operation, name, arch, error=f"{type(error).__name__}: {message}")
    registers, spilled = _read_usage(cubin)
    return Usage(operation, name, arch, registers, shared, spilled, made.may_spill)


def table(usages: Sequence[Usage]) -> str:
    """The list, for people."""
    width = max(len(f"{u.operation}: {u.name}") for u in usages)
    lines = [f"{'kernel':<{width}}  arch   registers  shared bytes  spilled bytes"]
    for u in usages:
        title = f"{u.operation}: {u.name}"
        lines.append(
            f"{title:<{width}}  sm_{u.arch}  {u.registers:>9}  {u.shared_bytes:>12,}  "
            f"{u.spilled_bytes:>13,}" + (f"  {u.failure}" if u.failure else "")
        )
    failed = sum(u.failure is not None for u in usages)
    return "\n".join([*lines, f"{len(usages)} compiled, {failed} failed"])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m longstraw_kernels.compile",
        description=f"{first}\n{rest}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    add("--only", default="", metavar="TEXT", help="kernels with TEXT in their name")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="compiled at a time")
    add("--json", action="store_true", help="print JSON, for programs")
    return parser.parse_args(argv)


def _why_not() -> str | None:
    if not is_triton_installed():
        return "Triton is not installed (pip install 'longstraw[triton]')"
    if is_interpreted():
        return "TRITON_INTERPRET=1 makes interpreted kernels of all; unset it"
    return None


def _specializations(operation: str) -> list[Specialization]:
    return importlib.import_module(f"{__package__}.{operation}.triton").specializations()


def _compile(made: Specialization, arch: int) -> tuple[int, bytes]:
    """Bytes of shared memory, and the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = made.kernel.arg_names
    signature = {n: "constexpr" if n in made.constants else made.types[n] for n in names}
    aligned = {n for n in names if signature[n].startswith("*")} | set(made.divisible)
    source = triton.compiler.ASTSource(
        fn=made.kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in made.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": made.num_warps, "num_stages": made.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return kernel.metadata.shared, kernel.asm["cubin"]


def _read_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, as the tool that comes with Triton reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {
        key: int(re.findall(rf"\b{key}:(\d+)", text)[0]) for key in ("REG", "STACK", "LOCAL")
    }
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


if __name__ == "__main__":
    sys.exit(main())
