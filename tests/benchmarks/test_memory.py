from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory


def test_masks_and_checkpoints_are_counted() -> None:
    assert memory.checkpointed_bytes_per_token(128) == 2048
    assert memory.saved_by_one_byte_masks(128, {"layers": "torch"}) == 4096
    assert memory.saved_by_one_byte_masks(512, {"inplace_gelu": True}) == 2048 + 16 * 512
    assert memory.saved_by_one_byte_masks(128, {"layers": "tempo"}) == 0


def test_each_op_keeps_what_its_documentation_says() -> None:
    kept = memory.measure_ops()
    assert kept["GELU, 1 bit"] == [8192, 8192 + 512]
    assert kept["GELU, 4 bits"] == [8192, 8192 + 2048]
    assert kept["MLP: Linear, GELU, Linear"] == [2048 + 2 * 8192, 2048 + 8192]
    for name in ("LayerNorm", "bias, dropout, residual, LayerNorm"):
        assert kept[name][1] == pytest.approx(2048 + 4 + 32, abs=2)


def test_the_pieces_add_up() -> None:
    pieces = memory.measure_pieces(32)
    for column in (0, 1):
        assert sum(row[column] for name, row in pieces.items() if name != "together") == pytest.approx(pieces["together"][column])


def test_the_report_and_its_picture_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = {"torch": [4.0, 5.0, 3.0, 4.0], "tempo": [2.0, 3.0, 2.0, 3.0]}
    monkeypatch.setattr(memory, "measure_schemes", lambda: schemes)
    target = tmp_path / "memory.md"
    monkeypatch.setattr("sys.argv", ["memory", "--output", str(target)])
    memory.main()
    assert "| tempo | 2 | 3 | 2 | 3 |" in target.read_text()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
