"""The shipped models: exact sizes without allocating them, and real training of small versions."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from checkflow.core.training_step import TrainingStep
from checkflow.planner.model_file.load import list_models, load_training_step

# (shapes of the batch at batch size B = 3, parameters), as the published architectures have them
DEFAULTS: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "alexnet": ([(3, 3, 224, 224), (3,)], 61_100_840),
    "mnasnet": ([(3, 3, 224, 224), (3,)], 2_218_512),
    "resnet18": ([(3, 3, 224, 224), (3,)], 11_689_512),
    "vgg11": ([(3, 3, 224, 224), (3,)], 132_863_336),
    "vit": ([(3, 3, 224, 224), (3,)], 86_567_656),
    "resnet3d": ([(3, 3, 1, 112, 112), (3,)], 33_371_472),
    "transformer": ([(10, 3, 512), (20, 3, 512), (20, 3)], 7_358_464),
    "bert": ([(3, 256), (3,)], 124_055_040 + 768 * 2 + 2),
    "digits": ([(3, 1, 8, 8), (3,)], 522_010),
    "llama": ([(3, 8192), (3, 8192)], 8_030_261_248),
    "dlrm": ([(3, 13), (26, 3, 1), (3,)], 540_677_217),
    "gpt2": ([(3, 1024), (3, 1024)], 124_439_808),
}

SMALL: dict[str, dict[str, Any]] = {
    "alexnet": {"image_size": 64, "classes": 5, "width": 4},
    "mnasnet": {"image_size": 64, "classes": 5, "multiplier": 0.25},
    "resnet18": {"image_size": 32, "classes": 5, "width": 4},
    "vgg11": {"image_size": 32, "classes": 5, "width": 4},
    "vit": {"image_size": 32, "patch_size": 8, "layers": 2, "heads": 2, "width": 16, "classes": 5},
    "resnet3d": {"frames": 2, "image_size": 32, "classes": 5, "width": 4},
    "transformer": {"source_length": 3, "target_length": 4, "width": 16, "hidden": 32},
    "bert": {"length": 8, "vocabulary": 50, "layers": 2, "heads": 2, "width": 16},
    "digits": {"width": 8},
    "llama": {"sequence": 8, "layers": 2, "width": 64, "vocabulary": 50},
    "dlrm": {"width": 4, "lookups": 2, "rows": 10},
    "gpt2": {"length": 8, "vocabulary": 50, "layers": 2, "heads": 2, "width": 16},
}

# Names that users of torchvision know: a checkpoint's keys are these.
KEYS = {
    "alexnet": ["features.0.weight", "features.10.bias", "classifier.6.weight"],
    "mnasnet": ["layers.0.weight", "layers.8.0.layers.0.weight", "layers.15.running_mean", "classifier.1.weight"],
    "resnet18": ["conv1.weight", "layer1.0.bn1.running_mean", "layer4.0.downsample.1.num_batches_tracked", "fc.bias"],
    "vgg11": ["features.0.weight", "features.18.weight", "classifier.6.bias"],
    "vit": [
        "class_token",
        "conv_proj.weight",
        "encoder.pos_embedding",
        "encoder.layers.encoder_layer_11.self_attention.in_proj_weight",
        "encoder.layers.encoder_layer_0.mlp.3.bias",
        "encoder.ln.weight",
        "heads.head.weight",
    ],
    "resnet3d": ["stem.0.weight", "layer1.0.conv1.1.running_var", "layer2.0.downsample.0.weight", "fc.weight"],
    "transformer": ["encoder.layers.0.self_attn.in_proj_weight", "encoder.norm.weight", "decoder.layers.0.norm3.bias"],
    "bert": ["encoder.embeddings.word_embeddings.weight", "encoder.layers.11.attention.query.bias"],
    "digits": ["features.0.weight", "features.1.running_mean", "classifier.weight"],
    "llama": ["tok_embeddings.weight", "layers.31.attention.wq.weight", "layers.0.ffn_norm.weight", "output.weight"],
    "dlrm": ["embeddings.tables.25.weight", "bottom.0.weight", "top.4.bias"],
    "gpt2": [
        "transformer.wte.weight",
        "transformer.h.11.attn.c_attn.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ],
}


def test_every_shipped_model_is_covered_here() -> None:
    assert list_models() == sorted(DEFAULTS) == sorted(SMALL) == sorted(KEYS)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_default_configuration_is_exact_and_allocates_nothing(name: str) -> None:
    shapes, parameters = DEFAULTS[name]
    loaded, step = load_training_step(name, batch_size=3)
    assert loaded == name
    (model,) = step.models.values()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert [tuple(tensor.shape) for tensor in step.batch] == shapes
    assert {tensor.device.type for tensor in [*model.state_dict().values(), *step.batch]} == {"meta"}
    assert set(KEYS[name]) <= set(model.state_dict())


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_default_optimizer(name: str) -> None:
    optimizers = load_training_step(name)[1].optimizers
    assert list(optimizers) == (["networks", "tables"] if name == "dlrm" else ["optimizer"])
    other = {"digits": torch.optim.Adam, "llama": torch.optim.AdamW, "gpt2": torch.optim.AdamW}
    for optimizer in optimizers.values():
        assert type(optimizer) is other.get(name, torch.optim.SGD)
        if name not in other:
            assert {(group["lr"], group["momentum"]) for group in optimizer.param_groups} == {(0.1, 0)}


def _build(name: str, **settings: Any) -> TrainingStep:
    step = importlib.import_module(f"checkflow.models.{name}").build(**settings)
    assert isinstance(step, TrainingStep)
    return step


@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_version_trains(name: str) -> None:
    torch.manual_seed(0)
    step = _build(name, batch_size=2, **SMALL[name])
    (model,) = step.models.values()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loss = step.run(step.batch)
    assert loss.isfinite()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        gradient = parameter.grad.to_dense()
        assert gradient.isfinite().all(), key
    for key, buffer in model.named_buffers():
        if key not in before:  # a table of constants
            continue
        assert not torch.equal(buffer, before[key]), f"{key} should follow the batch"
    changed = [key for key, value in model.named_parameters() if not torch.equal(value, before[key])]
    assert len(changed) > len(before) / 4


def test_loss_falls_when_one_batch_is_learned_by_heart() -> None:
    torch.manual_seed(0)
    step = _build("digits", batch_size=8, width=8, dropout=0.0)
    losses = [step.run(step.batch).item() for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_bert_attention_mixes_tokens_and_respects_dropout() -> None:
    torch.manual_seed(0)
    step = _build("bert", batch_size=1, **SMALL["bert"])
    (model,) = step.models.values()
    tokens = step.batch[0]
    other = tokens.clone()
    other[0, -1] = 2 if tokens[0, -1] != 2 else 3
    assert not torch.equal(model(tokens), model(tokens)), "dropout is on while training"
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert not torch.allclose(model(tokens), model(other), atol=1e-7), (
        "the last token must reach the first one's logits"
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_gpt2_sees_the_past_alone_and_where_it_is(mixed: bool) -> None:
    torch.manual_seed(0)
    step = _build("gpt2", batch_size=1, dropout=0.0, mixed=mixed, **SMALL["gpt2"])
    assert step.run(step.batch).dtype == torch.float32  # cross entropy is, under autocast too
    (model,) = step.models.values()
    tokens = torch.full((1, 8), 7)
    logits = model(tokens)
    assert not torch.allclose(logits[0, 0], logits[0, 1], atol=1e-6)  # the same token elsewhere
    tokens[0, 5] = 8
    changed = (model(tokens) - logits).abs().amax(-1)[0] > 1e-6
    assert changed.tolist() == [False] * 5 + [True] * 3


def test_gpt2_decays_matrices_alone_and_its_output_layer_is_its_embedding() -> None:
    step = _build("gpt2", batch_size=1, **SMALL["gpt2"])
    (model,), (optimizer,) = step.models.values(), step.optimizers.values()
    assert model.lm_head.weight is model.transformer.wte.weight
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.1 if p.dim() > 1 else 0.0 for name, p in model.named_parameters()
    }


def test_vit_sees_positions() -> None:
    torch.manual_seed(0)
    step = _build("vit", batch_size=1, **SMALL["vit"])
    (model,) = step.models.values()
    images = step.batch[0]
    swapped = torch.cat([images[..., 8:16], images[..., :8], images[..., 16:]], dim=-1)
    assert not torch.allclose(model(images), model(swapped), atol=1e-6)
