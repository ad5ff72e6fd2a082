"""A tokenizer that speaks Qwen3's chat format, and what a tool-calling test needs beside it.

One token per byte, so that any text and any template can be written, and one per special token.
"""

import json
from typing import Any

from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_VOCAB = 256 + len(_SPECIAL) + len(_MARKS)
END_OF_TURN = "<|im_end|>"


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Pad is `<|endoftext|>`, end of sequence `<|im_end|>`, as in Qwen3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    # As in Qwen3, these survive decoding without special tokens: a tool call is found by them.
    tokenizer.add_tokens([AddedToken(token, special=False) for token in _MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token=END_OF_TURN
    )
    fast.chat_template = qwen3_chat_template
    assert len(fast) == CHAT_VOCAB
    return fast


def chat_dataset() -> Dataset:
    """Four questions, as conversations of one message."""
    questions = ("1 and 2?", "What is 20 and 22?", "Sum it.", "Hi")
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in questions]})


def add(a: int, b: int) -> int:
    """
    Add.

    Args:
        a: First.
        b: Second.

    Returns:
        The sum.
    """
    return a + b


def call_of(name: str, **arguments: Any) -> str:
    """The text with which the policy calls a tool."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>{END_OF_TURN}"
