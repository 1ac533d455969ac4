"""Writes a draft model of a Llama as GGUF, with the vocabulary and settings of its target's GGUF.

    python gguf_draft.py TARGET.gguf DRAFT OUT.gguf

DRAFT is what `draftsmith export --for draft-model` wrote for that target. llama.cpp's own converter comes with its
sources alone; this needs the packages `gguf` and `safetensors`. Matrices are written in bf16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head's two halves in turn, as llama.cpp rotates them."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def main() -> None:
    target, draft, out = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    config = json.loads((draft / "config.json").read_text())
    reader = GGUFReader(target)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, arch)
    written_by_library = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in written_by_library:
            continue
        value = config["num_hidden_layers"] if name == f"{arch}.block_count" else field.contents()
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    writer.add_file_type(32)
    for name, tensor in load_file(draft / "model.safetensors").items():
        weight = tensor.to(torch.float32).numpy()
        if name in OUTSIDE:
            called = OUTSIDE[name]
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            called = f"blk.{layer}.{NAMES[part]}.weight"
            if part == "self_attn.q_proj":
                weight = interleaved(weight, config["num_attention_heads"])
            elif part == "self_attn.k_proj":
                weight = interleaved(weight, config["num_key_value_heads"])
        if weight.ndim == 1:
            writer.add_tensor(called, weight)
        else:
            bf16 = GGMLQuantizationType.BF16
            writer.add_tensor(called, quantize(weight, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
