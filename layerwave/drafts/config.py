"""What a draft depends on besides its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from layerwave.errors import LayerwaveError
from layerwave.files.reading import typed
from layerwave.selection.sets import check_count, check_layers
from layerwave.targets import DecoderConfig
from layerwave.targets.rope import Rope

_COUNTS = (
    "target_hidden_size hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size draft_vocab_size "
    "max_positions"
).split()


def draft_name(layers: Sequence[int]) -> str:
    """What a draft is called in folders and tables, as `5-23-34`."""
    return "-".join(map(str, layers))


_ROPES = ("default", "linear", "llama3")


def _is_plain(rope: Rope) -> bool:
    """Whether it is one that every consumer of a draft turns alike."""
    return rope.kind in _ROPES and rope.partial == 1.0


@dataclass(frozen=True)
class DraftConfig:
    """Static description of an EAGLE-3 draft.

    Raises `LayerwaveError` for layers that the target does not have, sizes that do not fit together, and options that
    exclude each other.
    """

    layers: tuple[int, ...]
    """Outputs of target layers that the draft reads, 0-based; kept ascending, which is the order of the slices of fc's
    input."""
    num_target_layers: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    norm_before_residual: bool = False
    """Add the attention to the normed features; False (EAGLE-3): to the features as they came."""
    norm_before_fc: bool = False
    """Norm the concatenated states before fc."""
    fc_norm: bool = False
    """Norm each layer's states by themselves before fc (EAGLE-3.1)."""
    norm_output: bool = False
    """Feed the final-normed output to the next step (EAGLE-3.1); False (EAGLE-3): the output before the norm."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "layers", check_layers(self.layers, check_count("num_target_layers", self.num_target_layers))
        )
        for name in _COUNTS:
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.head_dim % 2 or not 0 < self.norm_eps < 1:
            raise LayerwaveError(
                f"a draft with heads of {self.head_dim} channels and norm_eps {self.norm_eps}: expected an even number "
                "(pairs of channels turn) and one between 0 and 1"
            )
        if self.num_heads % self.num_kv_heads:
            raise LayerwaveError(
                f"a draft with {self.num_heads} query heads and {self.num_kv_heads} key heads: the first must be a "
                "multiple of the second"
            )
        if not _is_plain(self.rope):
            raise LayerwaveError(
                f"a draft's RoPE of type {self.rope.kind!r} that turns {self.rope.partial:.0%} of the channels is not "
                f"supported; supported: {', '.join(_ROPES)}, all channels"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise LayerwaveError(
                f"the draft vocabulary has {self.draft_vocab_size} tokens, the target's only {self.vocab_size}: "
                "choose at most as many"
            )
        if self.norm_before_fc and self.fc_norm:
            raise LayerwaveError("norm_before_fc and fc_norm are both set, but norm the same input: choose one")

    @classmethod
    def from_target(
        cls, target: DecoderConfig, layers: tuple[int, ...], draft_vocab_size: int, **changes: Any
    ) -> "DraftConfig":
        """The draft whose sizes and rotation are the target's, up to `changes`.

        It is a plain Llama layer, whatever the target's layers are: its MLP has the size of a dense one, it sees all
        positions, and of a rotation that its consumers would not turn alike it takes the base only.
        """
        inherited = {
            name: getattr(target, name)
            for name in "hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size max_positions "
            "norm_eps".split()
        }
        return cls(
            **{
                "layers": layers,
                "num_target_layers": target.num_layers,
                "target_hidden_size": target.hidden_size,
                "draft_vocab_size": draft_vocab_size,
                "rope": target.rope if _is_plain(target.rope) else Rope(target.rope.theta),
                **inherited,
                **changes,
            }
        )

    def layer_config(self) -> DecoderConfig:
        """The draft's one layer as a plain decoder's: its parts and its cache are built from this."""
        return DecoderConfig(
            model_type="llama",
            num_layers=1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.draft_vocab_size,
            max_positions=self.max_positions,
            norm_eps=self.norm_eps,
            rope=self.rope,
            tie_embeddings=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "DraftConfig":
        """Reads what `to_json` gave. Raises `LayerwaveError` for keys that are missing or not known."""
        if missing := sorted({field.name for field in fields(cls)} - raw.keys()):
            raise LayerwaveError(f"the draft's config lacks {missing}: save the draft again with this version")
        try:
            return typed(cls, raw, "config")
        except LayerwaveError as error:
            raise LayerwaveError(f"the draft's config cannot be read ({error}): save the draft again") from None
