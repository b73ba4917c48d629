"""Count what the backward pass keeps: a BERT-Large layer by scheme and piece by piece, and each op against PyTorch's.

    python -m benchmarks.memory              prints the tables
    python -m benchmarks.memory --output     and writes benchmarks/results/memory_<date>.md and the picture beside it

Counted with saved-tensor hooks on a CPU, each storage once, activations in bfloat16: exact numbers, the same on every machine.
PyTorch on a CPU keeps dropout masks in the activations' type, on a GPU in one byte an element, which "1-byte masks" computes.
"""

from __future__ import annotations

import argparse
import datetime
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tempo
from models.bert import BertForPreTraining, BertLayer
from models.config import BertConfig

RESULTS = Path(__file__).parent / "results"
LENGTHS = (128, 512)
HIDDEN, INTERMEDIATE, HEADS = 1024, 4096, 16
SCHEMES: dict[str, dict[str, object]] = {
    "torch (the paper's baseline)": {"layers": "torch"},
    "in-place GELU alone": {"inplace_gelu": True},
    "in-place LayerNorm alone": {"inplace_layer_norm": True},
    "dropout recomputation alone": {"dropout_recomputation": True},
    "tempo": {"layers": "tempo"},
    "tempo, 4 side bits": {"layers": "tempo", "gelu_side_bits": 4},
}
CHECKPOINTING = "torch, activation checkpointing"


def kept_bytes(length: int, batch: int, num_layers: int, masters: torch.dtype = torch.bfloat16, **fields: object) -> int:
    """Bytes that BERT-Large with `num_layers` layers keeps in bfloat16; its vocabulary is small, which adds nothing per layer."""
    config = BertConfig.preset("bert_large", num_layers=num_layers, vocab_size=64, **fields)
    model = BertForPreTraining(config, compute_dtype=torch.bfloat16).to(masters)
    positions = torch.zeros(batch, 1, dtype=torch.int64)
    kept = tempo.saved_bytes(
        model,
        torch.zeros(batch, length, dtype=torch.int64),
        attention_mask=torch.ones(batch, length, dtype=torch.bool),
        labels=positions,
        masked_positions=positions,
        rng=tempo.make_rng(1),
    )
    return kept.total_bytes


def bytes_of_one_more_layer(length: int, batch: int, **fields: object) -> int:
    """What two layers keep, less what one does."""
    return kept_bytes(length, batch, 2, **fields) - kept_bytes(length, batch, 1, **fields)  # type: ignore[arg-type]


def checkpointed_bytes_per_token(length: int) -> float:
    """The same under activation checkpointing; counted from two batch sizes, as the generator's state is kept once per layer."""
    one, two = (bytes_of_one_more_layer(length, batch, layers="torch", activation_checkpointing=True) for batch in (1, 2))
    return (two - one) / length


def saved_by_one_byte_masks(length: int, fields: dict[str, object]) -> int:
    """Bytes per token between 2-byte and 1-byte dropout masks: two of the hidden size, one of the probabilities."""
    recomputes = fields.get("layers") == "tempo" or fields.get("dropout_recomputation")
    return 0 if recomputes else 2 * HIDDEN + HEADS * length


def measure_schemes() -> dict[str, list[float]]:
    """Scheme -> bytes per token at S = 128 and 512, with the masks as on a CPU, then as on a GPU."""
    values = {}
    for name, fields in SCHEMES.items():
        measured = [bytes_of_one_more_layer(length, 1, **fields) / length for length in LENGTHS]
        values[name] = measured + [m - saved_by_one_byte_masks(n, fields) for m, n in zip(measured, LENGTHS, strict=True)]
    values[CHECKPOINTING] = 2 * [checkpointed_bytes_per_token(length) for length in LENGTHS]
    return values


def measure_pieces(length: int) -> dict[str, list[float]]:
    """Submodule of a layer -> bytes per token in torch and in tempo mode."""
    pieces: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for column, mode in enumerate(("torch", "tempo")):
        layer = BertLayer(BertConfig.preset("bert_large", num_layers=1, layers=mode), 1).bfloat16()
        x = torch.randn(1, length, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        for item in tempo.saved_bytes(layer, x, torch.ones(1, length, dtype=torch.bool), tempo.make_rng(1)).items:
            pieces[item.module][column] += item.num_bytes / length
    pieces["together"] = [sum(values[column] for values in pieces.values()) for column in (0, 1)]
    return dict(pieces)


class _Running(nn.Module):
    """Runs a function on fresh activations; the parameters of `owner` do not count as kept."""

    def __init__(self, run: Callable[[], object], owner: nn.Module) -> None:
        super().__init__()
        self.run, self.owner = run, owner

    def forward(self) -> object:
        return self.run()


def measure_ops(rows: int = 128) -> dict[str, list[float]]:
    """Op -> bytes per row that it keeps, PyTorch's and Tempo's."""

    def activation(width: int) -> Tensor:
        # The result of an operation, as in a model: in-place layers may write over it.
        return torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True).add(0)

    kwargs = {"dtype": torch.bfloat16}
    owner = nn.ModuleDict(
        {
            "norm": nn.LayerNorm(HIDDEN, **kwargs),
            "inplace": tempo.InplaceLayerNorm(HIDDEN, **kwargs),
            "fused": tempo.DropoutAddLayerNorm(HIDDEN, p=0.1, site=0, **kwargs),
            "first": nn.Linear(HIDDEN, INTERMEDIATE, **kwargs),
            "second": nn.Linear(INTERMEDIATE, HIDDEN, **kwargs),
            "mlp": tempo.MLP(HIDDEN, INTERMEDIATE, **kwargs),
        }
    )
    owner.register_parameter("bias", nn.Parameter(torch.zeros(HIDDEN, **kwargs)))
    norm, inplace, fused, mlp, bias = owner["norm"], owner["inplace"], owner["fused"], owner["mlp"], owner.bias
    first, second, rng = owner["first"], owner["second"], tempo.make_rng(1)
    runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "GELU, 1 bit": (
            lambda: F.gelu(activation(INTERMEDIATE)),
            lambda: tempo.gelu(activation(INTERMEDIATE), inplace=True),
        ),
        "GELU, 4 bits": (
            lambda: F.gelu(activation(INTERMEDIATE)),
            lambda: tempo.gelu(activation(INTERMEDIATE), side_bits=4, inplace=True),
        ),
        "LayerNorm": (lambda: norm(activation(HIDDEN)), lambda: inplace(activation(HIDDEN))),
        "bias, dropout, residual, LayerNorm": (
            lambda: norm(F.dropout(activation(HIDDEN) + bias, 0.1) + activation(HIDDEN)),
            lambda: fused(activation(HIDDEN), activation(HIDDEN), rng, bias),
        ),
        "MLP: Linear, GELU, Linear": (
            lambda: second(F.gelu(first(activation(HIDDEN)))),
            lambda: mlp(activation(HIDDEN)),
        ),
    }
    return {name: [tempo.saved_bytes(_Running(run, owner)).total_bytes / rows for run in pair] for name, pair in runs.items()}


def table(first: str, heads: list[str], values: dict[str, list[float]]) -> list[str]:
    lines = [f"| {first} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(f'{value:,.0f}' for value in row)} |" for name, row in values.items()]


def report(schemes: dict[str, list[float]]) -> str:
    lengths = [f"S = {length}" for length in LENGTHS]
    lines = [
        "# What the backward pass keeps",
        "",
        f"- PyTorch {torch.__version__}, bfloat16 activations, counted on a CPU; date: {datetime.date.today().isoformat()}",
        "- command: `python -m benchmarks.memory --output`",
        "",
        "## One more BERT-Large layer, bytes per token",
        "",
        *table("scheme", [*lengths, *(f"{head}, 1-byte masks (computed)" for head in lengths)], schemes),
    ]
    for length in LENGTHS:
        lines += ["", f"## Piece by piece, S = {length}, bytes per token", ""]
        lines += table("kept in", ["torch", "tempo"], measure_pieces(length))
    lines += [
        "",
        f"## Op by op, bytes per row (hidden size {HIDDEN}, intermediate size {INTERMEDIATE})",
        "",
        "The output counts where the op keeps it; the next layer keeps it anyway.",
        "",
        *table("op", ["PyTorch", "tempo"], measure_ops()),
    ]
    return "\n".join(lines) + "\n"


def draw(schemes: dict[str, list[float]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
    for column, (axis, length) in enumerate(zip(axes, LENGTHS, strict=True)):
        bars = axis.barh(list(schemes), [row[column + 2] / 1000 for row in schemes.values()], color="#3b6ea5")
        axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.set_title(f"S = {length}")
        axis.margins(x=0.12)
        if column == 0:  # the second shares it
            axis.invert_yaxis()
    figure.supxlabel("kB kept per token by a BERT-Large layer (16 bit, 1-byte masks)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", nargs="?", const="", metavar="FILE", help="write Markdown; default name: in benchmarks/results/"
    )
    arguments = parser.parse_args()
    schemes = measure_schemes()
    text = report(schemes)
    print(text, end="")
    if arguments.output is not None:
        path = Path(arguments.output or RESULTS / f"memory_{datetime.date.today().isoformat()}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = path.with_suffix(".png")
        path.write_text(f"{text}\n![Bytes kept per token, by scheme]({picture.name})\n", encoding="utf-8")
        draw(schemes, picture)
        print(f"written to {path} and {picture}")


if __name__ == "__main__":
    main()
