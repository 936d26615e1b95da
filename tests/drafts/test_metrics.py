"""What a training run writes down step by step."""

import struct

import pytest

from layerwave.drafts.metrics import MetricsLog, read_metrics


def records(folder):
    """Payloads of an event file: each stands behind its length and a checksum, and before another one."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsLog(tmp_path, 0, tensorboard=True) as log:
        log.write(1, (2, 5), "train", {"losses": [1.5, 2.5], "tau_greedy": 1.25})
        log.write(2, (2, 5), "held_out", {"tau_greedy": 1.75})
    text = records(tmp_path / "tensorboard")
    for tag, value in (
        (b"train/losses0/2-5", 1.5),
        (b"train/losses1/2-5", 2.5),
        (b"train/tau_greedy/2-5", 1.25),
        (b"held_out/tau_greedy/2-5", 1.75),
    ):
        assert any(tag in record and struct.pack("<f", value) in record for record in text), tag
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_without_the_extra_nothing_is_written_beside_the_lines(tmp_path):
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        log.write(1, (3,), "train", {"losses": [1.0]})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
