"""Times a training step of EAGLE-3 in torch, for comparison with `train-adapter`.

    python eagle3_training.py TARGET DATA [--steps 3] [--vocabulary 4096] [--rows 8] [--seconds 60] [--compile | --speculators]

TARGET is the target's directory, for its shapes; DATA is a directory of `build-data`, for the rows' lengths. The target's hidden
states are random numbers, which cost the same as stored ones. A step is that of `train-adapter` with its defaults: steps weighted
by 0.8, cross-entropy against the target's distribution over the draft vocabulary, AdamW, clipping by norm. Rows are padded to the
longest of a step, as in the authors' trainer; logits are computed only where the loss covers them. `--speculators` times the
model and loss of the package speculators 0.9 instead, both `eager` since its others need a GPU, over the rows of a step in one
sequence. Prints rows and tokens of responses a second, from the second step on, and the peak of memory.
"""

from __future__ import annotations

import argparse
import glob
import json
import resource
import time
from pathlib import Path

import pyarrow.parquet as parquet
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu


class Drafter(torch.nn.Module):
    """The layer, unrolled."""

    def __init__(self, config: dict, vocabulary: int) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config.get("head_dim") or hidden // self.heads
        kv = self.kv_heads * self.width
        matrix = lambda inputs, outputs: torch.nn.Linear(inputs, outputs, bias=False)
        self.fc = matrix(3 * hidden, hidden)
        self.q, self.k, self.v = matrix(2 * hidden, self.heads * self.width), matrix(2 * hidden, kv), matrix(2 * hidden, kv)
        self.o = matrix(self.heads * self.width, hidden)
        self.gate, self.up, self.down = matrix(hidden, inner), matrix(hidden, inner), matrix(inner, hidden)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden, eps=1e-5) for _ in range(4))
        self.lm_head = matrix(hidden, vocabulary)
        self.theta = config.get("rope_theta", 10000.0)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        angles = torch.arange(x.shape[2])[:, None] / self.theta ** (torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, states: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        batch, seq, _ = embedded.shape
        given, outputs, keys, values = self.fc(states), [], [], []
        embedded = self.norms[0](embedded)
        at = torch.arange(seq)
        for step in range(steps):
            x = torch.cat([embedded, self.norms[1](given)], -1)
            split = lambda rows, heads: rows.view(batch, seq, heads, self.width).transpose(1, 2)
            q = self.rotated(split(self.q(x), self.heads))
            keys.append(self.rotated(split(self.k(x), self.kv_heads)))
            values.append(split(self.v(x), self.kv_heads))
            # Step 0's keys up to `step` positions before, and one position of each later step.
            masks = [at[None, :] <= at[:, None] - step]
            masks += [at[None, :] == at[:, None] - (step - i) for i in range(1, step + 1)]
            mask = torch.cat(masks, 1)
            # A query before its round's beginning sees something, so that its numbers stay finite.
            mask[:step, 0] = True
            mixed = scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask, enable_gqa=True)
            stream = given + self.o(mixed.transpose(1, 2).reshape(batch, seq, -1))
            normed = self.norms[2](stream)
            output = stream + self.down(silu(self.gate(normed)) * self.up(normed))
            outputs.append(self.norms[3](output))
            given = torch.nn.functional.pad(output[:, :-1], (0, 0, 1, 0))
        return outputs


def loss_of(forward: Drafter, lm_head: torch.nn.Module, teachers_head: torch.Tensor, rows: list[tuple[int, int]],
            steps: int) -> torch.Tensor:
    """The loss of random rows, whose prompts and responses have these lengths."""
    hidden = teachers_head.shape[1]
    seq = max(prompt + response for prompt, response in rows) - 2
    states, embedded = torch.randn(len(rows), seq, 3 * hidden), torch.randn(len(rows), seq, hidden)
    teacher = torch.randn(sum(response for _, response in rows), hidden)
    outputs = forward(states, embedded, steps)
    with torch.no_grad():
        probabilities = linear(teacher, teachers_head).softmax(-1)
    loss = 0.0
    for step, output in enumerate(outputs):
        # Positions that predict the response's tokens, but for the first ones of the row.
        picked, kept, before = [], [], 0
        for row, (prompt, response) in enumerate(rows):
            first = max(prompt - 2, 0) + step
            last = max(prompt - 2, 0) + response
            picked.append(output[row, first : min(last, seq)])
            kept.append(probabilities[before + step : before + step + picked[-1].shape[0]])
            before += response
        logits = lm_head(torch.cat(picked))
        step_loss = -(torch.cat(kept) * logits.log_softmax(-1)).sum()
        loss = loss + 0.8**step * step_loss / before
    return loss


class Speculators(torch.nn.Module):
    """The package's drafter and loss."""

    def __init__(self, target: str, vocabulary: int, steps: int) -> None:
        super().__init__()
        from speculators.losses.utils import resolve_loss_config
        from speculators.models.eagle3.core import Eagle3DraftModel
        from transformers import AutoConfig

        layer = AutoConfig.from_pretrained(target)
        self.vocabulary_of_target = layer.vocab_size
        layer.num_hidden_layers = 1
        drafted = torch.arange(layer.vocab_size) < vocabulary
        self.model = Eagle3DraftModel.from_training_args(
            layer, t2d=drafted, d2t=torch.zeros(vocabulary, dtype=torch.long), draft_vocab_size=vocabulary,
            norm_before_residual=False, ttt_steps=steps, verifier_name_or_path=target, draft_attn_impl="eager")
        # The default is written for GPUs.
        self.steps, self.loss = steps, resolve_loss_config("ce", "eager")

    def forward(self, rows: list[tuple[int, int]], hidden: int) -> torch.Tensor:
        """The loss of random rows, whose prompts and responses have these lengths."""
        lengths = torch.tensor([sum(row) for row in rows])
        total = int(lengths.sum())
        is_response = [at >= prompt for prompt, response in rows for at in range(prompt + response)]
        _, loss, _ = self.model(
            hidden_states=torch.randn(1, total, 3 * hidden),
            input_ids=torch.randint(0, self.vocabulary_of_target, (1, total)),
            document_ids=torch.repeat_interleave(torch.arange(len(rows)), lengths)[None],
            loss_mask=torch.tensor(is_response)[None],
            verifier_last_hidden_states=torch.randn(1, total, hidden),
            ttt_steps=self.steps, ttt_step_loss_decay=0.8, loss_config=self.loss)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--speculators", action="store_true")
    args = parser.parse_args()
    config = json.loads((Path(args.target) / "config.json").read_text())
    hidden = config["hidden_size"]
    table = parquet.read_table(sorted(glob.glob(f"{args.data}/responses-*.parquet")), columns=["prompt_ids", "response_ids"])
    lengths = [(len(row["prompt_ids"]), len(row["response_ids"])) for row in table.to_pylist()]
    torch.manual_seed(0)
    order = torch.randperm(len(lengths)).tolist()
    if args.speculators:
        drafter = Speculators(args.target, args.vocabulary, args.steps)
    else:
        drafter = Drafter(config, args.vocabulary)
    forward = torch.compile(drafter, dynamic=True) if args.compile else drafter
    teachers_head = torch.randn(args.vocabulary, hidden) / hidden**0.5
    trained = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    num_rows = num_tokens = 0
    begun = end = time.perf_counter()
    for start in range(0, len(order), args.rows):
        rows = [lengths[row] for row in order[start : start + args.rows]]
        if args.speculators:
            loss = drafter(rows, hidden)
        else:
            loss = loss_of(forward, drafter.lm_head, teachers_head, rows, args.steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        end = time.perf_counter()
        if start == 0:
            begun = end
            continue
        num_rows += len(rows)
        num_tokens += sum(response for _, response in rows)
        if end - begun > args.seconds:
            break
    seconds = end - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({
        "rows_per_second": round(num_rows / seconds, 2),
        "response_tokens_per_second": round(num_tokens / seconds, 1),
        "rows": num_rows,
        "peak_mib": round(peak),
        "threads": torch.get_num_threads(),
    }))


if __name__ == "__main__":
    main()
