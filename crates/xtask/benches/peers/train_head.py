"""SpecDec++'s acceptance head, trained with torch: one epoch over the rows of build-data."""

import random

import torch
from common import RECIPE, arguments, load, pad, read_rows, read_settings, serve
from modules import Head, adam_w, head_loss
from torch import nn

args = arguments(data="", settings="", model="draft")
HEAD = read_settings(args.settings)
columns = ["prompt_ids", "response_ids", "draft_ids", "draft_log_prob", "target_log_prob"]
rows = read_rows(args.data, columns)
draft = load(args.model).model
hidden_size = draft.config.hidden_size
torch.manual_seed(RECIPE["seed"])
random.seed(RECIPE["seed"])


def mixture(row):
    """The prompt followed by Z, the draft's tokens in Z, and their labels."""
    keeps = torch.rand(len(row["response_ids"])) < HEAD["mixing_ratio"]
    response, draft_ids = torch.tensor(row["response_ids"]), torch.tensor(row["draft_ids"])
    mixed = torch.where(keeps, response, draft_ids)
    log_ratio = torch.tensor(row["target_log_prob"]) - torch.tensor(row["draft_log_prob"])
    labels = log_ratio.clamp(max=0).exp()[~keeps]
    positions = len(row["prompt_ids"]) + (~keeps).nonzero()[:, 0]
    return row["prompt_ids"] + mixed.tolist(), positions, labels


def loss_of(head, batch):
    """The weighted loss of a batch, and its number of labels."""
    ids, positions, labels = zip(*map(mixture, batch))
    with torch.no_grad():
        hidden = draft(pad(ids), use_cache=False).last_hidden_state
    features = torch.cat([hidden[row, at] for row, at in enumerate(positions)])
    labels = torch.cat(labels)
    return head_loss(head, features, labels, HEAD["rejection_weight"]), len(labels)


def work(num_rows=None):
    batch_size, accumulation = HEAD["batch_size"], HEAD["gradient_accumulation"]
    head = Head(hidden_size, HEAD["num_layers"])
    optimizer = adam_w(head, HEAD)
    epoch = random.sample(rows, num_rows or len(rows))
    batches = [epoch[i : i + batch_size] for i in range(0, len(epoch), batch_size)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    num_tokens = 0
    for i in range(0, len(batches), accumulation):
        step = batches[i : i + accumulation]
        for batch in step:
            loss, num_labels = loss_of(head, batch)
            (loss / len(step)).backward()
            num_tokens += num_labels
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()
    return {"num_tokens": num_tokens, "loss": loss.item()}


serve(args, lambda: work(16), work)
