"""A target: decoder, tokenizer, and who they are, from one directory or hub id."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from layerwave.errors import LayerwaveError
from layerwave.files.reading import inside, read_object, shown
from layerwave.targets.checkpoint import TensorFiles, load_decoder, require_proportion
from layerwave.targets.config import DecoderConfig
from layerwave.targets.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DTypeName = Literal["float32", "bfloat16"]
MINI = "mini"
MINI_FOLDER = Path(str(resources.files("layerwave"))) / "assets" / "mini"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_A_TARGET = "a target is a directory in Hugging Face format; download it again"
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class Target:
    """A loaded target model.

    name: what the user asked for. fingerprint: hexadecimal digest of configuration, tokenizer and tensors; equal for
    equal files wherever they lie.
    """

    name: str
    config: DecoderConfig
    decoder: Decoder
    tokenizer: "PreTrainedTokenizerFast"
    fingerprint: str
    mesh: Mesh | None = None
    """Devices that share the parameters; None: all on one."""


def load_target(name: str | Path, dtype: str = "float32", mesh: Mesh | None = None) -> Target:
    """Loads a target for evaluation.

    Args:
      name: a directory in Hugging Face format, a hub id (the only case that uses the network), or `mini`, the bundled
        model.
      dtype: of parameters and activations; norms, rotary angles and softmax are float32 in any case.
      mesh: of devices to share the parameters out to (see `make_mesh`); by default they all lie on one.

    Raises:
      LayerwaveError: nothing there, unsupported architecture, a checkpoint that does not fit its config, no tokenizer.
    """
    if dtype not in ("float32", "bfloat16"):
        raise LayerwaveError(f"dtype {dtype!r} is not supported; give float32 or bfloat16")
    directory, tensors, config = _describe(name)
    return Target(
        name=str(name),
        config=config,
        decoder=load_decoder(config, tensors, jnp.dtype(dtype), mesh),
        tokenizer=_load_tokenizer(directory, config),
        fingerprint=_fingerprint(directory, tensors),
        mesh=mesh,
    )


def read_config(name: str | Path) -> DecoderConfig:
    """The config of a target, from config.json and the headers of the tensor files; raises as `load_target` does."""
    return _describe(name)[2]


class Identity(NamedTuple):
    """A target without its parameters: what tells it from others, and what makes tokens."""

    config: DecoderConfig
    tokenizer: "PreTrainedTokenizerFast"
    fingerprint: str


def identify(name: str | Path) -> Identity:
    """Who a target is, from its small files and a few pages of the large ones; raises as `load_target` does."""
    directory, tensors, config = _describe(name)
    return Identity(config, _load_tokenizer(directory, config), _fingerprint(directory, tensors))


def _describe(name: str | Path) -> tuple[Path, TensorFiles, DecoderConfig]:
    directory = _find(str(name))
    tensors = TensorFiles.open(directory)
    raw = read_object(inside(directory, "config.json", _A_TARGET), _A_TARGET)
    config = DecoderConfig.from_hf(raw, has_head=tensors.has_head)
    require_proportion(config, tensors)
    return directory, tensors, config


def check_name(name: str) -> None:
    """Raises `LayerwaveError` for what is no directory and cannot be a hub id; does not ask the hub."""
    if name == MINI or _is_folder(name):
        return
    if os.path.lexists(name) or not _HUB_ID.fullmatch(name):
        raise LayerwaveError(f"{shown(name)} is neither a directory nor a hub id such as Qwen/Qwen3-4B; check the path")


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):  # a name that no path can have
        return False


def _find(name: str) -> Path:
    check_name(name)
    if name == MINI:
        return MINI_FOLDER
    if _is_folder(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LayerwaveError(
            f"{name!r} is not a directory here, and the hub did not give it ({type(error).__name__}); "
            "check the spelling, the network and your access"
        ) from error


@contextmanager
def _without_torch_advice() -> Iterator[None]:
    """transformers warns at import that PyTorch is missing; here it is not needed."""
    logger = logging.getLogger("transformers")

    def not_about_torch(record: logging.LogRecord) -> bool:
        return "PyTorch" not in record.getMessage()

    logger.addFilter(not_about_torch)
    try:
        yield
    finally:
        logger.removeFilter(not_about_torch)


def _load_tokenizer(directory: Path, config: DecoderConfig) -> "PreTrainedTokenizerFast":
    files = [inside(directory, file, _A_TARGET) for file in ("tokenizer.json", "tokenizer.model", "vocab.json")]
    if not any(file.is_file() for file in files):
        raise LayerwaveError(
            f"{directory}: no tokenizer (tokenizer.json, tokenizer.model or vocab.json); copy it beside the weights"
        )
    with _without_torch_advice():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers lets whatever its parsers meet pass through
            raise LayerwaveError(f"{directory}: the tokenizer cannot be loaded ({error}); download it again") from error
    if tokenizer.vocab_size > config.vocab_size:
        raise LayerwaveError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} entries, the model only {config.vocab_size} "
            "embeddings; the tokenizer belongs to another model"
        )
    return tokenizer


def _fingerprint(directory: Path, tensors: TensorFiles) -> str:
    """Digest of the small files, and of each tensor file's size, header and 64 evenly spaced pages.

    Reading 16 GB to name a model would take longer than loading it; fine-tuned weights differ in every page.
    """
    digest = hashlib.sha256()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (directory / file).is_file():
            digest.update((directory / file).read_bytes())
    for path in sorted(set(tensors.files.values())):
        size, page = path.stat().st_size, 4096
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header))
            for i in range(64):
                file.seek(8 + header + i * max(0, size - 8 - header - page) // 63)
                digest.update(file.read(page))
    return digest.hexdigest()
