import pytest

from compressor.attribution.tracing import parts_of
from compressor.model.architecture import discover
from compressor.model.moe_layer import layers_by_decoder_layer
from tests.support import zoo


def kinds(name: str, decoder_layer: int) -> dict[str, str]:
    model = zoo.skeleton(name)
    architecture = discover(model.config, model)
    full = architecture.decoder_layers[decoder_layer]
    own = layers_by_decoder_layer(architecture.layers).get(full, ())
    found = parts_of(full, model.get_submodule(full), own)
    return {part.removeprefix(f"{full}."): kind for part, kind in found.items()}


@pytest.mark.parametrize(
    ("name", "decoder_layer", "expected"),
    [
        ("mixtral", 0, {"self_attn": "attention", "mlp.experts": "expert"}),
        ("deepseek_v3", 0, {"self_attn": "attention", "mlp": "mlp"}),
        ("deepseek_v3", 1, {"self_attn": "attention", "mlp.experts": "expert", "mlp.shared_experts": "shared"}),
        ("gemma4", 0, {"self_attn": "attention", "mlp": "shared", "experts": "expert"}),
        ("nemotron_h", 0, {"mixer": "attention"}),  # a state-space mixer
        ("nemotron_h", 1, {"mixer.experts": "expert", "mixer.shared_experts": "shared"}),
        ("nemotron_h", 3, {"mixer": "mlp"}),
        ("jamba", 0, {"mamba": "attention", "feed_forward": "mlp"}),
        ("qwen3_next", 1, {"linear_attn": "attention", "mlp.experts": "expert", "mlp.shared_expert": "shared"}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_parts_are_what_writes_to_the_stream(name: str, decoder_layer: int, expected: dict[str, str]) -> None:
    assert kinds(name, decoder_layer) == expected
