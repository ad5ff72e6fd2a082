"""What one layer takes of its tokens while it runs, beside what all layers keep.

The coefficients, in bytes, are in `layer_work.json`: for each family, with all weights trained or
with adapters, and each kind of layer and of pass, two linear forms of `widths`: what is held while
the MLP is at work, and while attention is. The larger one counts.

They were counted by `python -m longstraw.planner.count_work` on tiny models in bf16 on a CPU.
"""

import json
from functools import cache
from pathlib import Path

from .model_shape import LayerShape, ModelShape
from .options import PlanOptions
from .widths import Run, layer_kind, widths

PASSES = ("capture", "prompt", "replay")
"""A chunk of the prompt without and with a graph, and responses that are replayed together."""
AT_WORK = ("MLP", "attention", "gathering")
"""The MLP; attention, or a recurrence; and that where queries of all ranks come together."""

SELECTING = {"index scores": 32.0, "selected": 16.0, "hidden": 8.0}
"""While an indexer's best keys are found: scores and their positions, each a few times, in fp32 and
in int64. Not counted: histories of the models that are counted are too short for it to be the most.
"""
UNREACHED_MLP = 8.0
"""Of a layer above which no window reaches back: its MLP is run again with it and is not taken
backwards, so that gate, up, their activation and product stay while attention is at work."""

COUNTED_AS = {
    "qwen2": "llama",
    "smollm3": "llama",
    "qwen3_next": "qwen3_5_moe_text",
    "deepseek_v32": "glm_moe_dsa",
}
"""Families whose layers make the tensors of another one's."""
COUNTED_AS_DENSE = {"qwen3_moe": "qwen3", "qwen3_5_moe_text": "qwen3_5_text"}
"""Families with experts whose layers without them are another one's."""

Forms = dict[str, dict[str, float]]
"""Coefficients by width, by what is at work."""


@cache
def coefficients() -> dict[str, dict[str, dict[str, dict[str, Forms]]]]:
    """By family, "full" or "adapters", kind of layer, and pass."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def forms_of(shape: ModelShape, layer: LayerShape, options: PlanOptions, which: str) -> Forms:
    """Of one layer in one of `PASSES`."""
    trained = "adapters" if options.lora_rank else "full"
    family = COUNTED_AS.get(shape.model_type, shape.model_type)
    if layer.mlp_width:
        family = COUNTED_AS_DENSE.get(family, family)
    return coefficients()[family][trained][layer_kind(layer)][which]


def bytes_per_token(forms: Forms, found: dict[str, float]) -> tuple[float, str]:
    """The larger form's value, and its name."""
    values = {
        name: sum(each * found.get(width, 0.0) for width, each in form.items())
        for name, form in forms.items()
        if name != "gathering" or found.get("gathered queries")
    }
    name = max(values, key=lambda name: values[name])
    return values[name], name


def work_per_token(
    shape: ModelShape, options: PlanOptions, which: str, run: Run
) -> tuple[float, str]:
    """Bytes per token of the layer that takes most, and in words which that is."""
    best = (0.0, "")
    is_unreached = all(layer.window is not None for layer in shape.layers) and which == "prompt"
    for layer in dict.fromkeys(shape.layers):
        found = widths(shape, layer, options, run)
        forms = dict(forms_of(shape, layer, options, which))
        if layer.has_indexer:
            forms["selecting"] = SELECTING
        if is_unreached:
            forms["attention"] = forms["attention"] | {"mlp": UNREACHED_MLP}
        value, name = bytes_per_token(forms, found)
        best = max(best, (value, f"{layer_kind(layer)} layer, {name} at work"))
    return best
