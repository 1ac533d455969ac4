"""Tokens per second of transformers' greedy decoding in f32, plain and with a draft, in turn for each prompt.

    python draft_model_speed.py DRAFTSMITH TARGET DRAFT PROMPTS COUNT NUM_TOKENS PROMPTS.json

TARGET and DRAFT are directories; the draft's `generation_config.json` sets how it drafts. PROMPTS is read as in
`transformers_rounds.py`, with the ids of `draftsmith generate`, and written to PROMPTS.json for
`llama_server_speed.py`, with the number of tokens of each answer. The exit code is 1 if tokens differ.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers_rounds import prompts_of


def main() -> int:
    binary, target_dir, draft_dir, path, count, num_tokens, out = sys.argv[1:]
    torch.set_num_threads(2)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        for place in (target_dir, draft_dir)
    )
    greedy = GenerationConfig.from_pretrained(target_dir)
    greedy.do_sample, greedy.max_new_tokens = False, int(num_tokens)
    texts = prompts_of(path, count)
    rows, speedups, wrong = [], [], 0
    seconds = {"plain": 0.0, "drafted": 0.0}
    for text in texts:
        generated = subprocess.run([binary, "generate", "--json", "--quiet", "--target", target_dir, "--prompt", text,
                               "--max-new-tokens", "1"], check=True, capture_output=True, text=True)
        ids = torch.tensor([json.loads(generated.stdout)["prompt_ids"]])
        taken, found = {}, {}
        for way, more in (("plain", {}), ("drafted", {"assistant_model": draft})):
            begun = time.perf_counter()
            found[way] = target.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=greedy, **more
            )
            taken[way] = time.perf_counter() - begun
            seconds[way] += taken[way]
        wrong += not torch.equal(found["plain"], found["drafted"])
        speedups.append(taken["plain"] / taken["drafted"])
        rows.append({"prompt_ids": ids[0].tolist(), "num_tokens": found["plain"].shape[-1] - ids.shape[-1]})
    with open(out, "w") as file:
        json.dump(rows, file)
    tokens = sum(row["num_tokens"] for row in rows)
    plain, drafted = tokens / seconds["plain"], tokens / seconds["drafted"]
    print(f"transformers: {len(rows)} prompts, {wrong} differ; plain {plain:.1f} tokens/s, drafted {drafted:.1f}: "
          f"{drafted / plain:.2f}x (median over prompts {statistics.median(speedups):.2f}x)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
