"""Compares vLLM with and without an exported proposer, and its proposals with draftsmith's rounds.

    python vllm_rounds.py DRAFTSMITH TARGET PACKAGE PROMPTS COUNT -- GENERATE_ARGUMENTS

PACKAGE is in a directory on PYTHONPATH. Prompts are answered greedily in f32, all in one batch, plainly and with the
proposer, and by `draftsmith generate GENERATE_ARGUMENTS` with the same ids. Tokens must be equal, and so must the
number of candidates in each round except the last two, where the limits of the two sides differ. The exit code is 1
otherwise.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys

from transformers_rounds import NUM_TOKENS, ours, prompts_of
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


def answers(target: str, prompts: list[TokensPrompt], sampling: SamplingParams | list[SamplingParams] = GREEDY,
            **settings) -> list[list[int]]:
    model = LLM(model=target, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8,
                gpu_memory_utilization=0.3, disable_log_stats=True, **settings)
    outputs = model.generate(prompts, sampling, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    del model
    gc.collect()
    return found


def watch(package: str) -> list[tuple[int, ...]]:
    """The proposer's inputs and outputs, in order. Needs vLLM's engine in this process."""
    module = importlib.import_module(package)
    propose, seen = module.Proposer.propose, []

    def watched(self, sampled, num_tokens, token_ids, slot_mappings=None):
        proposals = propose(self, sampled, num_tokens, token_ids, slot_mappings)
        for row, proposal in enumerate(proposals):
            seen.append((tuple(int(t) for t in token_ids[row, : int(num_tokens[row])]), len(proposal)))
        return proposals

    module.Proposer.propose = watched
    return seen


def main() -> int:
    split = sys.argv.index("--")
    binary, target, package, path, count = sys.argv[1:split]
    texts = prompts_of(path, count)
    told = [ours(binary, sys.argv[split + 1:], text) for text in texts]
    prompts = [TokensPrompt(prompt_token_ids=one["prompt_ids"]) for one in told]
    plain = answers(target, prompts)
    seen = watch(package)
    most = json.load(open(f"{package}/acceptance_head.json"))["max_candidates"]
    drafted = answers(target, prompts, speculative_config={
        "method": "custom_class", "model": f"{package}.Proposer", "num_speculative_tokens": most})
    end = json.load(open(f"{target}/generation_config.json"))["eos_token_id"]
    wrong = num_rounds = 0
    for number, one in enumerate(told):
        expected = one["token_ids"]
        strip = lambda ids: ids[:-1] if ids and ids[-1] == end else ids  # noqa: E731
        is_same = strip(plain[number]) == strip(drafted[number]) == strip(expected)
        sequence = tuple(one["prompt_ids"] + expected)
        lengths = {len(ids): length for ids, length in seen
                   if len(ids) >= len(one["prompt_ids"]) and sequence[: len(ids)] == ids}
        # Our rounds begin with the tokens that were kept before them.
        at, rounds = len(one["prompt_ids"]), []
        for round_ in one["rounds"]:
            if round_["num_drafted"] > 0 and at in lengths:
                rounds.append((round_["num_drafted"], lengths[at]))
            at += round_["num_accepted"] + 1
        compared = rounds[:-2]
        num_rounds += len(compared)
        if not is_same or any(our != their for our, their in compared):
            wrong += 1
            print(f"prompt {number}: tokens {'equal' if is_same else 'DIFFER'}, rounds (ours, vLLM's) {rounds}")
    print(f"{len(texts)} prompts, {num_rounds} rounds compared, {wrong} prompts differ")
    return 1 if wrong or num_rounds == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
