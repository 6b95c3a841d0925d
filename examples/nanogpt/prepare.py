"""Text to numbers for a character-level model, as nanoGPT's data/shakespeare_char/prepare.py does it."""

import os

import numpy as np


def prepare(path, folder):
    """Write train.bin and val.bin (16 bits a character) of a text file to a folder; returns how many characters differ.

    The last tenth of the text is for validation.
    """
    with open(path, encoding="utf-8") as f:
        data = f.read()
    chars = sorted(set(data))
    numbers = {char: number for number, char in enumerate(chars)}
    ids = np.array([numbers[char] for char in data], dtype=np.uint16)
    border = len(ids) * 9 // 10
    os.makedirs(folder, exist_ok=True)
    ids[:border].tofile(os.path.join(folder, "train.bin"))
    ids[border:].tofile(os.path.join(folder, "val.bin"))
    print(f"{len(data):,} characters, {len(chars)} of them different: train has {border:,}, val {len(ids) - border:,}")
    return len(chars)
