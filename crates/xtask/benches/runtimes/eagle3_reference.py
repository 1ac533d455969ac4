"""Compares the rounds of an EAGLE-3 drafter with a reference in torch.

    python eagle3_reference.py DRAFTSMITH TARGET DRAFTER PROMPTS COUNT -- GENERATE_ARGUMENTS

TARGET and DRAFTER are directories. Prompts are answered greedily in f32 by transformers and by `draftsmith generate
GENERATE_ARGUMENTS`. Tokens must be equal. The reference computes each draft from nothing: the drafter reads the target's
hidden states at all known positions, then its own outputs. The drafted and accepted tokens of every round but the last,
which the limit may cut, must be equal. The exit code is 1 otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM
from transformers_rounds import ours, prompts_of


class Drafter:
    """EAGLE-3's forward (Li et al. 2025), position by position as its servers compute it."""

    def __init__(self, place: str, target: torch.nn.Module) -> None:
        config = json.loads((Path(place) / "config.json").read_text())
        nested = config.get("transformer_layer_config")
        if nested is not None:
            # The speculators library's form, with the default that vLLM takes for it.
            config = {"norm_before_residual": True} | config | nested
        self.config = config
        self.weights = {name: tensor.float() if tensor.is_floating_point() else tensor
                        for name, tensor in load_file(Path(place) / "model.safetensors").items()}
        num_layers = target.config.num_hidden_layers
        default = [2, num_layers // 2, num_layers - 3]
        self.layers = self.config.get("eagle_aux_hidden_state_layer_ids", default)
        self.layer = next(name for name in ("midlayer", "layers.0") if f"{name}.hidden_norm.weight" in self.weights)
        has_window = "sliding_attention" in self.config.get("layer_types", [])
        self.window = self.config["sliding_window"] if has_window else None
        own = self.weights.get("embed_tokens.weight")
        self.table = target.get_input_embeddings().weight if own is None else own

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[-2])[:, None] * rates
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    def outputs(self, ids: list[int], given: torch.Tensor) -> torch.Tensor:
        """o of all positions, for the tokens after them and g or earlier outputs, `[positions, hidden]`."""
        config, layer = self.config, self.layer
        normed = self.norm(f"{layer}.hidden_norm", given)
        read = torch.cat([self.norm(f"{layer}.input_layernorm", self.table[ids]), normed], -1)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

        def split(name: str, count: int) -> torch.Tensor:
            x = self.linear(f"{layer}.self_attn.{name}_proj", read).view(len(ids), count, -1).transpose(0, 1)
            norm = f"{layer}.self_attn.{name}_norm"
            return self.norm(norm, x) if f"{norm}.weight" in self.weights else x

        q, k, v = self.rotate(split("q", heads)), self.rotate(split("k", kv_heads)), split("v", kv_heads)
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        at = torch.arange(len(ids))
        back = at[:, None] - at[None]
        seen = (back >= 0) & (back < (self.window or len(ids)))
        mixed = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen)[0]
        mixed = mixed.transpose(0, 1).reshape(len(ids), -1)
        stream = normed if config.get("norm_before_residual") else given
        stream = stream + self.linear(f"{layer}.self_attn.o_proj", mixed)
        x = self.norm(f"{layer}.post_attention_layernorm", stream)
        gate, up = (self.linear(f"{layer}.mlp.{name}_proj", x) for name in ("gate", "up"))
        return stream + self.linear(f"{layer}.mlp.down_proj", silu(gate) * up)

    def draft(self, ids: list[int], states: list[torch.Tensor], count: int) -> list[int]:
        """`count` tokens after `ids`; `states` are the target's at all positions but the last."""
        if self.config.get("fc_norm"):
            states = [self.norm(f"fc_norm.{nth}", state) for nth, state in enumerate(states)]
        read = torch.cat(states, -1)
        given = self.linear("fc", self.norm("input_norm", read) if self.config.get("norm_before_fc") else read)
        drafted: list[int] = []
        for _ in range(count):
            output = self.outputs((ids + drafted)[1:], given)[-1:]
            normed = self.norm("norm", output)
            chosen = int(self.linear("lm_head", normed).argmax())
            if "d2t" in self.weights:
                chosen += int(self.weights["d2t"][chosen])
            drafted.append(chosen)
            given = torch.cat([given, normed if self.config.get("norm_output") else output])
        return drafted


@torch.no_grad()
def main() -> int:
    split = sys.argv.index("--")
    binary, target_dir, drafter_dir, path, count = sys.argv[1:split]
    arguments = sys.argv[split + 1:]
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    drafter = Drafter(drafter_dir, target)
    wrong = num_rounds = num_drafted = num_accepted = 0
    for number, text in enumerate(prompts_of(path, count)):
        generated = ours(binary, arguments, text)
        prompt, answer = generated["prompt_ids"], generated["token_ids"]
        ids = prompt + answer
        output = target(torch.tensor([ids]), output_hidden_states=True)
        greedy = output.logits[0, len(prompt) - 1:-1].argmax(-1).tolist()
        if greedy != answer:
            wrong += 1
            print(f"prompt {number}: tokens DIFFER")
            continue
        states = [output.hidden_states[layer][0] for layer in drafter.layers]
        known = len(prompt)
        for nth, own in enumerate(generated["rounds"][:-1]):
            drafted = drafter.draft(ids[:known], [one[:known - 1] for one in states], own["num_drafted"])
            pairs = list(zip(drafted, ids[known:]))
            accepted = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
            num_rounds, num_drafted, num_accepted = num_rounds + 1, num_drafted + len(drafted), num_accepted + accepted
            if accepted != own["num_accepted"]:
                wrong += 1
                print(f"prompt {number}, round {nth}: {accepted} accepted, ours {own['num_accepted']}: DIFFERS")
                break
            known += accepted + 1
    print(f"{count} prompts, {num_rounds} rounds, {num_drafted} drafted, {num_accepted} accepted, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
