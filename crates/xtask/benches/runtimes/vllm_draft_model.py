"""Compares vLLM with an exported draft model with vLLM without one.

    python vllm_draft_model.py DRAFTSMITH TARGET DRAFT PROMPTS COUNT

Prompts are answered greedily in f32, plainly and with `"method": "draft_model"` and four candidates a round. Tokens
must be equal, also to plain `draftsmith generate`. The exit code is 1 otherwise.
"""

from __future__ import annotations

import sys

from transformers_rounds import ours, prompts_of
from vllm.inputs import TokensPrompt
from vllm_rounds import answers


def main() -> int:
    binary, target, draft, path, count = sys.argv[1:]
    texts = prompts_of(path, count)
    generated = [ours(binary, ["--target", target], text) for text in texts]
    prompts = [TokensPrompt(prompt_token_ids=one["prompt_ids"]) for one in generated]
    plain = answers(target, prompts)
    drafted = answers(target, prompts, speculative_config={
        "method": "draft_model", "model": draft, "num_speculative_tokens": 4})
    wrong = 0
    for number, (one, other, expected) in enumerate(zip(plain, drafted, generated)):
        length = min(len(one), len(other), len(expected["token_ids"]))
        # One side returns the end token and the other does not.
        near = max(map(len, (one, other, expected["token_ids"]))) - length <= 1
        if not near or not one[:length] == other[:length] == expected["token_ids"][:length]:
            wrong += 1
            print(f"prompt {number}: tokens DIFFER")
    print(f"{len(texts)} prompts, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
