"""Public training throughputs of single cards of the catalogue, each with where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.throughput_models import Layout, Precision

# Repositories on GitHub; a row names the file, table or log, and what it looks for there.
LAMBDA = "lambdal/deeplearning-benchmark"  # NVIDIA's DeepLearningExamples, run by Lambda
LAMBDA_TF = "lambdal/lambda-tensorflow-benchmark"  # tf_cnn_benchmarks, synthetic images, run by Lambda
NVIDIA = "NVIDIA/DeepLearningExamples"
TIMM = "huggingface/pytorch-image-models"
MOSAIC = "mosaicml/llm-foundry"


@dataclass(frozen=True)
class Published:
    """``batch_size``: of one forward pass; ``per_second``: images, sequences or tokens, as the task says."""

    card: str
    task: str
    precision: Precision
    batch_size: int
    per_second: float
    source: str
    micro_batches: int = 1
    layout: Layout = "NCHW"


def _lambda(card: str, system: str, *rows: tuple[str, Precision, int, float]) -> list[Published]:
    """Lambda's runs of ResNet-50 (layout NCHW) and of BERT on SQuAD (384 tokens): a log a run, the last of several."""
    logs = {
        "ResNet-50 v1.5": "resnet50",
        "BERT-base, SQuAD": "bert_base_squad",
        "BERT-large, SQuAD": "bert_large_squad",
    }
    folder = "results_v2" if system.endswith("_v2") else "results"
    found = []
    for task, precision, batch_size, per_second in rows:
        half = "AMP" if logs[task] == "resnet50" else "FP16"
        name = f"PyTorch_{logs[task]}_{half if precision.startswith('float16') else 'FP32'}"
        source = f"{LAMBDA}, pytorch/{folder}/{system}/{name}"
        found.append(Published(card, task, precision, batch_size, per_second, source))
    return found


def _lambda_tf(card: str, row: str, *rows: tuple[str, Precision, int, float]) -> list[Published]:
    columns = {"AlexNet": "alexnet", "VGG-16": "vgg16", "ResNet-50 v1": "resnet50", "ResNet-152 v1": "resnet152"}
    return [
        Published(card, task, precision, batch_size, per_second,
                  f"{LAMBDA_TF}, tf-train-throughput-{'fp16' if precision == 'float16' else 'fp32'}.csv, row {row}, "
                  f"column {columns[task]}; batch: tf-train-bs-….csv")
        for task, precision, batch_size, per_second in rows
    ]  # fmt: skip


def _timm(layout: Layout, *rows: tuple[str, str, int, float]) -> list[Published]:
    file = f"results/benchmark-train-amp-{layout.lower()}-pt112-cu113-rtx3090.csv"
    return [
        Published("RTX 3090", task, "float16", batch_size, per_second, f"{TIMM}, {file}, row {model}", layout=layout)
        for task, model, batch_size, per_second in rows
    ]


def _mosaic(card: str, heading: str, *rows: tuple[str, int, int, float]) -> list[Published]:
    """Per GPU of eight in one machine, which shard what is small against the batch: communication hides behind it."""
    file = "scripts/train/benchmarking/README.md"
    return [
        Published(card, task, "bfloat16", batch_size, per_second,
                  f"{MOSAIC}, {file}, {heading}, row {task.removeprefix('MPT-').lower()}, SeqLen 2048, 8 GPUs",
                  micro_batches)
        for task, batch_size, micro_batches, per_second in rows
    ]  # fmt: skip


def _nvidia(card: str, readme: str, table: str, *rows: tuple[str, Precision, int, float]) -> list[Published]:
    """NVIDIA's own runs; images in half precision lie pixel by pixel (configs.yml: memory_format)."""
    return [
        Published(card, task, precision, batch_size, per_second, f"{NVIDIA}, {readme}/README.md, {table}, 1 GPU",
                  layout="NHWC" if precision == "float16" else "NCHW")
        for task, precision, batch_size, per_second in rows
    ]  # fmt: skip


_RESNET = "PyTorch/Classification/ConvNets/resnet50v1.5"
_RESNET_TF = "TensorFlow/Classification/ConvNets/resnet50v1.5"
_BERT = "PyTorch/LanguageModeling/BERT"

PUBLISHED: tuple[Published, ...] = (
    *_lambda_tf(
        "GTX 1080 Ti", "GTX 1080Ti",
        ("AlexNet", "float32", 512, 2636),
        ("AlexNet", "float16", 1024, 2914),
        ("VGG-16", "float32", 56, 125),
        ("VGG-16", "float16", 128, 148),
        ("ResNet-50 v1", "float32", 64, 209),
        ("ResNet-50 v1", "float16", 128, 273),
        ("ResNet-152 v1", "float32", 32, 83),
    ),
    *_lambda(
        "GTX 1080 Ti", "1080Ti",
        ("ResNet-50 v1.5", "float32", 100, 196.18),
        ("BERT-base, SQuAD", "float32", 10, 28.0),
        ("BERT-base, SQuAD", "float16 model", 20, 35.0),
        ("BERT-large, SQuAD", "float32", 2, 5.14),
    ),
    *_lambda_tf(
        "V100", "V100 32GB",
        ("AlexNet", "float32", 1536, 5132),
        ("AlexNet", "float16", 3072, 9319),
        ("VGG-16", "float32", 192, 249),
        ("VGG-16", "float16", 384, 456),
        ("ResNet-152 v1", "float32", 96, 167),
        ("ResNet-152 v1", "float16", 192, 518),
    ),
    *_lambda(
        "V100", "LambdaCloud_V100_16GB_v1",
        ("ResNet-50 v1.5", "float32", 128, 369.36),
        ("ResNet-50 v1.5", "float16", 256, 832.67),
        ("BERT-base, SQuAD", "float32", 24, 42.70),
        ("BERT-base, SQuAD", "float16 model", 48, 189.94),
        ("BERT-large, SQuAD", "float32", 8, 12.42),
        ("BERT-large, SQuAD", "float16 model", 16, 57.87),
    ),
    *_nvidia(
        "V100", _RESNET, "DGX-1 16GB (8x V100 16GB)",
        ("ResNet-50 v1.5", "float32", 112, 367),
        ("ResNet-50 v1.5", "float16", 256, 1200),
    ),
    *_nvidia(
        "V100", _BERT, "Fine-tuning NVIDIA DGX-1 With 32G, SQuAD",
        ("BERT-large, SQuAD", "float32", 8, 12),
        ("BERT-large, SQuAD", "float16 model", 16, 52),
    ),
    *_lambda_tf(
        "RTX 3090", "RTX 3090",
        ("AlexNet", "tf32", 896, 6744),
        ("AlexNet", "float16", 1920, 9473),
        ("VGG-16", "tf32", 48, 325),
        ("VGG-16", "float16", 96, 550),
        ("ResNet-152 v1", "tf32", 48, 212),
        ("ResNet-152 v1", "float16", 64, 468),
    ),
    *_lambda(
        "RTX 3090", "3090_v1",
        ("ResNet-50 v1.5", "tf32", 224, 513.04),
        ("ResNet-50 v1.5", "float16", 448, 905.05),
        ("BERT-base, SQuAD", "tf32", 48, 85.68),
        ("BERT-base, SQuAD", "float16 model", 96, 172.20),
        ("BERT-large, SQuAD", "tf32", 16, 24.82),
        ("BERT-large, SQuAD", "float16 model", 28, 52.57),
    ),
    *_timm(
        "NCHW",
        ("ResNet-50 v1.5", "resnet50", 512, 826.06),
        ("MNASNet 1.0", "mnasnet_100", 512, 2053.84),
    ),
    *_timm(
        "NHWC",
        ("ResNet-18", "resnet18", 512, 3481.78),
        ("ResNet-50 v1.5", "resnet50", 512, 1218.01),
        ("VGG-11", "vgg11", 512, 954.03),
        ("VGG-16", "vgg16", 384, 546.06),
        ("ViT-B/16", "vit_base_patch16_224", 192, 392.99),
        ("MNASNet 1.0", "mnasnet_100", 512, 2929.31),
    ),
    *_lambda(
        "A100 40GB", "A100_40GB_SXM4_v1",
        ("ResNet-50 v1.5", "tf32", 360, 928.02),
        ("ResNet-50 v1.5", "float16", 720, 1454.74),
        ("BERT-base, SQuAD", "tf32", 80, 199.97),
        ("BERT-base, SQuAD", "float16 model", 160, 416.78),
        ("BERT-large, SQuAD", "tf32", 28, 59.45),
        ("BERT-large, SQuAD", "float16 model", 48, 133.59),
    ),
    *_nvidia(
        "A100 40GB", _RESNET_TF, "DGX A100 (8x A100 40GB)",
        ("ResNet-50 v1.5", "tf32", 256, 909),
        ("ResNet-50 v1.5", "float16", 256, 2375),
    ),
    *_mosaic(
        "A100 40GB", "A100 40GB",
        ("MPT-125M", 26, 3, 136334),
        ("MPT-350M", 16, 4, 55995),
        ("MPT-760M", 12, 4, 30173),
    ),
    *_lambda(
        "A100 80GB", "A100_80GB_SXM4_v1",
        ("ResNet-50 v1.5", "tf32", 640, 1066.76),
        ("ResNet-50 v1.5", "float16", 1280, 1582.19),
        ("BERT-base, SQuAD", "tf32", 172, 239.78),
        ("BERT-base, SQuAD", "float16 model", 320, 443.72),
        ("BERT-large, SQuAD", "tf32", 64, 75.59),
        ("BERT-large, SQuAD", "float16 model", 112, 152.85),
    ),
    *_nvidia(
        "A100 80GB", _RESNET, "DGX A100 (8x A100 80GB)",
        ("ResNet-50 v1.5", "tf32", 256, 938),
        ("ResNet-50 v1.5", "float16", 256, 2470),
    ),
    *_nvidia(
        "A100 80GB", _BERT, "Fine-tuning NVIDIA DGX A100 (8x A100 80GB), SQuAD",
        ("BERT-large, SQuAD", "tf32", 32, 61.5),
        ("BERT-large, SQuAD", "float16 model", 32, 110.5),
    ),
    *_mosaic(
        "A100 80GB", "A100 80GB",
        ("MPT-125M", 32, 2, 141737),
        ("MPT-350M", 32, 2, 58782),
        ("MPT-1B", 14, 4, 20513),
    ),
    *_lambda(
        "H100", "LambdaOD_1x_Texas_1xH100_80GB_SXM5_192-222-52-60_v2",
        ("ResNet-50 v1.5", "tf32", 640, 1895.54),
        ("ResNet-50 v1.5", "float16", 1280, 2790.83),
        ("BERT-base, SQuAD", "tf32", 172, 439.22),
        ("BERT-base, SQuAD", "float16 model", 320, 851.46),
        ("BERT-large, SQuAD", "tf32", 64, 149.85),
        ("BERT-large, SQuAD", "float16 model", 112, 311.28),
    ),
    *_mosaic(
        "H100", "H100 80GB BF16",
        ("MPT-760M", 24, 2, 63147),
        ("MPT-1B", 14, 1, 45455),
    ),
    *_lambda(
        "H200", "LambdaBM_ENG04_1xH200_140GB_SXM_h200_v2",
        ("ResNet-50 v1.5", "tf32", 1280, 2258.99),
        ("ResNet-50 v1.5", "float16", 2560, 3078.10),
        ("BERT-base, SQuAD", "tf32", 296, 517.06),
        ("BERT-base, SQuAD", "float16 model", 592, 931.96),
        ("BERT-large, SQuAD", "tf32", 96, 180.75),
        ("BERT-large, SQuAD", "float16 model", 192, 349.54),
    ),
)  # fmt: skip
