"""Reading a prompt with transformers, up to the first token after it."""

import torch
from common import arguments, load, ordinary_tokens, serve

args = arguments(model="", num_tokens=1000)
model = load(args.model)
prompt = ordinary_tokens(args.num_tokens)


def work():
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits
    token = logits[0, -1].argmax().item()
    return {"num_tokens": len(prompt), "prompt_ids": [prompt], "token_ids": [[token]]}


serve(args, work, work)
