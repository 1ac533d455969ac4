"""Kangaroo's adapter, trained with torch: the frozen target's features, computed again at each step, and
cross-entropy against the target's distribution."""

import random

import torch
from common import RECIPE, arguments, load, pad, read_rows, read_settings, serve
from modules import Adapter, train_epoch
from torch import nn

args = arguments(data="", settings="", model="target", num_rows=128, exit_layer=2)
ADAPTER = read_settings(args.settings)
rows = read_rows(args.data, ["prompt_ids", "response_ids"])[: args.num_rows]
target = load(args.model)
config = target.config
torch.manual_seed(RECIPE["seed"])
random.seed(RECIPE["seed"])


def loss_of(adapter, batch):
    """The mean cross-entropy over the positions before response tokens, and their number."""
    # The token after the last one is unknown.
    ids = pad([(row["prompt_ids"] + row["response_ids"])[:-1] for row in batch])
    precedes = torch.zeros_like(ids, dtype=torch.bool)
    for row, mask in zip(batch, precedes):
        start = len(row["prompt_ids"]) - 1
        mask[start : start + len(row["response_ids"])] = True
    with torch.no_grad():
        hidden = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
        probs = target.lm_head(hidden[-1][precedes]).softmax(-1)
    logits = target.lm_head(adapter(hidden[args.exit_layer])[precedes])
    return nn.functional.cross_entropy(logits, probs), len(probs)


def work(num_rows=None):
    epoch = random.sample(rows, num_rows or len(rows))
    return train_epoch(Adapter(config), epoch, ADAPTER, loss_of)


serve(args, lambda: work(8), work)
