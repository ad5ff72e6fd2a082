#!/usr/bin/env bash
# Qwen3.6-27B, NF4 QLoRA on every text projection, one prompt of 2,097,152 tokens on 8 GPUs of 141 GB.
# From the repository's root; what is your own comes behind it:
#
#   bash examples/qwen36_27b/run.sh --model_name_or_path Qwen/Qwen3.6-27B \
#     --dataset_name data.jsonl --reward_funcs my_package.rewards.exact_match --output_dir out
#
# and `--longstraw_prompt_gradient stopped` for a prompt that is held constant. The same options
# behind `python -m examples.qwen36_27b.dry_run` say what they take, before any GPU is taken.
set -euo pipefail
# Blocks of scores of many sizes pass through the allocator; without this it keeps room for each.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

accelerate launch --config_file ds_configs/accelerate/zero1.yaml --num_processes 8 \
  --module examples.qwen36_27b.train \
  --load_in_4bit --use_bnb_nested_quant --dtype bfloat16 --bf16 true \
  --use_peft --lora_target_modules all-linear --lora_r 16 --lora_alpha 32 \
  --longstraw_sp_size 8 --longstraw_prompt_gradient exact \
  --longstraw_chunk_size 32768 --longstraw_page_size 1024 --longstraw_page_device model \
  --longstraw_allow_extrapolation true \
  --gradient_checkpointing true --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
  --num_generations 8 --per_device_train_batch_size 8 --max_completion_length 8192 \
  "$@"
