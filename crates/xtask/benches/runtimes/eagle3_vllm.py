"""Compares vLLM's `eagle3` with plain decoding and with the reference of `eagle3_reference.py`.

    python eagle3_vllm.py DRAFTSMITH TARGET DRAFTER PROMPTS COUNT K

Prompts are answered greedily in f32 by `draftsmith generate --target TARGET` and by vLLM with and without DRAFTER. Tokens
must be equal. vLLM's counts of rounds, drafted tokens and accepted tokens at each position must be those of the reference
with K candidates a round, for every prompt. The exit code is 1 otherwise.
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
from eagle3_reference import Drafter
from transformers import AutoModelForCausalLM
from transformers_rounds import NUM_TOKENS, ours, prompts_of
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

ROUNDS, DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in (
    "drafts", "draft_tokens", "accepted_tokens_per_pos"))


def counters(model: LLM) -> list[int]:
    """Rounds, drafted tokens, and accepted tokens by position, since the start."""
    found = {metric.name: metric for metric in model.get_metrics()}
    values = found[ACCEPTED].values if ACCEPTED in found else []
    return [*(int(found[name].value) if name in found else 0 for name in (ROUNDS, DRAFTED)), *map(int, values)]


def answers(target: str, prompts: list[list[int]], **settings) -> list[tuple[list[int], list[int]]]:
    """The tokens and counts of each prompt, one after another."""
    model = LLM(model=target, dtype="float32", enforce_eager=True, max_num_seqs=1, enable_prefix_caching=False,
                disable_log_stats=False, **settings)
    sampling, found = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS), []
    for ids in prompts:
        before = counters(model)
        output = model.generate([TokensPrompt(prompt_token_ids=ids)], sampling, use_tqdm=False)[0]
        after = counters(model)
        before += [0] * (len(after) - len(before))
        found.append((list(output.outputs[0].token_ids), [end - start for start, end in zip(before, after)]))
    return found


@torch.no_grad()
def counts_of(target: torch.nn.Module, drafter: Drafter, own: dict, length: int) -> list[int]:
    """The counts as vLLM has them: the first token is not drafted, every round drafts `length` tokens, and those that
    match after the end token or the limit count as accepted."""
    prompt, answer = own["prompt_ids"], own["token_ids"]
    ids = prompt + answer
    # What the target would write next.
    for _ in range(length):
        ids = ids + [int(target(torch.tensor([ids])).logits[0, -1].argmax())]
    hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    states = [hidden[layer][0] for layer in drafter.layers]
    known, counts = len(prompt) + 1, [0] * (2 + length)
    while known < len(prompt) + len(answer):
        drafted = drafter.draft(ids[:known], [one[:known - 1] for one in states], length)
        pairs = list(zip(drafted, ids[known:]))
        accepted = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        for place in (0, *range(2, 2 + accepted)):
            counts[place] += 1
        counts[1] += length
        known += accepted + 1
    return counts


def main() -> int:
    binary, target, drafter, path, count, length = sys.argv[1:]
    own = [ours(binary, ["--target", target], text) for text in prompts_of(path, count)]
    prompts = [one["prompt_ids"] for one in own]
    plain = answers(target, prompts)
    drafted = answers(target, prompts, speculative_config={
        "method": "eagle3", "model": drafter, "num_speculative_tokens": int(length)})
    network = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    reference = Drafter(drafter, network)
    wrong, totals = 0, [0] * (2 + int(length))
    for number, one in enumerate(own):
        tokens, counts = drafted[number]
        expected = counts_of(network, reference, one, int(length))
        totals = [sum(pair) for pair in zip(totals, expected)]
        if not plain[number][0] == tokens == one["token_ids"]:
            wrong += 1
            print(f"prompt {number}: tokens DIFFER")
        elif counts != expected:
            wrong += 1
            print(f"prompt {number}: rounds, drafted, accepted by position {counts}, expected {expected}: DIFFER")
    print(f"{len(own)} prompts, {totals[0]} rounds, {totals[1]} drafted, {totals[2:]} accepted by position, {wrong} differ")
    return 1 if wrong or not totals[0] else 0


if __name__ == "__main__":
    sys.exit(main())
