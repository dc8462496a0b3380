"""A block drafter: all B tokens of a block in one pass, from the target's own hidden states of what came before.

Queries are the anchor token and B - 1 masks, at their positions; every layer attends to the projected features of the
last tokens before the anchor and, in both directions, to the block. Embedding and head are the target's, frozen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.causal_lm.layout import find_blocks
from fairtrial.errors import InputError
from fairtrial.options import checked_count


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a block drafter.

    Attributes
    ----------
    hidden_size, vocab_size : of the target.
    block_size : B, tokens a block.
    context : C, tokens before the anchor that are looked at.
    layers : target blocks whose outputs are the features.
    n_layers, n_heads, intermediate_size : of the drafter.
    draft_vocab : tokens that can be drafted, ``None`` = all.
    rope_theta : base of the rotary positions.
    """

    hidden_size: int
    vocab_size: int
    block_size: int
    context: int
    layers: tuple[int, ...]
    n_layers: int
    n_heads: int
    intermediate_size: int
    draft_vocab: int | None
    rope_theta: float = 10_000.0


class BlockDrafter(nn.Module):
    """Drafts blocks for one target.

    Make one with :meth:`for_target`, train it with :class:`~fairtrial.lm.drafting.training.DrafterTrainer`.

    Attributes
    ----------
    config : :class:`DrafterConfig`.
    token_ids : (V',) int64, the target's ids of what can be drafted.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> drafter = BlockDrafter.for_target(tiny_causal_lm(layers=4)[0], block_size=4)
    >>> features, tokens = torch.randn(2, 10, 3 * 32), torch.randint(64, (2, 10))
    >>> drafter(features, tokens, torch.tensor([[5, 9], [3, 8]])).shape
    torch.Size([2, 2, 4, 64])
    """

    token_ids: torch.Tensor

    def __init__(self, config: DrafterConfig, embedding: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor):
        super().__init__()
        self.config = config
        d = config.hidden_size
        # Of the target, and so neither trained nor saved.
        self.register_buffer("embedding", embedding.detach(), persistent=False)  # (V, d)
        self.register_buffer("token_ids", token_ids, persistent=True)
        self.register_buffer("head", head.detach(), persistent=False)  # (V', d)
        self.project = nn.Linear(len(config.layers) * d, d, bias=False)
        self.feature_norm = nn.RMSNorm(len(config.layers) * d)
        self.mask = nn.Parameter(torch.randn(config.block_size - 1, d) * embedding.detach().float().std())
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(d)

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        block_size: int = 8,
        n_layers: int = 2,
        context: int = 64,
        layers: Sequence[int] | None = None,
        draft_vocab: int | Sequence[int] | None = None,
    ) -> BlockDrafter:
        """Return an untrained drafter for a causal language model of transformers.

        Parameters
        ----------
        target
            The model whose tokens are drafted.
        block_size
            B, at least 2.
        n_layers
            Of the drafter.
        context
            Tokens before the anchor that it looks at.
        layers
            Blocks of the target whose outputs are its features; ``None`` = at 1/4, 1/2 and 3/4 of the depth.
        draft_vocab
            What can be drafted, for a small head: ids, or how many, which training chooses; ``None`` = all.
        """
        blocks = find_blocks(target)[1]
        depth = len(blocks)
        chosen = (
            tuple(sorted({max(0, round(depth * share) - 1) for share in (0.25, 0.5, 0.75)}))
            if layers is None
            else tuple(checked_count(layer, "layers", least=-depth, most=depth - 1) % depth for layer in layers)
        )
        if not chosen:
            raise InputError(f"layers=[]: give some of the target's blocks, 0 to {depth - 1}")
        for name, value, least in (("block_size", block_size, 2), ("context", context, 1), ("n_layers", n_layers, 1)):
            checked_count(value, name, least=least)
        embedding = target.get_input_embeddings().weight
        head = target.get_output_embeddings().weight
        V, d = head.shape
        if draft_vocab is None or isinstance(draft_vocab, Real):
            ids = torch.arange(V if draft_vocab is None else checked_count(draft_vocab, "draft_vocab", most=V))
        else:
            given: Any = draft_vocab.tolist() if hasattr(draft_vocab, "tolist") else draft_vocab
            ids = torch.tensor(sorted({checked_count(i, "draft_vocab", least=0, most=V - 1) for i in given}))
            if not len(ids):
                raise InputError(f"draft_vocab=[]: give ids of the target's tokens, 0 to {V - 1}")
        n_heads = next(n for n in range(max(1, d // 64), 0, -1) if d % n == 0 and d // n % 2 == 0)
        config = DrafterConfig(
            hidden_size=d, vocab_size=V, block_size=block_size, context=context, layers=chosen, n_layers=n_layers,
            n_heads=n_heads, intermediate_size=2 * d, draft_vocab=None if len(ids) == V else len(ids),
        )  # fmt: skip
        drafter = cls(config, embedding, head[ids.to(head.device)], ids)
        return drafter.to(embedding.device)

    def set_vocabulary(self, target: Any, ids: torch.Tensor) -> None:
        """Let other tokens (V',) be drafted."""
        head = target.get_output_embeddings().weight.detach()
        self.token_ids = ids.to(self.token_ids.device)
        self.head = head[ids.to(head.device)]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.project.weight.device

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return draft logits (S, A, B, V') of blocks that begin after anchors.

        Parameters
        ----------
        features
            (S, T, 3 d), the target's hidden states of S sequences.
        tokens
            (S, T) int64.
        anchors
            (S, A) int64, the places of the anchor tokens, at least 1; features before them are seen, the last C.
        """
        S, A = anchors.shape
        B, T = self.config.block_size, features.shape[1]
        if features.shape[2] != self.project.in_features:
            raise InputError(
                f"features are {features.shape[2]} wide, the drafter was made for {self.project.in_features}: other "
                "layers or another target"
            )
        if not 1 <= int(anchors.min()) <= int(anchors.max()) < T or tokens.shape != features.shape[:2]:
            raise InputError(
                f"anchors reach from {int(anchors.min())} to {int(anchors.max())}, tokens have shape "
                f"{tuple(tokens.shape)}: features of {T} tokens need anchors from 1 to {T - 1} and tokens of that shape"
            )
        check_ids("tokens", tokens, len(self.embedding))
        context = self.project(self.feature_norm(features.float()))  # (S, T, d)
        first = F.embedding(tokens.gather(1, anchors), self.embedding).float()  # (S, A, d)
        x = torch.cat([first[:, :, None], self.mask.expand(S, A, -1, -1)], 2)  # (S, A, B, d)
        at = torch.arange(T, device=anchors.device)
        seen = (at < anchors[..., None]) & (at >= anchors[..., None] - self.config.context)  # (S, A, T)
        places = anchors[..., None] + torch.arange(B, device=anchors.device)  # (S, A, B)
        for block in self.blocks:
            x = block(x, context, seen, places, at)
        return F.linear(self.norm(x), self.head.to(x.dtype))

    @torch.inference_mode()
    def draft(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (B, V') of the block after the last of ``tokens`` (T,), given features (T - 1, 3 d)."""
        seen = min(len(features), self.config.context)
        features = features[-seen:]
        padded = torch.cat([features, features.new_zeros(1, features.shape[1])])[None]  # the anchor's are not known yet
        last = torch.tensor([[seen]], device=tokens.device)
        return self(padded, tokens[None, -seen - 1 :], last)[0, 0]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``; embedding and head stay with the target."""
        from safetensors.torch import save_file

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file({name: t.contiguous() for name, t in self.state_dict().items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(asdict(self.config), indent=1))

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Any) -> BlockDrafter:
        """Read what :meth:`save_pretrained` wrote, for the same target.

        Raises
        ------
        InputError
            No drafter there, or one for a target of another width or vocabulary.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(folder)
        try:
            told = json.loads((path / "config.json").read_text())
            config = DrafterConfig(**{**told, "layers": tuple(told["layers"])})
            state = load_file(path / "model.safetensors")
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: no drafter in it: {error}") from None
        head = target.get_output_embeddings().weight
        if (config.vocab_size, config.hidden_size) != tuple(head.shape):
            raise InputError(
                f"{path}: a drafter for {config.vocab_size} tokens and width {config.hidden_size}; the target has "
                f"{head.shape[0]} and {head.shape[1]}"
            )
        ids = state["token_ids"]
        drafter = cls(config, target.get_input_embeddings().weight, head[ids.to(head.device)], ids)
        drafter.load_state_dict(state)
        return drafter.to(head.device)


def check_ids(name: str, ids: torch.Tensor, vocabulary: int) -> None:
    """Refuse what are no token ids of a vocabulary."""
    if ids.is_floating_point() or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise InputError(f"{name} are {ids.dtype} from {ids.min()} to {ids.max()}: give ids from 0 to {vocabulary - 1}")


class _Block(nn.Module):
    """Pre-norm attention to context and block, then a gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.heads, self.theta = config.n_heads, config.rope_theta
        self.attention_norm, self.mlp_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.kv = nn.Linear(d, 2 * d, bias=False)
        self.up = nn.Linear(d, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, d, bias=False)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, seen: torch.Tensor, places: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Return x (S, A, B, d) after the block."""
        S, A, B, d = x.shape
        T, H = context.shape[1], self.heads
        h = self.attention_norm(x)
        q = rotated(self.q(h).view(S, A, B, H, -1), places, self.theta)
        k, v = self.kv(h).view(S, A, B, H, 2, -1).unbind(4)
        k = rotated(k, places, self.theta)
        ck, cv = self.kv(context).view(S, T, H, 2, -1).unbind(3)
        ck = rotated(ck, at.expand(S, T), self.theta)
        scale = q.shape[-1] ** -0.5
        outside = torch.einsum("sabhe,sthe->sahbt", q, ck).masked_fill(~seen[:, :, None, None], float("-inf"))
        inside = torch.einsum("sabhe,sache->sahbc", q, k)
        p = (torch.cat([outside, inside], -1) * scale).softmax(-1)
        y = torch.einsum("sahbt,sthe->sabhe", p[..., :T], cv) + torch.einsum("sahbc,sache->sabhe", p[..., T:], v)
        x = x + self.o(y.reshape(S, A, B, d))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """Return x (..., H, e) turned by rotary positions (...)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = places[..., None, None].float() * frequency  # (..., 1, e / 2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
