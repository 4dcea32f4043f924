"""The hyperparameters of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from course_lib.engine.config_keys import REMEDY, ConfigKeys, shown
from course_lib.engine.families import Family, family_of, text_keys
from course_lib.engine.files import is_there, read_json_object, require_model
from course_lib.engine.rope import RopeScaling
from course_lib.errors import CourseError

# Bounds the list of layers that a damaged file could ask for.
MOST_LAYERS = 100_000
MOST_TOKENS = 2**31  # up to which the kernels turn positions into angles


@dataclass(frozen=True)
class MoEConfig:
    """A layer with a mixture of experts: each token goes through the `experts_per_token` best of
    `num_experts`, of width `intermediate_size`; `norm_topk_prob`: their weights are made to sum
    to 1."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix every shape of a model.

    Sizes are counts; `rope_theta` and `rms_norm_eps` are dimensionless; `eos_token_ids` are the
    token ids that end a generation. `family`: the model_type. `qk_norm`: query and key rows are
    normed per head before RoPE. `rope`: how its angles are scaled, None where they are not. `moe`
    holds for the layers not in `dense_layers`. Names are those of Hugging Face's `config.json`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    family: str = "qwen3"
    qk_norm: bool = True
    rope: RopeScaling | None = None
    moe: MoEConfig | None = None
    dense_layers: frozenset[int] = frozenset()

    def moe_of(self, layer: int) -> MoEConfig | None:
        """The experts of a layer, None where it has one SwiGLU."""
        return None if layer in self.dense_layers else self.moe

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read and check `config.json` (and `generation_config.json` where present) in `folder`.

        Raises CourseError naming the file, the key and the remedy for anything that this engine
        would compute wrongly: another architecture or scaling of RoPE, sliding windows, biases.
        """
        require_model(folder)
        path = folder / "config.json"
        raw = read_json_object(path, remedy=REMEDY)
        family = family_of(raw, path)
        keys = text_keys(raw, family, path)
        heads = keys.count("num_attention_heads")
        hidden, layers = keys.count("hidden_size"), keys.count("num_hidden_layers")
        context = keys.count("max_position_embeddings")
        rope_theta, rope = _rope(keys, context)
        moe, dense_layers = (
            _experts(keys, family, layers) if family.experts else (None, frozenset[int]()))
        config = cls(
            vocab_size=keys.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.count("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_key_value_heads(keys, heads),
            head_dim=_head_dim(keys, hidden, heads),
            max_position_embeddings=context,
            rms_norm_eps=keys.positive("rms_norm_eps"),
            rope_theta=rope_theta,
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            eos_token_ids=_eos_token_ids(keys, folder),
            family=raw["model_type"],
            qk_norm=family.qk_norm,
            rope=rope,
            moe=moe,
            dense_layers=dense_layers,
        )
        config.check(path)
        return config

    def check(self, path: Path) -> None:
        """CourseError naming `path`, from which the numbers come, where they contradict."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        problems = []
        if heads % kv_heads:
            problems.append(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd, RoPE turns pairs")
        if self.max_position_embeddings > MOST_TOKENS:
            problems.append(
                f"max_position_embeddings {shown(self.max_position_embeddings)} is above 2^31")
        if self.rope_theta < 1:  # angles would grow beyond what cos and sin are exact for
            problems.append(f"rope_theta {self.rope_theta:g} is below 1")
        if self.rope is not None and self.rope_theta == 1:
            problems.append("rope_theta must be above 1 where RoPE is scaled, got 1")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                problems.append(
                    f"eos_token_id {token} is outside the vocabulary of {self.vocab_size}")
        if self.moe is not None and self.moe.experts_per_token > self.moe.num_experts:
            problems.append(f"num_experts_per_tok {self.moe.experts_per_token} is more than "
                            f"num_experts {self.moe.num_experts}")
        if problems:
            raise CourseError(f"{path}: {problems[0]}: {REMEDY}")


def _key_value_heads(keys: ConfigKeys, heads: int) -> int:
    if "num_key_value_heads" in keys.raw and keys.raw["num_key_value_heads"] is None:
        return heads  # null says "as many as query heads"; left out, it is the family's default
    return keys.count("num_key_value_heads", default=heads)


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    if keys.get("head_dim") is None and hidden % heads:
        raise keys.refuse(
            "hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    return keys.count("head_dim", default=hidden // heads)


def _experts(
    keys: ConfigKeys, family: Family, layers: int
) -> tuple[MoEConfig, frozenset[int]]:
    """The mixture of experts, and the layers that have one SwiGLU instead."""
    if family.defaults.get("norm_topk_prob") and not keys.flag("norm_topk_prob"):
        raise keys.refuse("norm_topk_prob", "must be true in this family")
    moe = MoEConfig(
        num_experts=keys.count("num_experts", "num_local_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob"),
    )
    step = keys.count("decoder_sparse_step")
    dense = set(keys.integers("mlp_only_layers", "a list of layer numbers"))
    if layers > MOST_LAYERS:
        raise keys.refuse("num_hidden_layers", f"{layers} is more than {MOST_LAYERS}")
    if step > 1 or dense:
        dense = {layer for layer in range(layers) if layer in dense or (layer + 1) % step}
    return moe, frozenset(dense)


def _rope(keys: ConfigKeys, context: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of RoPE.

    They stand in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`
    (before), which transformers 5 still prefers where it is there and not empty.
    """
    key = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    parameters = keys.get(key) or {}
    if not isinstance(parameters, dict):
        raise keys.refuse(key, f"must be an object, got {shown(parameters)}")
    for name, value in parameters.items():
        if isinstance(value, dict):
            raise keys.refuse(f"{key}.{name}", "is not supported, RoPE is the same in every layer")
    given = {name: value for name, value in parameters.items() if value is not None}
    base = keys
    if "rope_theta" in given:
        base = ConfigKeys(given, keys.path, {}, f"{keys.place}{key}.")
    theta = base.positive("rope_theta")
    scaling = RopeScaling.from_parameters(given, keys.path, max_position_embeddings=context)
    return theta, scaling


def _eos_token_ids(keys: ConfigKeys, folder: Path) -> tuple[int, ...]:
    """End-of-generation ids: those of `generation_config.json` where it names any."""
    generation = folder / "generation_config.json"
    if is_there(generation):
        raw = read_json_object(generation, remedy=REMEDY)
        if raw.get("eos_token_id") is not None:
            keys = ConfigKeys(raw, generation, {})
    return keys.integers("eos_token_id", "a token id or a list")
