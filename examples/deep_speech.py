"""Speech to letters: the shape of Deep Speech 2, trained on fifty sentences that a synthesizer speaks.

    pip install 'oocdl[torch]'
    apt-get install espeak-ng          # the synthesizer, on Debian and Ubuntu
    python examples/deep_speech.py

Two convolutions over a short-time spectrum, GRU layers in both directions, and the CTC loss, which needs no
alignment of sound and letters (Amodei et al. 2015, arXiv:1512.02595, smaller here). Nothing is downloaded.
It takes three minutes of processor time within 640 MiB: the loss falls from 11.6 to 0.06, and 45 of the 50
sentences are heard right to the letter. Writes into --workdir: ``speech.zarr``, the run ``speech.run`` and
``heard.zarr`` (the scores of each letter). ``--sound tones`` needs no synthesizer: each letter is two tones.
"""

from __future__ import annotations

import argparse
import io
import itertools
import shutil
import subprocess
import wave
from pathlib import Path

import numpy as np
import torch
import zarr
from torch import Tensor, nn

import oocdl
from oocdl.errors import ResourceError
from oocdl.losses import CTC
from oocdl.optim import Adam

LETTERS = "_ abcdefghijklmnopqrstuvwxyz"
"""Classes; the first is CTC's blank."""
VERBS = ("open", "close", "find", "lift", "paint")
NOUNS = (
    "door",
    "window",
    "red box",
    "garden",
    "blue car",
    "music",
    "table",
    "old map",
    "kitchen",
    "small bird",
)
RATE = 16000
WINDOW, HOP, BANDS = 400, 160, 64
"""Samples of a window (25 ms) and between two (10 ms); bands of frequency."""


class DeepSpeech(nn.Module):
    """[N, 1, frames, bands] -> scores [N, frames / 2, classes]."""

    def __init__(self, channels: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (11, 21), stride=(2, 2), padding=(5, 10), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (11, 11), stride=(1, 2), padding=(5, 5), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )
        width = channels * (BANDS // 4)
        self.layers = nn.GRU(width, hidden, layers, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, len(LETTERS))

    def forward(self, sound: Tensor) -> Tensor:
        features = self.convolutions(sound).transpose(1, 2).flatten(2)
        result: Tensor = self.out(self.layers(features)[0])
        return result


def spoken(text: str, words_per_minute: int) -> np.ndarray:
    """The sound of a text at ``RATE``, by espeak-ng; ResourceError if it is not installed."""
    if shutil.which("espeak-ng") is None:
        raise ResourceError("espeak-ng is not installed: apt-get install espeak-ng, or pass --sound tones")
    words = ["espeak-ng", "--stdout", "-v", "en-us", "-s", str(words_per_minute), text]
    made = subprocess.run(words, capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(made)) as file:
        rate = file.getframerate()
        # The synthesizer does not know the length when it writes the header.
        samples = np.frombuffer(file.readframes(len(made)), "<i2").astype("f4") / 32768
    places = np.arange(0, len(samples) - 1, rate / RATE)
    return np.interp(places, np.arange(len(samples)), samples).astype("f4")


def tones(text: str, words_per_minute: int) -> np.ndarray:
    """Two tones for each letter of a text."""
    length = RATE * 12 // words_per_minute
    times = np.arange(length) / RATE
    parts = [
        np.sin(2 * np.pi * times * (300 + 180 * (place % 6)))
        + np.sin(2 * np.pi * times * (2000 + 500 * (place // 6)))
        for place in map(LETTERS.index, text)
    ]
    return np.concatenate([np.hanning(length) * part for part in parts]).astype("f4")


def spectrum(sound: np.ndarray) -> np.ndarray:
    """Logarithms of the power in bands of the short-time spectrum (frames, bands), mean 0 and deviation 1."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames, 512)[:, 1:]) ** 2
    bands = np.log(power.reshape(len(power), BANDS, -1).mean(2) + 1e-8)
    return ((bands - bands.mean()) / bands.std()).astype("f4")


def write_dataset(path: Path, texts: list[str], kind: str) -> None:
    """Write ``sound`` (samples, frames, bands), ``labels`` padded with -1, and how many frames count."""
    speak = spoken if kind == "espeak" else tones
    found = [spectrum(speak(text, 160)) for text in texts]
    frames = -(-max(map(len, found)) // 2) * 2
    sound = np.stack([np.pad(one, ((0, frames - len(one)), (0, 0))) for one in found])
    longest = max(map(len, texts))
    labels = np.array([[*map(LETTERS.index, text), *[-1] * (longest - len(text))] for text in texts])
    group = zarr.open_group(path, mode="w")
    group.create_array("sound", data=sound, chunks=(1, *sound.shape[1:]))
    group.create_array("labels", data=labels.astype("i2"), chunks=(1, longest))
    # The first convolution halves the frames.
    group.create_array("input_lengths", data=np.array([-(-len(one) // 2) for one in found]), chunks=(1,))


def heard(scores: np.ndarray, frames: int) -> str:
    """Greedy decoding: the best letter of each frame, repetitions once, blanks left out."""
    best = scores[:frames].argmax(1)
    return "".join(LETTERS[letter] for letter, _ in itertools.groupby(best) if letter)


def main() -> None:
    """Speak, train, listen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sound", choices=["espeak", "tones"], default="espeak")
    parser.add_argument("--sentences", type=int, default=50)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=70)
    parser.add_argument("--memory", default="640MiB", help="budget of the process")
    parser.add_argument("--workdir", type=Path, default=Path("deep-speech"))
    args = parser.parse_args()
    folder: Path = args.workdir
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{verb} the {noun}" for noun in NOUNS for verb in VERBS][: args.sentences]
    data = folder / "speech.zarr"
    if not data.exists():  # a run goes on only with the very dataset that it began with
        write_dataset(data, texts, args.sound)
    torch.manual_seed(0)
    net = DeepSpeech(args.channels, args.hidden, args.layers)

    run = oocdl.fit(
        net, data, loss=CTC(zero_infinity=True), optimizer=Adam(lr=1e-3, clip_norm=10.0), epochs=args.epochs,
        batch_size=min(10, len(texts)), memory=args.memory, workdir=folder / "speech.run",
    )  # fmt: skip
    losses = [row["loss"] for row in run.history]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f} in {len(losses)} steps")
    scores = run.predict(data, folder / "heard.zarr", memory=args.memory)["output"]
    frames = np.asarray(zarr.open_group(data, mode="r")["input_lengths"])
    found = [heard(np.asarray(scores[number]), frames[number]) for number in range(len(texts))]
    right = sum(one == text for one, text in zip(found, texts, strict=True))
    for text, one in list(zip(texts, found, strict=True))[::7]:
        print(f"  said '{text}', heard '{one}'")
    print(f"{right} of {len(texts)} sentences heard right to the letter")


if __name__ == "__main__":
    main()
