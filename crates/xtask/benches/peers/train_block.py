"""A block drafter's training with torch, as DSpark's authors do it: the frozen target's features, computed again
at each step, the rows of all blocks in one forward under a mask, and cross-entropy against the target's
distributions."""

import random

import torch
from common import RECIPE, arguments, load, pad, read_rows, read_settings, serve
from modules import train_epoch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, apply_rotary_pos_emb

args = arguments(data="", settings="", model="target", num_rows=128)
SETTINGS = read_settings(args.settings)
SIZE, LAYERS = SETTINGS["block_size"], SETTINGS["layers"]
rows = read_rows(args.data, ["prompt_ids", "response_ids"])[: args.num_rows]
target = load(args.model)
config = target.config
MASK = config.vocab_size - 1
torch.manual_seed(RECIPE["seed"])
random.seed(RECIPE["seed"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        size, rank = config.hidden_size, SETTINGS["markov_rank"]
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.context_norm, self.norm = (LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, n) for n in range(SETTINGS["num_layers"]))
        self.vectors = nn.Embedding(config.vocab_size, rank)
        self.to_logits = nn.Linear(rank, config.vocab_size, bias=False)

    def forward(self, states, anchors, tokens):
        """The logits of all blocks' rows, given the states of a batch `[batch, seq, states * hidden]`, the anchors'
        positions `[batch, blocks]` and the token before each candidate `[batch, blocks, size]`."""
        batch, seq, _ = states.shape
        contexts = self.context_norm(self.fc(states))
        x = torch.full_like(tokens, MASK)
        x[:, :, 0] = tokens[:, :, 0]
        x = target.model.embed_tokens(x).flatten(1, 2)
        numbers = torch.arange(SIZE)
        positions = (anchors[..., None] + numbers).flatten(1)
        first = anchors.repeat_interleave(SIZE, 1)
        sees_context = torch.arange(seq) < first[..., None]
        number, block = numbers.repeat(anchors.shape[1]), torch.arange(anchors.shape[1]).repeat_interleave(SIZE)
        sees_row = (block[:, None] == block) & (number[:, None] >= number)
        mask = torch.cat([sees_context, sees_row.expand(batch, -1, -1)], -1)[:, None]
        of_contexts = target.model.rotary_emb(contexts, torch.arange(seq)[None])
        of_rows = target.model.rotary_emb(x, positions)
        for layer in self.layers:
            attention = layer.self_attn
            heads = lambda y: y.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            read = layer.input_layernorm(x)
            q, k = apply_rotary_pos_emb(heads(attention.q_proj(read)), heads(attention.k_proj(read)), *of_rows)
            own = heads(attention.k_proj(contexts))
            _, own = apply_rotary_pos_emb(own, own, *of_contexts)
            k = torch.cat([own, k], 2)
            v = heads(attention.v_proj(torch.cat([contexts, read], 1)))
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = target.lm_head(self.norm(x))
        return logits + self.to_logits(self.vectors(tokens.flatten(1)))


def loss_of(drafter, batch):
    """The weighted cross-entropy of all rows that predict a token of the response, and the number of first rows."""
    ids = pad([row["prompt_ids"] + row["response_ids"] for row in batch])
    starts = [len(row["prompt_ids"]) for row in batch]
    ends = [start + len(row["response_ids"]) for start, row in zip(starts, batch)]
    anchors = pad([list(range(start, end - 1)) for start, end in zip(starts, ends)])
    with torch.no_grad():
        hidden = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
        probs = target.lm_head(hidden[-1]).softmax(-1)
    at = anchors[..., None] + torch.arange(SIZE)
    is_taught = (anchors[..., None] > 0) & (at + 1 < torch.tensor(ends)[:, None, None])
    at = at.clamp(max=ids.shape[1] - 1)
    nth = torch.arange(len(batch))[:, None, None]
    logits = drafter(torch.cat([hidden[layer] for layer in LAYERS], -1), anchors, ids[nth, at])
    logits = logits.unflatten(1, at.shape[1:])[is_taught]
    steps = torch.arange(SIZE).expand_as(at)[is_taught]
    losses = nn.functional.cross_entropy(logits, probs[nth, at][is_taught], reduction="none")
    shares = SETTINGS["step_weight"] ** steps / is_taught.sum((0, 1)).clamp(min=1)[steps]
    return (losses * shares).sum(), int(is_taught[..., 0].sum())


def work(num_rows=None):
    epoch = random.sample(rows, num_rows or len(rows))
    return train_epoch(Block(), epoch, SETTINGS, loss_of)


serve(args, lambda: work(8), work)
