"""Compares an exported draft model with its adapter, both computed with transformers.

    python transformers_logits.py TARGET ADAPTER DRAFT

The adapter, a `decoder-layer` of a Llama, runs as a Llama of one layer over the target's hidden states at its exit
layer, followed by the target's LM head. DRAFT runs as it is. Prints the largest difference of logits in f32. The exit
code is 1 if it is more than rounding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel


def main() -> int:
    target_dir, adapter_dir, draft_dir = map(Path, sys.argv[1:])
    target, draft = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        for place in (target_dir, draft_dir)
    )
    config = json.loads((adapter_dir / "config.json").read_text())
    adapter = LlamaModel(LlamaConfig.from_pretrained(adapter_dir)).float().eval()
    tensors = {name: tensor.float() for name, tensor in load_file(adapter_dir / "model.safetensors").items()}
    kept = tensors.pop("draft_vocabulary", None)
    missing, unexpected = adapter.load_state_dict(tensors, strict=False)
    assert not unexpected and missing == ["embed_tokens.weight"], (missing, unexpected)
    torch.manual_seed(7)
    ids = torch.randint(0, target.config.vocab_size, (1, 100))
    with torch.no_grad():
        features = target(ids, output_hidden_states=True).hidden_states[config["exit_layer"]]
        expected = target.lm_head(adapter(inputs_embeds=features).last_hidden_state)
        found = draft(ids).logits
    if kept is not None:
        kept = kept.long()
        expected, found = expected[..., kept], found[..., kept]
    apart = (expected - found).abs().max().item()
    largest = expected.abs().max().item()
    print(f"logits up to {largest:.2f} are at most {apart:.1e} apart")
    return 0 if apart <= 1e-5 * max(largest, 1.0) else 1


if __name__ == "__main__":
    sys.exit(main())
