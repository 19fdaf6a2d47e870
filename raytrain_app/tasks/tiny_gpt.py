"""A small language model: a decoder with rotary positions and causal attention, on a language whose best loss is known.

A row is a text; the model predicts each of its characters from those before. Loss and accuracy are those of a character.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from raytrain_app.errors import JobError
from raytrain_app.task import Columns, Cut, ModelOptions, Rows, Task
from raytrain_app.tasks import small_language

TRAIN_ROWS, TEST_ROWS = 16384, 1024


class Gpt(ModelOptions):
    """A decoder; 4 layers of width 64 have 200,000 parameters."""

    layers: int = Field(4, ge=1)
    width: int = Field(64, ge=2)
    heads: int = Field(4, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)


class TinyGpt(Task):
    """Texts of 65 characters, labelled by their kind: 16,384 to train on and 1,024 for the test."""

    columns = Columns(shape=(1 + small_language.LENGTH,), dtype="uint8", num_classes=len(small_language.KINDS))
    models = {"gpt": Gpt}
    default_source = "small-language"
    row_tokens = small_language.LENGTH

    def generate(self, source: str) -> Mapping[str, Rows] | None:
        if source != self.default_source:
            return None
        return {"train": small_language.write(TRAIN_ROWS, 1), "test": small_language.write(TEST_ROWS, 2)}

    def least_loss(self, rows: Rows) -> float:
        """Nats a character of the language itself."""
        return float(small_language.surprise(rows[0]).mean()) / small_language.LENGTH

    def encode(self, text: str) -> np.ndarray:
        return small_language.encode(text)

    def decode(self, tokens: np.ndarray) -> str:
        return small_language.decode(tokens)

    def torch_model(self, name: str, options: Any) -> nn.Module:
        if options.width % (2 * options.heads):
            raise JobError(f"model.width: found {options.width}; expected a multiple of 2 * heads, which is {2 * options.heads}")
        return Decoder(options, len(small_language.CHARACTERS))

    def torch_cut(self, name: str, options: Any) -> Cut:
        return Cut(
            chain=("embedding", "blocks", "norm", "head"),
            columns=("*.query", "*.key", "*.value", "*.gate", "*.up"),
            rows=("*.out", "*.down"),
            heads=options.heads,
        )

    def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """All characters but the last."""
        return x[:, :-1].long()

    def torch_targets(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """All characters but the first: at each place, the one that comes next."""
        return x[:, 1:].long()

    def torch_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of their mean loss a character."""
        return nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]

    def torch_correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of the share of characters predicted."""
        correct: torch.Tensor = (outputs.argmax(-1) == y).sum() / y.shape[1]
        return correct


class Decoder(nn.Module):
    """Takes tokens (batch, length) and puts out logits of the next one, (batch, length, characters)."""

    def __init__(self, options: Gpt, num_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, num_characters, bias=False)
        # So wide that outputs vary as much as inputs (LeCun et al. 1998): with the 0.02 of GPT-2, whose width is 768, a model of
        # this size takes several times as many steps.
        nn.init.normal_(self.embedding.weight, std=0.3)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                into_residual = name.endswith(("attention.out", "down"))
                nn.init.normal_(module.weight, std=(module.in_features * (2 * options.layers if into_residual else 1)) ** -0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.head(self.norm(hidden))
        return outputs


class Block(nn.Module):
    """Attention and a gated linear unit (Shazeer 2020), each behind a norm and around which the input passes."""

    def __init__(self, options: Gpt) -> None:
        super().__init__()
        width = options.width
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(options)
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in [(width, 3 * width), (width, 3 * width), (3 * width, width)]
        )
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y = self.norm(x)
        output: torch.Tensor = x + self.dropout(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))
        return output


class Attention(nn.Module):
    """Causal attention with several heads, as many of them as `query` puts out, so that heads can be on other workers."""

    def __init__(self, options: Gpt) -> None:
        super().__init__()
        self.head_width = options.width // options.heads
        self.query, self.key, self.value, self.out = (nn.Linear(options.width, options.width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return y


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Turns pairs of values (batch, heads, length, width) by angles that grow with the place: RoPE (Su et al. 2021)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(length, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


TASK = TinyGpt()
