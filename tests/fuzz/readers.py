"""Every reader of files with a file that it takes, and ways to spoil that file.

The tests (test_readers.py) spoil them at random within CI; `python -m tests.fuzz.run` does the same under a
coverage-guided fuzzer, for as long as one likes.
"""

import copy
import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save

from layerwave.calibration import Calibration, CalibrationSettings
from layerwave.calibration.conversations import read_conversations, read_prompts
from layerwave.commands.jobs import read_jobs
from layerwave.decoding.distill import _Record as Distilled
from layerwave.decoding.evaluation import EvaluatedDraft, Evaluation, EvaluationSettings, Row, Run
from layerwave.decoding.journal import Journal
from layerwave.decoding.questions import read_questions
from layerwave.drafts.config import DraftConfig
from layerwave.drafts.metrics import read_metrics
from layerwave.errors import LayerwaveError
from layerwave.files.identity import require_same
from layerwave.files.reading import read_object
from layerwave.interop import StateFiles
from layerwave.interop.importing import _describe
from layerwave.selection import Selection
from layerwave.targets.checkpoint import TensorFiles, require_proportion
from layerwave.targets.config import DecoderConfig
from tests.token_samples import planted_tokens

GOLDEN = Path(__file__).parents[1] / "targets" / "golden"
N, B, D = 4, 4, 16

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e308, float("nan"), float("inf"),
    "", "x", "..", "../x", "/etc/hostname", "a\0b", "\ud800", "F8_E4M3", "BOOL", [], {}, [0], [[]], {"x": 0}, [0, 0],
    "7" * 50, [1] * 99,
)  # fmt: skip
"""What stands in place of a value."""


@dataclass(frozen=True)
class Reader:
    """name: of the file. content: bytes that are taken. read: called with the file's path."""

    name: str
    content: bytes
    read: Callable[[Path], object]
    beside: tuple[Path, ...] = ()
    """Files that have to lie beside it."""

    def attempt(self, content: bytes, folder: Path) -> str | None:
        """Reads this content; the message of the refusal, or None. Whatever else is raised is a fault."""
        path = folder / self.name
        path.write_bytes(content)
        for file in self.beside:
            if not (folder / file.name).exists():
                shutil.copy(file, folder)
        try:
            self.read(path)
        except LayerwaveError as error:
            return str(error)
        return None


def spoiled(reader: Reader, changes: Sequence[tuple[int, int]]) -> bytes:
    """The reader's content with values put in the place of others: in its JSON, in each of its lines, its YAML, or the
    header of its tensors. A change is (which value, which junk or fate)."""
    content = reader.content
    if reader.name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", content[:8])
        header = json.dumps(_changed(json.loads(content[8 : 8 + length]), changes)).encode()
        return struct.pack("<Q", len(header)) + header + content[8 + length :]
    if reader.name.endswith(".npy"):
        return _spoiled_npy(content, changes)
    if reader.name.endswith(".yaml"):
        return yaml.safe_dump(_changed(yaml.safe_load(content), changes)).encode("utf-8", "replace")
    if reader.name.endswith(".json"):
        return json.dumps(_changed(json.loads(content), changes)).encode()
    lines = _changed([json.loads(line) for line in content.splitlines()], changes)
    return "".join(json.dumps(line) + "\n" for line in (lines if isinstance(lines, list) else [lines])).encode()


def decoded(readers: Sequence[Reader], data: bytes) -> tuple[int, bytes]:
    """What an input of the fuzzer stands for: a reader, and content for it.

    The first byte chooses the reader, the second how its file is spoiled: bytes as they are, bytes put over the good
    ones, or values put in place of others.
    """
    number, mode, data = (*data[:2], data[2:]) if len(data) >= 2 else (0, 0, data)
    number %= len(readers)
    good = readers[number].content
    if mode % 4 == 0:
        return number, data
    if mode % 4 == 1 and data:
        start = data[0] * len(good) // 256
        return number, good[:start] + data[1:] + good[start + len(data) - 1 :]
    changes = [(data[i] * 256 + data[i + 1], data[i + 2]) for i in range(0, len(data) - 2, 3)]
    return number, spoiled(readers[number], changes[:4])


def _spoiled_npy(content: bytes, changes: Sequence[tuple[int, int]]) -> bytes:
    header = {"descr": "<f4", "fortran_order": False, "shape": (N, 8, D)}
    values = [*JUNK, (2**40,), (N, 2**50, D), (0, 2**62), "|O", "<U9", [("a", "<f4")], "<f8", "<i8", "<c16"]
    for place, value in changes:
        header[[*header][place % 3]] = values[value % len(values)]
    text = f"{header!r}\n".encode("latin1", "replace")
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + content[-4 * N * 8 * D :]


def _changed(tree: Any, changes: Sequence[tuple[int, int]]) -> Any:
    root = [copy.deepcopy(tree)]
    for place, value in changes:
        slots = [*_slots(root, lambda: None)]
        holder, key, store = slots[place % len(slots)]
        fate = value % (len(JUNK) + 2)
        if fate < len(JUNK):
            holder[key] = copy.deepcopy(JUNK[fate])
        elif holder is not root and fate == len(JUNK):
            del holder[key]
        elif isinstance(holder, dict):
            holder[f"{key}x"] = holder[key]
        elif holder is not root:
            holder.append(copy.deepcopy(holder[key]))
        store()
    return root[0]


def _slots(node: Any, store: Callable[[], None]) -> Iterator[tuple[Any, Any, Callable[[], None]]]:
    """Every value of a tree as (what holds it, under which key, what to call when it was changed)."""
    for key, item in (
        [*node.items()] if isinstance(node, dict) else [*enumerate(node)] if isinstance(node, list) else []
    ):
        yield node, key, store
        yield from _slots(item, store)
        if isinstance(item, str) and item[:1] in ("{", "["):  # JSON within JSON: headers of artifacts
            yield from _slots_of_text(node, key, store)


def _slots_of_text(node: Any, key: Any, store: Callable[[], None]) -> Iterator[tuple[Any, Any, Callable[[], None]]]:
    try:
        tree = json.loads(node[key])
    except ValueError:
        return

    def written() -> None:
        node[key] = json.dumps(tree)
        store()

    yield from _slots(tree, written)


def _calibration() -> Calibration:
    rng = np.random.default_rng(0)
    tokens = planted_tokens(N, (1, 2))
    names = np.unique(tokens.samples)
    lengths = np.full(len(names), 40)
    kept = np.stack([lengths // 2] * 2 + [lengths] * 2)
    return Calibration(
        sums=rng.standard_normal((4, N, B, tokens.embeddings.shape[1])).astype(np.float32),
        counts=(kept // B).sum(axis=1),
        curves=rng.random((4, len(names), N)).astype(np.float32),
        kept=kept,
        lengths=lengths,
        sinks=np.full(len(names), 2),
        fingerprints=names,
        settings=CalibrationSettings(block=B, replicates=0),
        target_name="tiny",
        target_fingerprint="0123",
        target_dtype="float32",
        tallies={"rows": 9},
        tokens=tokens,
    )


def _bytes_of(save_to: Callable[[Path], None], folder: Path) -> bytes:
    path = folder / "made"
    save_to(path)
    content = path.read_bytes()
    path.unlink()
    return content


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _states(path: Path) -> object:
    return StateFiles([path], N, numbering="output", final_state="pre_norm")[0]


def _checkpoint(path: Path) -> object:
    tensors = TensorFiles.open(path.parent)
    require_proportion(DecoderConfig.from_hf(json.loads((GOLDEN / "qwen3" / "config.json").read_text())), tensors)
    return [tensors.read(name) for name in tensors.files]


def _index(path: Path) -> object:
    return TensorFiles.open(path.parent)


def _hugging_face_config(path: Path) -> object:
    config = DecoderConfig.from_hf(read_object(path, "mend it"), has_head=True)
    if config.head_dim > 1024 or config.rope.depends_on_length:
        return config  # what a checkpoint would have to bear out first; what jax computes
    return config.rope.frequencies(config.head_dim)


def all_readers(folder: Path) -> tuple[Reader, ...]:
    """All of them; `folder` is for files that are made on the way."""
    rng = np.random.default_rng(0)
    turns = [{"role": "user", "content": "Who?"}, {"from": "gpt", "value": "I."}]
    chats = [{"conversations": turns}, {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, {"text": "words"}]
    asked = [{"question_id": i, "category": "qa", "turns": ["Who?", "Why?"], "reference": []} for i in (1, "b")]
    states = rng.standard_normal((N, 8, D)).astype(np.float32)
    given = Calibration.from_states(rng.standard_normal((N, B, D)))
    beams = ((((0,), 0.5), ((2,), 0.25)), (((0, 2), 1.5), ((1, 2), 1.0)))
    chosen = Selection("elsi", (0, 2), 1.5, N, "abc", settings={"beam": 2, "alpha": 1.0}, beams=beams,
                       parents=(((), ()), ((0, 1), (1,))))  # fmt: skip
    row = Row(5, 4, (1, 2, 0), 6, 0.5, {"end_token": 1}, 0, ((0, 3),), "")
    settings = EvaluationSettings(nodes=(4,), temperatures=(0.0,), depth=2, top_k=2, max_new_tokens=8)
    evaluation = Evaluation("t", "f", "float32", "cpu", (EvaluatedDraft("d", (1, 2), "e"),), settings, "q", (1, "b"),
                            ("qa", "qa"), (Run(None, None, 0.0, (row, row)), Run("d", 4, 0.0, (row, row))))  # fmt: skip
    run = {"schema": "x", "seed": 0}
    record = {"row": {"id": "a", "conversations": turns[:1], "truncated": 0}, "answers": 1, "tokens": 3, "ended": ""}
    jobs = [{"target": "mini", "conversations": __file__, "out": "a.safetensors", "rho": 0.5, "dtype": "bfloat16"}]
    golden_folders = sorted(GOLDEN.iterdir())
    golden = (GOLDEN / "qwen3" / "model.safetensors").read_bytes()
    index = {"weight_map": {"model.norm.weight": "shard.safetensors"}}
    shard = folder / "shard.safetensors"
    shard.write_bytes(save({"model.norm.weight": np.ones(4, np.float32)}))
    draft = {"layers": [1], "num_target_layers": 4, "target_hidden_size": 8, "hidden_size": 8, "intermediate_size": 8,
             "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 9, "draft_vocab_size": 5,
             "max_positions": 32, "norm_eps": 1e-6, "rope": {"theta": 1e4}, "norm_before_residual": False,
             "norm_before_fc": False, "fc_norm": False, "norm_output": False}  # fmt: skip
    foreign = {"model_type": "llama", "num_hidden_layers": 1, "eagle_config": {"layer_ids": [1, 2]}, "fc_norm": True,
               "layerwave": {"version": "", "consumer": "", "num_target_layers": 4, "ids_read_as": "output",
                             "layers": [1], "target": {"name": "", "fingerprint": ""},
                             "vocabulary_fingerprint": ""}}  # fmt: skip
    stacked = save(
        {"hidden_states": states.swapaxes(0, 1).copy(), "token_ids": np.arange(8)}, {"layerwave.layers": "[0, 1, 2]"}
    )
    return (
        Reader("rows.jsonl", _lines(*chats), read_conversations),
        Reader("rows.json", json.dumps(chats).encode(), read_conversations),
        Reader("prompts.jsonl", _lines({"prompt": "Who?"}, {"turns": ["a", "b"]}, *chats), read_prompts),
        Reader("questions.jsonl", _lines(*asked), read_questions),
        Reader("selection.json", chosen.to_json().encode(), Selection.load),
        Reader("evaluation.json", _bytes_of(evaluation.save, folder), Evaluation.load),
        Reader("out.partial", _lines(run, [record]), lambda p: Journal(p, run).resume(tuple[Distilled, ...])),
        Reader("metrics.jsonl", _lines({"step": 1, "layers": [1]}), lambda path: read_metrics(path.parent)),
        Reader("run.json", json.dumps({"version": 1, **run}).encode(), lambda p: require_same(p, "x", 1, {"seed": 0})),
        Reader("jobs.yaml", yaml.safe_dump(jobs).encode(), read_jobs),
        Reader("cal.safetensors", _bytes_of(_calibration().save, folder), Calibration.load),
        Reader("given.safetensors", _bytes_of(given.save, folder), Calibration.load),
        Reader("states.safetensors", save({"states": states, "mask": np.ones(8, bool)}), _states),
        Reader("hs_0.safetensors", stacked, lambda path: StateFiles([path], N)[0]),
        Reader("states.npy", _npy(states), _states),
        Reader("model.safetensors", golden, _checkpoint),
        Reader("model.safetensors.index.json", json.dumps(index).encode(), _index, (shard,)),
        *(Reader(f"{g.name}.json", (g / "config.json").read_bytes(), _hugging_face_config) for g in golden_folders),
        Reader("draft.json", json.dumps(draft).encode(), lambda p: DraftConfig.from_json(read_object(p, "mend it"))),
        Reader("foreign.json", json.dumps(foreign).encode(), lambda p: _describe(read_object(p, "mend it"))),
    )  # fmt: skip
