"""The sequence-parallel degree as accelerate's users write it: `parallelism_config`, or its YAML.

accelerate would split batches by it, and TRL refuses it for GRPO. Here it says how many ranks
share a prompt, and is taken away before either sees it.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longstraw import ConfigError, launched_ranks

if TYPE_CHECKING:
    from .config import LongStrawGRPOConfig

# What `accelerate launch` sets for a configuration with a section `parallelism_config`.
_SWITCH, _PREFIX = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_"
_TAKEN = "longstraw"  # no "true" to accelerate, and still there for the next config of this process
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def take_parallelism_config(args: "LongStrawGRPOConfig") -> None:
    """Move `sp_size` from accelerate's `parallelism_config` to `args.longstraw_sp_size`.

    Raises:
        ConfigError: another dimension is divided, or both places give different numbers.
    """
    for source, sizes in _found(args):
        _check_other_dimensions(source, sizes)
        ours, theirs = args.longstraw_sp_size, sizes["sp_size"]
        if ours not in (1, theirs):
            raise ConfigError(
                f"longstraw_sp_size={ours}, and {source} has sp_size={theirs}: both say how many "
                "ranks share a prompt. Give one of them, or the same number."
            )
        args.longstraw_sp_size = theirs
    args.parallelism_config = None
    if os.environ.get(_SWITCH, "").lower() == "true":
        os.environ[_SWITCH] = _TAKEN


def _found(args: "LongStrawGRPOConfig") -> list[tuple[str, dict[str, int]]]:
    """Each place that gives sizes, with them."""
    found = []
    config: Any = args.parallelism_config
    if config is not None:
        if not isinstance(config, Mapping) and not hasattr(config, "sp_size"):
            raise ConfigError(
                f"parallelism_config is {config!r:.80}: give accelerate's ParallelismConfig or a "
                "mapping with sp_size, or write longstraw_sp_size instead."
            )
        values = config if isinstance(config, Mapping) else vars(config)
        given = {name: values.get(name) for name in _SIZES}
        sizes = {name: 1 if size is None else int(size) for name, size in given.items()}
        found.append(("parallelism_config", sizes))
    if os.environ.get(_SWITCH, "").lower() in ("true", _TAKEN):
        sizes = {name: int(os.environ.get(_PREFIX + name.upper(), "1")) for name in _SIZES}
        found.append(("the parallelism_config of accelerate's configuration", sizes))
    return found


def _check_other_dimensions(source: str, sizes: Mapping[str, int]) -> None:
    if sizes["cp_size"] > 1:
        raise ConfigError(
            f"{source} has cp_size={sizes['cp_size']}: torch's context parallelism shards what a "
            "data loader gives, and GRPO's sequences are made later. Ranks share prompts with "
            f"sp_size={sizes['cp_size']} (or longstraw_sp_size) instead."
        )
    if sizes["tp_size"] > 1:
        raise ConfigError(
            f"{source} has tp_size={sizes['tp_size']}: split weight matrices are not served. Write "
            "tp_size 1; DeepSpeed ZeRO-3 divides weights (ds_configs/accelerate/zero3.yaml), and "
            "sp_size the prompts."
        )
    given = sizes["dp_replicate_size"] * sizes["dp_shard_size"]
    groups = launched_ranks() // max(1, sizes["sp_size"])
    if given not in (1, groups):
        raise ConfigError(
            f"{source} has dp_replicate_size={sizes['dp_replicate_size']} and "
            f"dp_shard_size={sizes['dp_shard_size']}: with {launched_ranks()} processes and "
            f"sp_size={sizes['sp_size']} there are {groups} groups that hold different prompts, "
            "whatever these say. Leave both out; what is divided among the processes the ZeRO "
            "stage says (ds_configs/README.md)."
        )
