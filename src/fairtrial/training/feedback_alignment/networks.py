"""The two small networks the trial trains: residual blocks on maps, and transformer layers on patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.training.networks import seeded


class ResidualBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), with a strided 1 x 1 convolution on x where the shape changes.

    GroupNorm with groups of four channels, so that examples do not mix.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(outputs // 4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(outputs // 4, outputs)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, outputs, H / stride, W / stride)."""
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.skip(x) + hidden)


def resnet8(
    channels: int = 1, classes: int = 10, *, widths: tuple[int, int] = (16, 32), blocks: int = 8, stride: int = 1,
    seed: int = 0,
) -> nn.Sequential:  # fmt: skip
    """Return a network of eight residual blocks, half of each width, for images (B, channels, H, W).

    ``stride`` is that of the first convolution, which covers ``max(3, stride)`` pixels a side: the maps of the first
    half are that much smaller than the images, and those of the second half again by 2.

    >>> resnet8()(torch.ones(2, 1, 14, 14)).shape
    torch.Size([2, 10])
    """
    if blocks < 2 or blocks % 2 or any(width % 4 for width in widths):
        raise InputError(f"blocks={blocks}, widths={widths}: an even number of blocks, of multiples of 4 channels")

    def build() -> nn.Sequential:
        first, second = widths
        half = blocks // 2
        layers = [ResidualBlock(first, first) for _ in range(half)]
        layers += [ResidualBlock(first if i == 0 else second, second, stride=2 if i == 0 else 1) for i in range(half)]
        first_conv = nn.Conv2d(channels, first, max(3, stride), stride, padding=1 if stride < 3 else 0, bias=False)
        stem = nn.Sequential(first_conv, nn.GroupNorm(first // 4, first), nn.ReLU())
        return nn.Sequential(stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(second, classes))

    return seeded(seed, build)  # type: ignore[return-value]


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with heads of 16 features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, d) of tokens (B, T, d)."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 16)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, 16)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches and a class token through pre-norm transformer layers; the class token's features to logits."""

    def __init__(self, channels: int, size: int, classes: int, *, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(TransformerLayer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, C, size, size)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # (B, T, d)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.position
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens[:, 0]))


def vit4(
    channels: int = 1, size: int = 28, classes: int = 10, *, patch: int = 7, width: int = 64, layers: int = 4,
    seed: int = 0,
) -> VisionTransformer:  # fmt: skip
    """Return a vision transformer of four layers for images (B, channels, size, size).

    >>> vit4()(torch.ones(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if size % patch or width % 16:
        raise InputError(f"size={size}, patch={patch}, width={width}: whole patches, and a multiple of 16 features")

    def build() -> VisionTransformer:
        return VisionTransformer(channels, size, classes, patch=patch, width=width, layers=layers)

    return seeded(seed, build)  # type: ignore[return-value]
