"""Compares vLLM's samples with and without an exported proposer.

    python vllm_sampled.py DRAFTSMITH TARGET PACKAGE PROMPT COUNT

PROMPT is answered COUNT times in f32 at temperature 1 with COUNT seeds, plainly and with the proposer. The first token
follows the prompt; later ones come from verifications, in which vLLM treats proposals as certain. At each of the first
positions the tokens of both samples must have the same distribution, by a chi-squared test of homogeneity. The exit code
is 1 if a position is rejected at 0.001, if no proposal is accepted, or if no position has an entropy of 0.5 nats.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter

import torch
from transformers_rounds import ours
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.inputs import TokensPrompt
from vllm_rounds import answers, watch

NUM_TOKENS = 6
NUM_POSITIONS = 5
MIN_CELL = 10
"""The frequency, over both samples, below which tokens are counted as one."""


def fix_temperatures() -> None:
    """A correct version of vLLM 0.32's kernel for the CPU, which writes the temperatures of a verification's rows into a
    copy and drops it. Logits are then divided by uninitialised memory, and samples are wrong with any drafter."""
    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        lengths = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(lengths, output_size=num_tokens).to(x.dtype)

    rejection_sampler.expand_batch_to_tokens = expand


def compared(one: Counter, other: Counter) -> tuple[float, float, int]:
    """The p-value of the two samples, half the sum of the differences of their frequencies, and the number of kinds of
    tokens."""
    together = one + other
    common = [token for token, count in together.items() if count >= MIN_CELL]
    cells = [(one[token], other[token]) for token in common]
    rest = [sum(of.values()) - sum(of[token] for token in common) for of in (one, other)]
    if sum(rest):
        cells.append(tuple(rest))
    totals = [sum(of.values()) for of in (one, other)]
    squares = 0.0
    for cell in cells:
        for count, total in zip(cell, totals):
            expected = sum(cell) * total / sum(totals)
            squares += (count - expected) ** 2 / expected
    free = torch.tensor(max(len(cells) - 1, 1) / 2.0, dtype=torch.float64)
    chance = torch.special.gammaincc(free, torch.tensor(squares / 2.0, dtype=torch.float64)).item()
    apart = sum(abs(a / totals[0] - b / totals[1]) for a, b in cells) / 2
    return chance, apart, len(cells)


def main() -> int:
    binary, target, package, text, count = sys.argv[1:]
    ids = ours(binary, ["--target", target], text)["prompt_ids"]
    prompts = [TokensPrompt(prompt_token_ids=ids)] * int(count)
    # Different seeds, because otherwise the first tokens of both samples would be equal.
    sampling = [[SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=seed + begin) for seed in range(int(count))]
                for begin in (0, 1_000_000)]
    fix_temperatures()
    plain = answers(target, prompts, sampling[0])
    seen = watch(package)
    most = json.load(open(f"{package}/acceptance_head.json"))["max_candidates"]
    drafted = answers(target, prompts, sampling[1], speculative_config={
        "method": "custom_class", "model": f"{package}.Proposer", "num_speculative_tokens": most})
    # Each round ends with a token that was not proposed. The first token belongs to no round, and no proposal of the last
    # round is kept.
    num_tokens, num_rounds = sum(len(answer) - 1 for answer in drafted), len(seen)
    is_wrong, largest_entropy = not 0 < num_rounds < num_tokens, 0.0
    print(f"{count} answers each way; with the proposer {num_tokens} tokens after the first in at most {num_rounds} rounds")
    for position in range(NUM_POSITIONS):
        one, other = (Counter(answer[position] for answer in some if len(answer) > position) for some in (plain, drafted))
        chance, apart, kinds = compared(one, other)
        shares = [n / one.total() for n in one.values()]
        entropy = -sum(share * math.log(share) for share in shares)
        is_wrong, largest_entropy = is_wrong or chance < 0.001, max(entropy, largest_entropy)
        print(f"token {position + 1}: {one.total()} and {other.total()}, {kinds} kinds, entropy {entropy:.2f}, "
              f"frequencies {apart:.3f} apart, p = {chance:.3f}")
    return 1 if is_wrong or largest_entropy < 0.5 else 0


if __name__ == "__main__":
    sys.exit(main())
