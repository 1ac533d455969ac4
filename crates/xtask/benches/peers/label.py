"""Labelled responses as in the SpecDec++ authors' scripts, one prompt at a time: the target responds, the
draft samples a token at each position, and both models give their log-probabilities of the samples."""

import json
import tempfile

import torch
from common import RECIPE, ROOT, arguments, load, read_prompts, serve

args = arguments(num_prompts=32, model="target", draft="draft")
prompts = read_prompts(ROOT / RECIPE["data"]["prompts"][0], args.num_prompts, args.model)
target, draft = load(args.model), load(args.draft)
torch.manual_seed(RECIPE["seed"])


def log_probs(model, ids, prompt_len):
    """A model's logits before each response token: `[response, vocab]`."""
    return model(ids).logits[0, prompt_len - 1 : -1].log_softmax(-1)


@torch.no_grad()
def label(prompt):
    prompt_len = prompt.shape[1]
    # 1. The target's response. top_k 0 and top_p 1 cut nothing off.
    ids = target.generate(
        prompt,
        do_sample=True,
        temperature=RECIPE["data"]["temperature"],
        top_k=0,
        top_p=1.0,
        max_new_tokens=RECIPE["data"]["max_new_tokens"],
        pad_token_id=target.generation_config.eos_token_id,
    )
    # 2. The draft's token at each position.
    draft_ids = torch.multinomial(log_probs(draft, ids, prompt_len).exp(), 1)
    # 3. and 4. Both models' log-probabilities of these tokens.
    draft_log_prob = log_probs(draft, ids, prompt_len).gather(1, draft_ids)[:, 0]
    target_log_prob = log_probs(target, ids, prompt_len).gather(1, draft_ids)[:, 0]
    return {
        "prefix": prompt[0].tolist(),
        "tokens": ids[0, prompt_len:].tolist(),
        "draft": draft_ids[:, 0].tolist(),
        "log_p_draft": draft_log_prob.tolist(),
        "log_p_target": target_log_prob.tolist(),
        "p_acc": (target_log_prob - draft_log_prob).clamp(max=0).exp().tolist(),
    }


def work():
    rows = [label(prompt) for prompt in prompts]
    with tempfile.TemporaryFile("w") as file:
        json.dump(rows, file)
    return {"num_tokens": sum(len(row["tokens"]) for row in rows)}


serve(args, lambda: label(prompts[0]), work)
