#!/usr/bin/env bash
# GLM-5.2, LoRA of rank 8, one prompt of 2,097,152 tokens on 4 machines of 8 GPUs of 141 GB.
# From the repository's root, on each machine; what is your own comes behind it:
#
#   MACHINE_RANK=0 MASTER=10.0.0.1 bash examples/glm52/run.sh --model_name_or_path zai-org/GLM-5.2 \
#     --dataset_name data.jsonl --reward_funcs my_package.rewards.exact_match --output_dir out
#
# and `--longstraw_prompt_gradient stopped` for a prompt that is held constant. The same options
# behind `python -m examples.glm52.dry_run` say what they take, before any GPU is taken.
set -euo pipefail
# Tensors of many sizes pass through the allocator; without this it keeps room for each.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
: "${MACHINE_RANK:?which machine this is, 0 to 3}" "${MASTER:?address of machine 0}"

accelerate launch --config_file examples/glm52/zero0_ep32.yaml --num_processes 32 \
  --machine_rank "$MACHINE_RANK" --main_process_ip "$MASTER" --main_process_port 29500 \
  --module examples.glm52.train \
  --dtype bfloat16 --bf16 true --use_peft --lora_r 8 --lora_alpha 16 --learning_rate 1e-4 \
  --longstraw_sp_size 32 --longstraw_prompt_gradient exact \
  --longstraw_chunk_size 16384 --longstraw_page_size 1024 --longstraw_page_device model \
  --longstraw_allow_extrapolation true \
  --gradient_checkpointing true --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
  --save_only_model true \
  --num_generations 2 --per_device_train_batch_size 2 --max_completion_length 8192 \
  "$@"
