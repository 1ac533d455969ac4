"""Makes random checkpoints of families that draftsmith does not run, with the tokenizer of another model.

    python states_families.py TARGET OUT FAMILY
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# What a family's config has beside the common keys.
FAMILIES = {
    "apertus": dict(),
    "gemma4_text": dict(hidden_size_per_layer_input=0, global_head_dim=32),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    "qwen3_next": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    ),
}


def main() -> None:
    target, out, family = sys.argv[1:]
    target, out = pathlib.Path(target), pathlib.Path(out)
    own = json.loads((target / "config.json").read_text())
    config = AutoConfig.for_model(
        family,
        vocab_size=own["vocab_size"],
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=own["bos_token_id"],
        eos_token_id=own["eos_token_id"],
        pad_token_id=None,
        tie_word_embeddings=False,
        **FAMILIES[family],
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms of weight 1 would hide which function a norm is.
            spread = 0.2 if parameter.dim() == 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * spread)
    out.mkdir(parents=True)
    model.save_pretrained(out)
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        shutil.copy(target / file, out / file)


main()
