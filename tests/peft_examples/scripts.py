"""PEFT's example scripts, with arguments for a short run on tiny models."""

from __future__ import annotations

_OUT = "--output_dir out "
_CAUSAL = (
    "--base_model llama --data_path {data} --output_dir out --batch_size 4 --num_epochs 1 "
    "--cutoff_len 24 --lora_dropout 0 --lora_target_modules q_proj,v_proj "
)
_SFT = (
    _OUT + "--data_path imdb --dataset_split train --dataset_field text label --max_steps 4 "
    "--per_device_train_batch_size 4 --logging_steps 1 --report_to none --use_cpu True "
    "--bf16 False --bits fp32 --base_model_name_or_path llama --learning_rate 1e-3 "
)

SCRIPTS = {
    "dora_finetuning/dora_finetuning.py": _CAUSAL.format(data="guanaco") + "--use_dora",
    "alora_finetuning/alora_finetuning.py": _CAUSAL.format(data="task1660"),
    "olora_finetuning/olora_finetuning.py": "--base_model llama --batch_size 4 --cutoff_len 24 "
    "--lora_r 8 --lora_dropout 0 --val_set_size 8 --dtype float32 --device_map cpu",
    "pissa_finetuning/pissa_finetuning.py": _SFT + "--lora_r 8",
    "miss_finetuning/miss_finetuning.py": _SFT + "--miss_r 8",
    "eva_finetuning/eva_finetuning.py": "",
    "lorafa_finetune/lorafa_finetuning.py": "--base_model_name_or_path llama "
    "--dataset_name_or_path MetaMathQA --output_dir out --cutoff_len 24 --lorafa "
    "--lora_dropout 0 --lora_target_modules q_proj v_proj",
    "sft/train.py": _OUT + "--model_name_or_path llama --dataset_name imdb --splits train,test "
    "--max_steps 4 --per_device_train_batch_size 4 --logging_steps 1 --report_to none "
    "--use_cpu True --use_peft_lora True --lora_r 8 --lora_alpha 16 --lora_dropout 0 "
    "--lora_target_modules q_proj,v_proj --dataset_text_field text --learning_rate 1e-3",
    "conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py": "",
    "conditional_generation/peft_adalora_seq2seq.py": "",
    "fp4_finetuning/finetune_fp4_opt_bnb_peft.py": "",
    "randlora_finetuning/randlora_finetuning.py": _CAUSAL.format(data="guanaco").replace(
        "--lora_", "--randlora_"
    ),
}
"""Their paths below `examples`."""
