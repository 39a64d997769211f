"""What arXiv 2306.11800v3 prints, to stand beside what is measured here."""

from __future__ import annotations

RECOVERY = {
    "ResNet-152": {"cnr": (0.36, 5.71, 0.61), "qd": (-0.09, 11.82, 0.11), "inshrinkerator": (0.50, 39.09, 0.35)},
    "ViT-L32": {"cnr": (-0.21, 7.82, 0.96), "qd": (0.12, 16.31, 0.18), "inshrinkerator": (-0.46, 26.19, 0.51)},
    "BERT-base": {"cnr": (3.97, 6.78, 1.03), "qd": None, "inshrinkerator": (0.80, 29.25, 0.58)},
    "GPT-2 M": {"cnr": (0.25, 6.35, 0.55), "qd": (1.10, 22.15, 0.10), "inshrinkerator": (0.61, 29.81, 0.32)},
}
"""Ten restores, threshold .05: degradation in %, ratio of the weights, overhead in %. None: training failed."""

RESTORES = {5: 0.16, 10: 0.50, 20: 1.1}
"""ResNet-152, threshold .05: degradation in % by number of restores."""

THRESHOLDS = {0.01: (0.0, 21.82), 0.05: (0.50, 39.09)}
"""ResNet-152, ten restores: degradation in % and ratio by threshold."""

TRANSFER = {
    "BERT-L, SST-2 %": {"none": (None, 93.2), "cnr": (4.57, 92.9), "qd": (4.00, 93.0), "inshrinkerator": (11.32, 93.3)},
    "BERT-L, MNLI %": {"none": (None, 85.9), "cnr": (4.57, 86.0), "qd": (4.00, 86.0), "inshrinkerator": (11.32, 85.9)},
    "Pythia 1B, Alpaca loss": {
        "none": (None, 0.894),
        "cnr": (5.33, 0.910),
        "qd": (4.57, 0.906),
        "inshrinkerator": (9.99, 0.919),
    },
}
"""Threshold .05, no delta: ratio, and quality after fine-tuning."""

BINS = {
    "ResNet18": ((42.84, None, None, 21.25), (33.75, 35.51, 33.12, 16.85), (23.55, 23.25, 17.50, 10.19)),
    "ResNet50": ((46.36, None, None, 21.39), (35.07, 53.65, 31.78, 14.36), (23.06, 33.69, 20.12, 8.24)),
    "ResNet152": ((59.32, None, None, 20.18), (40.71, None, None, 11.92), (26.74, 39.36, None, 7.20)),
    "BERT-base": ((None, None, None, 54.30), (81.45, None, None, 22.75), (43.18, 53.10, None, 12.74)),
    "GPT-2 M": ((106.86, None, None, 54.71), (47.71, 60.17, None, 16.19), (24.60, 31.14, None, 9.08)),
}
"""Mean bins over ten checkpoints at .1, 1 and 5 %: CNR, QD, GOBO, Inshrinkerator. None: no such setting, or no time."""

CLUSTERING = {
    "ResNet-152": (60.2, 1.160),
    "ViT-L32": (306.5, 1.140),
    "BERT-base": (110.0, 0.411),
    "GPT-2 M": (335.0, 0.819),
}
"""Million parameters, and seconds of clustering with 32 bins on an A40."""

# Delta coding of ResNet-152's checkpoints: the ratio over the run, and the largest of one checkpoint.
ABLATION = {"Huffman": (25, 30), "+ run lengths": (28, 79), "+ rearranged": (39, 366)}
