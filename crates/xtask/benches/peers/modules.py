"""The trained modules in torch, with the tensor names of our files."""

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding


class ResBlock(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


class Head(nn.Module):
    """SpecDec++'s acceptance head with tied blocks: `[labels, hidden]` to `[labels, 2]`."""

    def __init__(self, hidden_size, num_layers):
        super().__init__()
        blocks = [ResBlock(hidden_size)] * num_layers
        self.model = nn.Sequential(*blocks, nn.Linear(hidden_size, 2))

    def forward(self, x):
        return self.model(x)


class Adapter(nn.Module):
    """Kangaroo's adapter for a target of a config: `[batch, seq, hidden]` to the same."""

    def __init__(self, config):
        super().__init__()
        layer = nn.Module()
        layer.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        layer.self_attn = LlamaAttention(config, layer_idx=0)
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, features):
        positions = torch.arange(features.shape[1])[None]
        layer = self.layers[0]
        rotary = self.rotary(features, positions)
        attended, _ = layer.self_attn(layer.input_layernorm(features), rotary, None)
        return self.norm(features + attended)


def load_weights(module, file):
    """All weights of the file and no others. Tied blocks are stored once."""
    missing, unexpected = module.load_state_dict(load_file(file), strict=False)
    if isinstance(module, Head):
        missing = [name for name in missing if ".linear." not in name]
    if missing or unexpected:
        raise SystemExit(f"{file}: missing {missing}, unexpected {unexpected}")
    return module


def adam_w(module, settings):
    """The optimizer of a training's settings."""
    return torch.optim.AdamW(
        module.parameters(),
        lr=settings["learning_rate"],
        betas=(settings["beta_1"], settings["beta_2"]),
        eps=settings["epsilon"],
        weight_decay=settings["weight_decay"],
    )


def train_epoch(module, rows, settings, loss_of):
    """Trains a drafter on the rows once. `loss_of` gives a batch's loss and its number of labels."""
    optimizer, batch_size = adam_w(module, settings), settings["batch_size"]
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    num_tokens = 0
    for batch in batches:
        loss, num_labels = loss_of(module, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        num_tokens += num_labels
        loss.item()
    return {"num_tokens": num_tokens, "loss": loss.item()}


def head_loss(head, features, labels, rejection_weight):
    """SpecDec++'s weighted cross-entropy over the labels of a batch."""
    log_probs = head(features).log_softmax(-1)
    rejected = rejection_weight * (1 - labels)
    loss = -(rejected * log_probs[:, 0] + labels * log_probs[:, 1]).sum()
    return loss / (rejected + labels).sum()
