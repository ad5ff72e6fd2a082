"""What holds for every test: one thread, no network, no warnings about experimental features."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402  (after the environment that its users read when imported)

# Operators on tiny tensors spend their time in barriers when they are spread over threads.
torch.set_num_threads(1)
